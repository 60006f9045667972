"""Benchmark of the streaming client: CPU microseconds a chunk, beside other load generators in one run.

    .venv/bin/python tests/benchmarks/bench_client.py [--vllm PYTHON] [--aiperf COMMAND] [--guidellm COMMAND]
        [--tokenizer DIR] [--repeats N] [--align] [--only NAME,...] [--json OUT.json]

PYTHON is the interpreter of an environment with vLLM, COMMAND the program in an environment of its own; what
is not named is not measured. `--tokenizer` (default: the demo target) is what those three load for prompts.

The server is `tests/fake_server.py`: every answer has 64 chunks of 4 tokens, 20 ms apart. Each client sends
requests at concurrency 128, twice: first few, then many. The difference of its CPU seconds (user and system,
its whole process tree) over the difference of the chunks that the server sent is its cost of a chunk: the
start drops out, the cost of requests stays in. Start-up is the CPU of a run of one request with one chunk.
Clients take turns, so that a drift of the machine favours nobody; the median over repeats counts.

Beside it: by how much the client's mean TTFT exceeds the truth (first chunk sent minus request received, by
the server's clock), where the client tells the TTFT of every request.

Not a test: nothing fails on a slow machine. Read the ratios, not the microseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

_TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_TESTS))

from fake_server import FakeServer  # noqa: E402

CONCURRENCY = 128
CHUNKS = 64
TOKENS_PER_CHUNK = 4
GAP_S = 0.020
FEW, MANY = 128, 640
LIMIT_S = 240.0
_SUBREAPER = 36  # prctl: orphans of the process tree come to this process, so that their CPU is counted


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one client: what it must do and where it may write."""

    url: str
    port: int
    num_requests: int
    num_chunks: int
    folder: Path

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return min(CONCURRENCY, self.num_requests)


@dataclass(frozen=True, slots=True)
class Start:
    """How a client is started: command, standard input, variables added to the environment."""

    command: list[str]
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    ttft_s: Callable[[Job, bytes], list[float]] | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took."""

    cpu_s: float
    wall_s: float
    num_chunks: int
    ttft_excess_s: float | None


def prompt(i: int) -> str:
    """A prompt of 32 words that no other request has."""
    return " ".join([f"request {i}:", *(f"word{(i * 31 + j) % 997}" for j in range(30))])


def body(i: int, num_chunks: int, *, ids: bool) -> dict[str, Any]:
    """A request as specnb sends it, or the same without token ids for the bare reader's sake of equality."""
    return {
        "model": "fake-model",
        "messages": [{"role": "user", "content": prompt(i)}],
        "max_completion_tokens": num_chunks * TOKENS_PER_CHUNK,
        "temperature": 0.0,
        "seed": i,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": ids,
    }


def own_reader(program: str, *, ids: bool) -> Callable[[Job], Start]:
    """`bare_reader.py` or `client_driver.py`."""

    def start(job: Job) -> Start:
        bodies = [body(i, job.num_chunks, ids=ids) for i in range(job.num_requests)]
        order = {
            "port": job.port,
            "path": "/v1/chat/completions",
            "bodies": bodies,
            "concurrency": job.concurrency,
            "parse": program == "client_driver.py",
            "keep_chunks": False,
        }

        def ttft_s(job: Job, stdout: bytes) -> list[float]:
            rows = json.loads(stdout)["requests"]
            return [row["first_token_s"] - row["sent_s"] for row in rows]

        return Start(
            [sys.executable, str(_TESTS / program)],
            json.dumps(order).encode(),
            ttft_s=ttft_s if program == "client_driver.py" else None,
        )

    return start


def specnb_run(job: Job) -> Start:
    """The whole command: `specnb run` on a plan that attaches to the server, run directory included."""
    plan = {
        "name": "bench-client",
        "target": {"model": "fake-model"},
        "engine": {"kind": "openai", "endpoint": "chat"},
        "arms": [{"name": "baseline", "url": job.url}],
        "workload": {"set": str(job.folder / "prompts.jsonl"), "prompts_per_cell": job.num_requests},
        "sampling": [
            {"name": "greedy", "temperature": 0, "max_tokens": job.num_chunks * TOKENS_PER_CHUNK, "seed": 0}
        ],
        "load": {"concurrency": [job.concurrency], "warmup_requests": 0},
    }
    (job.folder / "plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    lines = [
        {"id": f"p{i}", "prompt": prompt(i), "task": "bench", "entropy_tier": "low", "length_tier": "short"}
        for i in range(job.num_requests)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (job.folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    command = [str(Path(sys.executable).with_name("specnb")), "run", str(job.folder / "plan.yaml")]
    return Start([*command, "--out", str(job.folder / "runs")])


def vllm_bench(python: str, tokenizer: str) -> Callable[[Job], Start]:
    """`vllm bench serve`, started as a module: the console script needs a distribution named vllm."""
    program = (
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "p = P(); add_cli_args(p); main(p.parse_args())"
    )

    def start(job: Job) -> Start:
        options = {
            "backend": "openai-chat",
            "endpoint": "/v1/chat/completions",
            "base-url": job.url,
            "model": "fake-model",
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": 32,
            "random-output-len": job.num_chunks * TOKENS_PER_CHUNK,
            "num-prompts": job.num_requests,
            "max-concurrency": job.concurrency,
            "ready-check-timeout-sec": 0,
            "result-dir": job.folder,
            "result-filename": "result.json",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags = ["--disable-tqdm", "--save-result", "--save-detailed"]

        def ttft_s(job: Job, stdout: bytes) -> list[float]:
            return list(json.loads((job.folder / "result.json").read_text(encoding="utf-8"))["ttfts"])

        return Start(
            [python, "-c", program, *arguments, *flags],
            env={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            ttft_s=ttft_s,
        )

    return start


def aiperf(command: str, tokenizer: str) -> Callable[[Job], Start]:
    """`aiperf profile`, its interface and server metrics off."""

    def start(job: Job) -> Start:
        options = {
            "model": "fake-model",
            "url": job.url,
            "endpoint-type": "chat",
            "concurrency": job.concurrency,
            "request-count": job.num_requests,
            "tokenizer": tokenizer,
            "isl": 32,
            "osl": job.num_chunks * TOKENS_PER_CHUNK,
            "num-dataset-entries": job.concurrency,
            "ui": "none",
            "artifact-dir": job.folder,
            "random-seed": 0,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags = ["--streaming", "--no-server-metrics", "--no-gpu-telemetry"]
        return Start([command, "profile", *arguments, *flags])

    return start


def guidellm(command: str, tokenizer: str) -> Callable[[Job], Start]:
    """`guidellm run` with its progress display off."""

    def start(job: Job) -> Start:
        options = {
            "backend": f"kind=openai_http,target={job.url},model=fake-model",
            "profile": f"kind=concurrent,streams={job.concurrency}",
            "constraint": f"kind=max_requests,count={job.num_requests}",
            "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
            "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={job.num_chunks * TOKENS_PER_CHUNK}",
            "output": f"kind=json,path={job.folder / 'result.json'}",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return Start([command, "run", *arguments, "--disable-progress"], env={"HF_HUB_OFFLINE": "1"})

    return start


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(make: Callable[[Job], Start], num_requests: int, num_chunks: int, *, align: bool) -> Cost:
    """Runs a client once against a server of its own.

    Raises
    ------
    RuntimeError
        The client failed or did not finish, or a request did not run to its end; says its last line.
    """
    defaults = {
        "num_chunks": num_chunks,
        "tokens_per_chunk": TOKENS_PER_CHUNK,
        "gap_s": GAP_S,
        "prefill_s": GAP_S,
        "align_s": GAP_S if align else 0.0,
        "jitter_s": 0.0 if align else GAP_S,
    }
    with FakeServer(defaults=defaults) as server, tempfile.TemporaryDirectory() as folder:
        job = Job(server.url, server.port, num_requests, num_chunks, Path(folder))
        start = make(job)
        before_s, began_s = _children_cpu_s(), time.perf_counter()
        with (job.folder / "stdout").open("w+b") as out, (job.folder / "stderr").open("w+b") as err:
            process = subprocess.Popen(
                start.command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, **start.env},
            )
            try:
                process.communicate(start.stdin, timeout=LIMIT_S)
            except subprocess.TimeoutExpired as error:
                process.kill()
                process.wait()
                raise RuntimeError(f"not finished after {LIMIT_S:.0f} s") from error
            wall_s = time.perf_counter() - began_s
            _reap_orphans(server.pid)
            cpu_s = _children_cpu_s() - before_s
            out.seek(0)
            err.seek(0)
            stdout, stderr = out.read(), err.read()
        if process.returncode != 0:
            last = (stderr or stdout).decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"exit code {process.returncode}: {''.join(last)[:200]}")
        records = server.records()
        sent = [record for record in records if record["ended"] == "end" and record["sent_s"]]
        if len(sent) < num_requests:
            raise RuntimeError(f"{len(sent)} of {num_requests} requests ran to their end")
        truth = statistics.fmean(record["sent_s"][0] - record["received_s"] for record in sent)
        seen = statistics.fmean(start.ttft_s(job, stdout)) if start.ttft_s else None
        num_sent = sum(len(record["sent_s"]) for record in records)
    return Cost(cpu_s, wall_s, num_sent, None if seen is None else seen - truth)


def _reap_orphans(server_pid: int) -> None:
    """Waits for what the client's process tree left behind, so that its CPU is counted; at most 10 s."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        orphans = [int(pid) for pid in children.read_text().split() if int(pid) != server_pid]
        if not orphans:
            return
        for pid in orphans:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def main() -> None:
    """Measures every client that is at hand and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--aiperf", metavar="COMMAND")
    parser.add_argument("--guidellm", metavar="COMMAND")
    parser.add_argument("--tokenizer", metavar="DIR")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--align", action="store_true", help="all streams' chunks leave in one burst every 20 ms"
    )
    parser.add_argument("--only", help="names of clients, separated by commas")
    parser.add_argument("--json", type=Path, metavar="OUT.json")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    clients: dict[str, Callable[[Job], Start]] = {
        "bare epoll reader": own_reader("bare_reader.py", ids=False),
        "specnb client": own_reader("client_driver.py", ids=False),
        "specnb client, token ids": own_reader("client_driver.py", ids=True),
        "specnb run": specnb_run,
    }
    if options.vllm or options.aiperf or options.guidellm:
        tokenizer = options.tokenizer
        if tokenizer is None:
            from specnb.demo import ensure_demo_target

            tokenizer = str(ensure_demo_target())
        if options.vllm:
            clients["vllm bench serve"] = vllm_bench(options.vllm, tokenizer)
        if options.aiperf:
            clients["aiperf"] = aiperf(options.aiperf, tokenizer)
        if options.guidellm:
            clients["guidellm"] = guidellm(options.guidellm, tokenizer)
    if options.only:
        clients = {name: make for name, make in clients.items() if name in options.only.split(",")}
    console = Console()
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in clients}
    failed: dict[str, str] = {}
    for repeat in range(options.repeats):
        names = [name for name in clients if name not in failed]
        for name in names if repeat % 2 == 0 else reversed(names):
            try:
                one = measure(clients[name], 1, 1, align=options.align)
                few = measure(clients[name], FEW, CHUNKS, align=options.align)
                many = measure(clients[name], MANY, CHUNKS, align=options.align)
            except (RuntimeError, OSError) as error:
                failed[name] = str(error)
                console.print(f"{name}: {error}", markup=False)
                continue
            cost_us = (many.cpu_s - few.cpu_s) / (many.num_chunks - few.num_chunks) * 1e6
            row = {"us_per_chunk": cost_us, "startup_cpu_s": one.cpu_s, "wall_s": many.wall_s}
            if many.ttft_excess_s is not None:
                row["ttft_excess_ms"] = many.ttft_excess_s * 1e3
            for key, value in row.items():
                figures[name].setdefault(key, []).append(value)
            shown = ", ".join(f"{key} {value:.3g}" for key, value in row.items())
            console.print(f"repeat {repeat + 1}, {name}: {shown}", markup=False)
    _print(console, figures, failed)
    if options.json:
        options.json.write_text(
            json.dumps({"figures": figures, "failed": failed}, indent=1), encoding="utf-8"
        )


def _print(console: Console, figures: dict[str, dict[str, list[float]]], failed: dict[str, str]) -> None:
    table = Table("client", "CPU us a chunk", "over vllm's", "start-up CPU s", "mean TTFT too long by, ms")
    vllm = figures.get("vllm bench serve", {}).get("us_per_chunk")
    for name, rows in figures.items():
        if name in failed or not rows:
            table.add_row(name, "-", "-", "-", failed.get(name, "-")[:60])
            continue
        costs = rows["us_per_chunk"]
        ratio = f"{statistics.median(costs) / statistics.median(vllm):.2f}" if vllm else "-"
        excess = rows.get("ttft_excess_ms")
        table.add_row(
            name,
            f"{statistics.median(costs):.1f} ({min(costs):.1f} to {max(costs):.1f})",
            ratio,
            f"{statistics.median(rows['startup_cpu_s']):.2f}",
            f"{statistics.median(excess):.2f}" if excess else "-",
        )
    console.print(table)


if __name__ == "__main__":
    main()
