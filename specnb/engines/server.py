"""Servers as an engine: vLLM launched for each arm, or OpenAI-compatible servers that already run.

One cell: wait until the server is idle, scrape it twice, send the cell's requests through the
streaming client, wait until it is idle again, scrape it twice. What the server says about
acceptance in its responses becomes `acceptance` and `steps`, its own counters stay raw in
`scrapes`, its statistics lines in `log_lines`; nothing is reconciled here (`reconciliation`).

A server that dies fails its requests, not the run: the next cell starts it again. Only what
would spoil the cells after it stops the run (a process that keeps the GPU's memory).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from specnb.config import DEMO_TARGET, Arm, Cell, Plan, Sampling
from specnb.engines.attached import AttachedServer, Server, Watch
from specnb.engines.base import CellContext, PlannedRequest, request_seed
from specnb.engines.bodies import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    BodyOptions,
    chat_body,
    completions_body,
    sampling_fields,
)
from specnb.engines.openai import Client, ClientFacts, fetch, server_address
from specnb.engines.responses import Answer
from specnb.engines.support import installed_version, refusals, server_options, warnings
from specnb.engines.tables import CellTables
from specnb.engines.vllm import (
    OrphanError,
    ServerStartError,
    VllmServer,
    parsed_arguments,
    render_command,
)
from specnb.errors import EngineError, PlanError
from specnb.load import ClosedLoop, Job, OpenLoop, Schedule, poisson_arrivals, trace_arrivals
from specnb.prometheus import Scrape, parse
from specnb.provenance import directory_sha256
from specnb.telemetry import Sampler, gpus
from specnb.workloads import Prompt

MOST_RESTARTS: Final = 3
LOG_MARKS: Final = ("SpecDecoding metrics:", "Avg prompt throughput:")
_IDLE_LIMIT_S: Final = 10.0
_IDLE_PERIOD_S: Final = 0.05
_METRICS_TIMEOUT_S: Final = 10.0
_TOP_LOGPROBS: Final = 20


class ServerEngine:
    """Engine of plans whose kind is `vllm` or `openai`.

    Raises
    ------
    PlanError
        The installed vLLM does not support what the plan asks for.
    EngineError
        There is no vLLM, or a running server can't be reached or serves another model.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._launches = plan.engine.kind == "vllm"
        # A launched server needs no key.
        self._key = None if self._launches else os.environ.get(plan.engine.api_key_env) or None
        self._version: str | None = None
        self._warnings: list[str] = []
        self._running: dict[tuple[str, int], Server] = {}
        self._gone: dict[tuple[str, int], str] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._warmup: dict[int, Sequence[PlannedRequest]] = {}
        self._hung: set[tuple[str, int]] = set()
        self._facts: dict[str, Any] = {}
        self._log_dir: Path | None = None
        self._say: Callable[[str], None] = lambda line: None
        self._baseline_served = False
        if self._launches:
            self._version = installed_version(plan.server_python)
            found = refusals(plan, self._version)
            if found:
                raise PlanError(found[0])
            self._warnings = warnings(plan, self._version)
        else:
            for arm in plan.arms:
                server = AttachedServer(plan, arm, api_key=self._key)
                self._running[arm.name, 0] = server
                if server.facts()["answers_any_model"]:
                    self._warnings.append(
                        f"arms.{arm.name}.url: the server answers for any model's name; only its list of "
                        "models says what it serves"
                    )
        # The demo's target is fetched now, so that the first start does not pay for it.
        self._served = plan
        if self._launches and plan.target.model == DEMO_TARGET:
            from specnb.demo import ensure_demo_target

            target = plan.target.model_copy(update={"model": str(ensure_demo_target())})
            self._served = plan.model_copy(update={"target": target})

    # -- facts -----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Engine, version, target, GPUs and the version table's warnings.

        Raises
        ------
        PlanError
            Two arms name one running server.
        """
        if not self._launches:
            _refuse_shared_servers(self._plan)
        cards = [asdict(card) for card in gpus()] if self._launches else []
        label = f"vLLM {self._version}" if self._launches else "running OpenAI-compatible servers"
        folder = Path(self._served.located(self._served.target.model))
        has_weights = folder.is_dir() and any(folder.glob("*.safetensors"))
        return {
            "kind": self._plan.engine.kind,
            "label": label,
            "simulated": False,
            "version": self._version,
            "endpoint": self._plan.engine.endpoint,
            "target": {
                "label": self._plan.target.model,
                "dtype": self._plan.target.dtype,
                "revision": self._plan.target.revision,
                "sha256": directory_sha256(folder) if has_weights else None,
            },
            "device": self._plan.engine.devices or ("cpu" if "cpu" in (self._version or "") else None),
            "gpu": ", ".join(str(card["name"]) for card in cards) or None,
            "gpus": cards,
            "warnings": self._warnings,
            "clock": "times are the client's, on the machine that ran specnb",
        }

    def describe_arm(self, arm: Arm) -> dict[str, Any]:
        """Launch arguments of one arm, or what its running server said of itself, and the sampling sent."""
        speculative = arm.speculative.model_dump(mode="json", exclude_none=True) if arm.speculative else None
        sampling = {setting.name: _sent_sampling(setting) for setting in self._plan.sampling}
        if not self._launches:
            server = self._running[arm.name, 0].facts()
            return {"speculative": speculative, "server": server, "sampling": sampling}
        assert self._version is not None
        command = render_command(
            self._served,
            arm,
            port=self._plan.engine.port or 1,
            model_id=self._plan.name,
            version=self._version,
        )
        arguments = parsed_arguments(command)
        for name in ("model", "port"):  # a path of this machine; chosen anew at each start
            arguments.pop(name, None)
        # Models and files as the plan names them.
        given = server_options(self._plan, arm)
        arguments |= {name: given[name] for name in arguments if isinstance(given.get(name), str)}
        if arm.speculative is not None:
            arguments["speculative_config"] = speculative
        return {"speculative": speculative, "arguments": arguments, "sampling": sampling}

    def cell_facts(self) -> dict[str, Any]:
        """The client's lag and cap, and the server's own facts, of the cell just run."""
        return self._facts

    # -- measuring -------------------------------------------------------------------------------

    def warm_up(self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext) -> None:
        """Runs requests at the cell's concurrency and throws them away; also after a restart."""
        self._warmup[cell.concurrency] = requests
        server = self._ensure(cell, context, warm=False)
        if server is not None:
            self._send_warmup(server, cell, context)

    def run_cell(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> dict[str, pl.DataFrame]:
        """Tables of one cell; a server that can't be started, or dies, leaves rows that say so."""
        server = self._ensure(cell, context)
        tables = CellTables(self._plan, cell, requests, context)
        if server is None:
            return tables.frames(self._not_started(cell, requests, context))
        reset = self._reset_prefix_cache(server, cell.arm)
        log_from = server.log_offset() if isinstance(server, VllmServer) else 0
        before = self._idle_scrapes(server, context)
        with self._sampler(server, context) as sampler:
            start_s = context.clock()
            answers, facts = self._drive(server, cell, requests, context)
            end_s = context.clock()
        after = self._idle_scrapes(server, context)
        telemetry = None
        if sampler is not None:
            telemetry = sampler.frame(
                run_id=context.run_id,
                arm=cell.arm.name,
                cell_id=cell.cell_id,
                start_s=start_s,
                end_s=end_s + 1,
            )
        frames = tables.frames(
            answers,
            # Two scrapes of one end alone would look like a window in which nothing happened.
            scrapes=before + after if len(before) == len(after) else before[-1:] + after[-1:],
            log_lines=_statistics(server, log_from),
            telemetry=telemetry,
        )
        death = self._death(server, cell)
        if death is not None:
            context.on_message(f"{cell.arm.name}: the server {death}")
        self._facts = {
            # The requests' own window: a start in the middle of the cell is not its load.
            "start_s": start_s,
            "end_s": end_s,
            "client": {
                "loop_lag_p99_s": facts.loop_lag_p99_s,
                "loop_lag_max_s": facts.loop_lag_max_s,
                "max_in_flight": facts.max_in_flight,
                "limited": list(facts.limited),
            },
            "server": {
                **self._named(server.facts()),
                "served_model_name": server.model,
                "alive_at_end": death is None,
                "death": death,
                "restarts": self._starts.get(self._key_of(cell), 1) - 1,
                "prefix_cache_reset": reset,
            },
            "steps_source": tables.steps_source,
        }
        return frames

    def _named(self, facts: dict[str, Any]) -> dict[str, Any]:
        """A server's facts with the target as the plan names it, and not where it lies on this machine."""
        arguments = facts.get("arguments")
        if self._served is not self._plan and isinstance(arguments, list) and "--model" in arguments:
            place = arguments.index("--model") + 1
            arguments = [*arguments[:place], self._plan.target.model, *arguments[place + 1 :]]
            return facts | {"arguments": arguments}
        return facts

    def _not_started(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> list[Answer]:
        """Failures of a cell whose server can't be had."""
        reason = self._gone[self._key_of(cell)]
        self._facts = {"server": {"error": reason}}
        now_s = context.clock()
        for _ in requests:
            context.on_request_done()
        return [
            Answer(
                request_id=request.request_id,
                scheduled_s=now_s,
                sent_s=None,
                status="error",
                error_kind="server_start",
                error=reason,
            )
            for request in requests
        ]

    def _death(self, server: Server, cell: Cell) -> str | None:
        """Why a cell's server is of no more use, in one line; None if it still answers."""
        if self._key_of(cell) in self._hung:
            return f"hangs: requests stalled for {self._plan.load.stall_timeout_s:g} s, and none was answered"
        if server.is_alive():
            return None
        return (server.death() if isinstance(server, VllmServer) else None) or "no longer answers"

    def judge_splits(
        self, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> pl.DataFrame:
        """Margins at each split from the baseline's server: top log probabilities after the common prefix.

        Asks one token a split, greedily, through the completions endpoint. A token outside the first
        20 has a margin of at least that of the twentieth, which is then what stands there. Null where
        the server does not give log probabilities, the two answers are to different prompts (a nonce
        changes them from repeat to repeat), or the text is modelled.
        """
        if splits.is_empty() or self._plan.modelled:
            return splits
        margins: list[float | None] = []
        try:
            server = self._judge()
            if server is not None:
                margins.extend(self._margins(server, splits, requests, prompts))
        except EngineError as error:
            self._say(f"splits are not judged: {error}")
        margins += [None] * (splits.height - len(margins))
        return splits.with_columns(pl.Series("margin_nats", margins, dtype=pl.Float64))

    def _margins(
        self, server: Server, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> Iterator[float | None]:
        answers = {
            (row[0], row[1], row[2], row[3], row[4]): row[5]
            for row in requests.select(
                "arm", "repeat", "sampling", "concurrency", "prompt_id", "output_token_ids"
            ).iter_rows()
        }
        known: dict[tuple[str, str], list[int] | None] = {}
        for row in splits.iter_rows(named=True):
            identity = row["prompt_id"]
            token, reference = row["token_id"], row["reference_token_id"]
            prompt = prompts[identity]
            start = ""
            if self._plan.workload.nonce:
                start = self._start(prompt.tier, row["concurrency"], row["sampling"], row["reference_repeat"])
                if row["repeat"] != row["reference_repeat"]:
                    token = None
            prefix = answers.get(
                (
                    row["reference_arm"],
                    row["reference_repeat"],
                    row["sampling"],
                    row["concurrency"],
                    identity,
                )
            )
            if token is None or reference is None or prefix is None:
                yield None
                continue
            if (identity, start) not in known:
                known[identity, start] = self._prompt_ids(server, prompt, start)
            ids = known[identity, start]
            if ids is None:
                yield None
            else:
                yield self._margin(server, [*ids, *prefix[: row["index"]]], token, reference)

    def close(self) -> None:
        """Stops launched servers; running ones are left alone."""
        running, self._running = self._running, {}
        for server in running.values():
            try:
                server.stop()
            except OrphanError as error:  # nothing is measured after it, and what was measured stands
                self._say(str(error))

    # -- servers ---------------------------------------------------------------------------------

    def _key_of(self, cell: Cell) -> tuple[str, int]:
        """A launched server lives for one arm and repeat, a running one for the whole run."""
        return (cell.arm.name, cell.repeat if self._launches else 0)

    def _ensure(self, cell: Cell, context: CellContext, *, warm: bool = True) -> Server | None:
        """The cell's server, started or started again if need be; None if it can't be had.

        One that was started again is warmed up, unless the caller does that (`warm`).
        """
        self._log_dir = context.log_dir or self._log_dir
        self._say = context.on_message
        key = self._key_of(cell)
        if key in self._gone:
            return None
        server = self._running.get(key)
        if server is not None and (not self._launches or (key not in self._hung and server.is_alive())):
            self._hung.discard(key)
            return server
        if server is not None:
            self._running.pop(key).stop()
            self._hung.discard(key)
            if self._starts[key] > MOST_RESTARTS:
                self._gone[key] = f"the server of {cell.arm.name} died {self._starts[key]} times"
                context.on_message(f"{self._gone[key]}; its cells of this repeat are given up")
                return None
            context.on_message(f"{cell.arm.name}: starting the server again")
        for other in [other for other in self._running if other != key]:
            self._running.pop(other).stop()
        self._starts[key] = self._starts.get(key, 0) + 1
        try:
            server = self._launch(cell, context, number=self._starts[key])
        except ServerStartError as error:
            if cell.arm.speculative is None and not self._baseline_served:
                raise
            context.on_message(f"{cell.arm.name}: {error}")
            self._gone[key] = str(error)
            return None
        self._running[key] = server
        self._baseline_served |= cell.arm.speculative is None
        if warm and self._starts[key] > 1:
            self._send_warmup(server, cell, context)
        return server

    def _launch(self, cell: Cell, context: CellContext, *, number: int) -> VllmServer:
        name = f"{cell.arm.name}.r{cell.repeat}{'' if number == 1 else f'.start{number}'}.log"
        server = VllmServer(self._served, cell.arm)
        server.start(self._log_folder / name, lambda line: context.on_message(f"{cell.arm.name}: {line}"))
        return server

    def _judge(self) -> Server | None:
        """The baseline's server for judging splits; a launched one is started again."""
        baseline = self._plan.baseline
        for (name, _), server in self._running.items():
            if name == baseline.name and server.is_alive():
                return server
        if not self._launches:
            return None
        for key in list(self._running):
            self._running.pop(key).stop()
        server = VllmServer(self._served, baseline)
        server.start(self._log_folder / f"{baseline.name}.judge.log")
        self._running[baseline.name, -1] = server
        return server

    @property
    def _log_folder(self) -> Path:
        """The run's folder for logs; one of its own for a judge's server where no cell was left to run."""
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="specnb-"))
        return self._log_dir

    def _reset_prefix_cache(self, server: Server, arm: Arm) -> bool | None:
        """Empties a launched server's prefix cache between cells, if it has one; whether that was done."""
        if not self._launches or not server_options(self._plan, arm).get("enable_prefix_caching"):
            return None
        try:
            status, _ = fetch(server.url, "/reset_prefix_cache", method="POST", body=b"", timeout_s=30.0)
        except EngineError:
            return False
        return status == 200

    def _sampler(self, server: Server, context: CellContext) -> AbstractContextManager[Sampler | None]:
        if not isinstance(server, VllmServer):
            return nullcontext()
        return Sampler(clock=context.clock, pid=server.pid)

    # -- one cell --------------------------------------------------------------------------------

    def _send_warmup(self, server: Server, cell: Cell, context: CellContext) -> None:
        requests = self._warmup.get(cell.concurrency, ())
        if not requests:
            return
        answers, _ = self._drive(server, cell, requests, context, warm_up=True)
        failed = [answer for answer in answers if answer.status != "ok"]
        if failed:
            share = f"{len(failed)} of {len(answers)}"
            context.on_message(f"{cell.arm.name}: {share} warm-up requests failed ({failed[0].error})")

    def _drive(
        self,
        server: Server,
        cell: Cell,
        requests: Sequence[PlannedRequest],
        context: CellContext,
        *,
        warm_up: bool = False,
    ) -> tuple[list[Answer], ClientFacts]:
        load = self._plan.load
        start = "" if warm_up else self._start_of(cell)
        jobs = [self._job(server, cell, request, start=start) for request in requests]
        client = Client(
            server.url,
            api_key=self._key,
            clock=context.clock,
            stall_timeout_s=load.stall_timeout_s,
            request_timeout_s=load.request_timeout_s,
        )
        watch = Watch(server, concurrency=cell.concurrency, launched=self._launches)
        key = self._key_of(cell)
        hung_before = key in self._hung

        def finished(answer: Answer) -> None:
            watch.note(answer)
            context.on_request_done()

        answers, facts = client.run(
            self._schedule(cell, jobs, closed=warm_up),
            on_done=finished,
            deadline_s=None if load.cell_timeout_s is None else context.clock() + load.cell_timeout_s,
            is_alive=lambda: not hung_before and watch.is_alive(),
        )
        if watch.hangs:
            self._hung.add(key)
        return answers, facts

    def _schedule(self, cell: Cell, jobs: Sequence[Job], *, closed: bool) -> Schedule:
        """The same arrivals in every arm of a comparison."""
        load = self._plan.load
        if closed or load.mode == "closed":
            return ClosedLoop(jobs, concurrency=cell.concurrency)
        if load.trace is not None:
            due = trace_arrivals(Path(self._plan.located(load.trace)), len(jobs))
        else:
            assert load.request_rate is not None
            seed = request_seed("arrivals", cell.tier, cell.concurrency, cell.sampling.name, cell.repeat)
            due = poisson_arrivals(len(jobs), load.request_rate, np.random.default_rng(seed))
        return OpenLoop(jobs, due, max_in_flight=cell.concurrency)

    def _start_of(self, cell: Cell) -> str:
        return self._start(cell.tier, cell.concurrency, cell.sampling.name, cell.repeat)

    def _start(self, tier: str, concurrency: int, sampling: str, repeat: int) -> str:
        """What a plan with a nonce puts before every prompt of these cells, the same in every arm."""
        if not self._plan.workload.nonce:
            return ""
        return f"[{_nonce(tier, concurrency, sampling, repeat)}] "

    def _job(self, server: Server, cell: Cell, request: PlannedRequest, *, start: str) -> Job:
        with_ids = self._returns_token_ids(server)
        options = BodyOptions(
            return_token_ids=with_ids,
            continuous_usage=not with_ids,
            chat_template_kwargs=self._plan.workload.chat_template_kwargs,
        )
        limits: dict[str, Any] = {"max_tokens": request.max_tokens, "seed": request.seed, "options": options}
        if self._plan.engine.endpoint == "chat":
            messages = _messages(request.prompt, start)
            body = chat_body(server.model, messages, cell.sampling, **limits)
            return Job(request_id=request.request_id, path=CHAT_PATH, body=body)
        text = start + _as_text(request.prompt)
        body = completions_body(server.model, text, cell.sampling, **limits)
        return Job(request_id=request.request_id, path=COMPLETIONS_PATH, body=body)

    def _returns_token_ids(self, server: Server) -> bool:
        """Only vLLM knows `return_token_ids`; it says its version."""
        return self._launches or server.facts().get("version") is not None

    def _idle_scrapes(self, server: Server, context: CellContext) -> list[tuple[float, str]]:
        """Two scrapes of an idle server, or the one that it gave; none where it has no metrics.

        Idle: no request runs or waits, and two scrapes in a row count the same tokens.
        """
        deadline = time.monotonic() + _IDLE_LIMIT_S
        found: list[tuple[float, str]] = []
        last: Scrape | None = None
        while True:
            try:
                status, body = fetch(server.url, "/metrics", timeout_s=_METRICS_TIMEOUT_S, api_key=self._key)
            except EngineError:
                return found[-1:]
            if status != 200:
                return found[-1:]
            found.append((context.clock(), body.decode("utf-8", errors="replace")))
            scrape, before = parse(found[-1][1]), last
            if before and scrape.is_idle and scrape.generation_tokens == before.generation_tokens:
                return found[-2:]
            last = scrape
            if time.monotonic() > deadline:
                return found[-2:]
            time.sleep(_IDLE_PERIOD_S)

    # -- judging ---------------------------------------------------------------------------------

    def _prompt_ids(self, server: Server, prompt: Prompt, start: str) -> list[int] | None:
        """The prompt's token ids by the server's own tokenizer and template; None if it does not say."""
        content: dict[str, Any] = {"model": server.model}
        if self._plan.engine.endpoint == "chat":
            content |= {"messages": _messages(prompt, start), "add_generation_prompt": True}
            if self._plan.workload.chat_template_kwargs:
                content["chat_template_kwargs"] = dict(self._plan.workload.chat_template_kwargs)
        else:
            content["prompt"] = start + _as_text(prompt)
        found = self._asked(server, "/tokenize", content)
        ids = found.get("tokens") if found else None
        return [int(token) for token in ids] if isinstance(ids, list) else None

    def _margin(self, server: Server, ids: list[int], token: int, reference: int) -> float | None:
        found = self._asked(
            server,
            "/v1/completions",
            {
                "model": server.model,
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "logprobs": _TOP_LOGPROBS,
                "return_tokens_as_token_ids": True,
            },
        )
        try:
            assert found is not None
            top = {
                int(name.removeprefix("token_id:")): float(value)
                for name, value in found["choices"][0]["logprobs"]["top_logprobs"][0].items()
            }
        except (AssertionError, KeyError, IndexError, TypeError, ValueError):
            return None
        least = min(top.values(), default=None)
        if least is None or reference not in top:
            return None
        return top[reference] - top.get(token, least)

    def _asked(self, server: Server, path: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """The JSON object that a server answers; None if it refuses. Raises EngineError if it is gone."""
        status, body = fetch(
            server.url,
            path,
            method="POST",
            body=json.dumps(content).encode(),
            timeout_s=120.0,
            api_key=self._key,
        )
        try:
            answer = json.loads(body) if status == 200 else None
        except ValueError:
            return None
        return answer if isinstance(answer, dict) else None


def _sent_sampling(setting: Sampling) -> dict[str, Any]:
    """The sampling fields that one setting's requests send; each has a seed of its own."""
    fields = sampling_fields(setting, max_tokens=setting.max_tokens, seed=setting.seed)
    return fields | {"seed": f"one a request, from {setting.seed}"}


def _refuse_shared_servers(plan: Plan) -> None:
    """PlanError if two arms name one server: it can't speculate for one of them alone."""
    seen: dict[tuple[str, int], str] = {}
    for arm in plan.arms:
        assert arm.url is not None
        address = server_address(arm.url)
        try:
            host = socket.gethostbyname(address.host)
        except OSError:
            host = address.host  # connecting will say what is wrong
        first = seen.setdefault((host, address.port), arm.name)
        if first != arm.name:
            raise PlanError(
                f"arms.{arm.name}.url: {arm.url} is the server of arm {first}, too; "
                "give each arm a server of its own"
            )


def _statistics(server: Server, offset: int) -> list[str]:
    """Statistics lines that a launched server has logged since a byte offset."""
    if not isinstance(server, VllmServer):
        return []
    lines = server.log_since(offset).splitlines()
    return [line for line in lines if any(mark in line for mark in LOG_MARKS)]


def _messages(prompt: Prompt, start: str) -> list[dict[str, str]]:
    """The chat with `start` before its first words; a raw prompt is one turn of the user's."""
    messages = [message.to_dict() for message in prompt.messages]
    if prompt.text is not None:
        messages = [{"role": "user", "content": prompt.text}]
    messages[0] = messages[0] | {"content": start + messages[0]["content"]}
    return messages


def _as_text(prompt: Prompt) -> str:
    """A prompt for the completions endpoint: its text, or the turns' texts one under the other."""
    return prompt.text or "\n\n".join(message.content for message in prompt.messages)


def _nonce(tier: str, concurrency: int, sampling: str, repeat: int) -> str:
    """The same in every arm, another in every other cell."""
    return f"{request_seed('nonce', tier, concurrency, sampling, repeat) % 16**8:08x}"
