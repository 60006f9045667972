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
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from specnb import schema
from specnb.config import DEMO_TARGET, Arm, Cell, Plan
from specnb.engines.base import CellContext, PlannedRequest, request_seed
from specnb.engines.bodies import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    BodyOptions,
    chat_body,
    completions_body,
    sampling_fields,
)
from specnb.engines.openai import Client, ClientFacts, fetch
from specnb.engines.responses import Acceptance, Answer
from specnb.engines.support import installed_version, refusals, warnings
from specnb.engines.vllm import ServerStartError, VllmServer, parsed_arguments, render_command
from specnb.errors import EngineError, PlanError
from specnb.load import ClosedLoop, Job, OpenLoop, Schedule, poisson_arrivals, trace_arrivals
from specnb.provenance import directory_sha256
from specnb.telemetry import Sampler, gpus
from specnb.workloads import Prompt, grade

MOST_RESTARTS = 3
LOG_MARKS = ("SpecDecoding metrics:", "Avg prompt throughput:")
_IDLE_LIMIT_S = 10.0
_IDLE_PERIOD_S = 0.05
_METRICS_TIMEOUT_S = 10.0
# Methods that may propose nothing, or less than K, in a step.
_RAGGED_METHODS = ("ngram", "ngram_gpu", "suffix")
_TOP_LOGPROBS = 20


class _Server(Protocol):
    """A server of one arm that answers."""

    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...

    def is_alive(self) -> bool: ...

    def facts(self) -> dict[str, Any]: ...

    def stop(self) -> None: ...


class AttachedServer:
    """A server that was running before, at an arm's `url`; never started or stopped here.

    Raises
    ------
    EngineError
        It can't be reached, or does not list the plan's model.
    """

    def __init__(self, plan: Plan, arm: Arm, *, api_key: str | None) -> None:
        assert arm.url is not None
        self.url = arm.url
        self.model = plan.target.model
        self._key = api_key
        self._facts = self._preflight(arm)

    def is_alive(self) -> bool:
        """Whether it still answers; asked after a failed request only."""
        try:
            fetch(self.url, "/v1/models", timeout_s=5.0, api_key=self._key)
        except EngineError:
            return False
        return True

    def facts(self) -> dict[str, Any]:
        """What it said of itself: models, version, whether it answers for any model name."""
        return self._facts

    def stop(self) -> None:
        """Leaves it running."""

    def _preflight(self, arm: Arm) -> dict[str, Any]:
        """Its list of models must name the target; an echo of the name in an answer is no evidence."""
        place = f"arms.{arm.name}.url: {arm.url}"
        try:
            status, body = fetch(self.url, "/v1/models", timeout_s=10.0, api_key=self._key)
            listed = [str(entry["id"]) for entry in json.loads(body)["data"]] if status == 200 else []
        except EngineError as error:
            raise EngineError(f"{place}: {error}; start the server or correct the url") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{place}: /v1/models is not an OpenAI list of models; correct the url"
            ) from error
        if status == 401 or status == 403:
            raise EngineError(
                f"{place}: refused ({status}); put the key into the variable of engine.api_key_env"
            )
        if self.model not in listed:
            raise EngineError(
                f"{place}: serves {', '.join(listed) or 'no model'}, not {self.model}; "
                "correct the url or target.model"
            )
        unknown = json.dumps({"model": "specnb-no-such-model", "prompt": "a", "max_tokens": 1}).encode()
        status, _ = fetch(
            self.url, "/v1/completions", method="POST", body=unknown, timeout_s=60.0, api_key=self._key
        )
        facts: dict[str, Any] = {"models": listed, "answers_any_model": status == 200, "version": None}
        try:
            status, body = fetch(self.url, "/version", timeout_s=5.0, api_key=self._key)
            facts["version"] = str(json.loads(body)["version"]) if status == 200 else None
        except (EngineError, ValueError, KeyError, TypeError):
            pass  # only vLLM has it
        return facts


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
        self._key = os.environ.get(plan.engine.api_key_env) or None
        self._version: str | None = None
        self._warnings: list[str] = []
        self._running: dict[tuple[str, int], _Server] = {}
        self._gone: dict[tuple[str, int], str] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._warmup: dict[int, Sequence[PlannedRequest]] = {}
        self._facts: dict[str, Any] = {}
        self._log_dir = Path(tempfile.gettempdir())
        self._baseline_served = False
        if self._launches:
            self._version = installed_version(plan.engine.python)
            found = refusals(plan, self._version)
            if found:
                raise PlanError(found[0])
            self._warnings = warnings(plan, self._version)
        else:
            for arm in plan.arms:
                self._running[arm.name, 0] = AttachedServer(plan, arm, api_key=self._key)
        # The demo's target is fetched now, so that the first start does not pay for it.
        self._served = plan
        if self._launches and plan.target.model == DEMO_TARGET:
            from specnb.demo import ensure_demo_target

            target = plan.target.model_copy(update={"model": str(ensure_demo_target())})
            self._served = plan.model_copy(update={"target": target})

    # -- facts -----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Engine, version, target, GPUs and the version table's warnings."""
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
        """Resolved launch arguments of one arm, or what its running server said of itself."""
        speculative = arm.speculative.model_dump(mode="json", exclude_none=True) if arm.speculative else None
        if not self._launches:
            return {"speculative": speculative, "server": self._running[arm.name, 0].facts()}
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
        return {
            "speculative": speculative,
            "arguments": arguments,
            "sampling": {
                setting.name: sampling_fields(setting, max_tokens=setting.max_tokens, seed=setting.seed)
                for setting in self._plan.sampling
            },
        }

    def cell_facts(self) -> dict[str, Any]:
        """The client's lag and cap, and the server's own facts, of the cell just run."""
        return self._facts

    # -- measuring -------------------------------------------------------------------------------

    def warm_up(self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext) -> None:
        """Runs requests at the cell's concurrency and throws them away; also after a restart."""
        self._warmup[cell.concurrency] = requests
        server = self._ensure(cell, context)
        if server is not None:
            self._send_warmup(server, cell, context)

    def run_cell(
        self, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> dict[str, pl.DataFrame]:
        """Tables of one cell; a server that can't be started, or dies, leaves rows that say so."""
        server = self._ensure(cell, context)
        if server is None:
            reason = self._gone[self._key_of(cell)]
            self._facts = {"server": {"error": reason}}
            now = context.clock()
            answers = [
                Answer(
                    request_id=request.request_id,
                    scheduled_s=now,
                    sent_s=None,
                    status="error",
                    error_kind="server_start",
                    error=reason,
                )
                for request in requests
            ]
            return _Tables(self._plan, cell, requests, context).frames(answers, [], [], None, None)
        reset = self._reset_prefix_cache(server)
        log_from = server.log_offset() if isinstance(server, VllmServer) else 0
        scrapes = self._idle_scrapes(server, context)
        with self._sampler(server, context) as sampler:
            start_s = context.clock()
            answers, facts = self._drive(server, cell, requests, context)
            end_s = context.clock()
        scrapes += self._idle_scrapes(server, context)
        lines: list[str] = []
        if isinstance(server, VllmServer):
            lines = [
                line
                for line in server.log_since(log_from).splitlines()
                if any(mark in line for mark in LOG_MARKS)
            ]
        telemetry = (
            sampler.frame(
                run_id=context.run_id,
                arm=cell.arm.name,
                cell_id=cell.cell_id,
                start_s=start_s,
                end_s=end_s + 1,
            )
            if sampler is not None
            else None
        )
        tables = _Tables(self._plan, cell, requests, context)
        frames = tables.frames(answers, scrapes, lines, telemetry, server)
        self._facts = {
            "client": {
                "loop_lag_p99_s": facts.loop_lag_p99_s,
                "loop_lag_max_s": facts.loop_lag_max_s,
                "max_in_flight": facts.max_in_flight,
                "limited": list(facts.limited),
            },
            "server": {
                **server.facts(),
                "alive_at_end": server.is_alive(),
                "restarts": self._starts.get(self._key_of(cell), 1) - 1,
                "prefix_cache_reset": reset,
            },
            "steps_source": tables.steps_source,
        }
        return frames

    def judge_splits(
        self, splits: pl.DataFrame, requests: pl.DataFrame, prompts: Mapping[str, Prompt]
    ) -> pl.DataFrame:
        """Margins at each split from the baseline's server: top log probabilities after the common prefix.

        Asks one token a split, greedily, through the completions endpoint. A token outside the first
        20 has a margin of at least that of the twentieth, which is then what stands there. Null where
        the server does not give log probabilities or the text is modelled.
        """
        if splits.is_empty() or self._plan.modelled:
            return splits
        try:
            server = self._judge()
        except EngineError:
            return splits
        if server is None:
            return splits
        answers = {
            (row[0], row[1], row[2], row[3], row[4]): row[5]
            for row in requests.select(
                "arm", "repeat", "sampling", "concurrency", "prompt_id", "output_token_ids"
            ).iter_rows()
        }
        known: dict[str, list[int] | None] = {}
        margins: list[float | None] = []
        for row in splits.iter_rows(named=True):
            identity = row["prompt_id"]
            if identity not in known:
                known[identity] = self._prompt_ids(server, prompts[identity])
            prefix = answers.get(
                (
                    row["reference_arm"],
                    row["reference_repeat"],
                    row["sampling"],
                    row["concurrency"],
                    identity,
                )
            )
            ids = known[identity]
            if ids is None or prefix is None or row["token_id"] is None or row["reference_token_id"] is None:
                margins.append(None)
                continue
            margins.append(
                self._margin(
                    server, [*ids, *prefix[: row["index"]]], row["token_id"], row["reference_token_id"]
                )
            )
        return splits.with_columns(pl.Series("margin_nats", margins, dtype=pl.Float64))

    def close(self) -> None:
        """Stops launched servers; running ones are left alone."""
        running, self._running = self._running, {}
        for server in running.values():
            server.stop()

    # -- servers ---------------------------------------------------------------------------------

    def _key_of(self, cell: Cell) -> tuple[str, int]:
        """A launched server lives for one arm and repeat, a running one for the whole run."""
        return (cell.arm.name, cell.repeat if self._launches else 0)

    def _ensure(self, cell: Cell, context: CellContext) -> _Server | None:
        """The cell's server, started or started again if need be; None if it can't be had."""
        self._log_dir = context.log_dir or self._log_dir
        key = self._key_of(cell)
        if key in self._gone:
            return None
        server = self._running.get(key)
        if server is not None and (not self._launches or server.is_alive()):
            return server
        if server is not None:
            self._running.pop(key).stop()
            if self._starts[key] > MOST_RESTARTS:
                self._gone[key] = f"the server of {cell.arm.name} died {self._starts[key]} times"
                return None
            context.on_message(f"{cell.arm.name}: the server died; starting it again")
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
        if self._starts[key] > 1:
            self._send_warmup(server, cell, context)
        return server

    def _launch(self, cell: Cell, context: CellContext, *, number: int) -> VllmServer:
        name = f"{cell.arm.name}.r{cell.repeat}{'' if number == 1 else f'.start{number}'}.log"
        server = VllmServer(self._served, cell.arm)
        server.start(self._log_dir / name, lambda line: context.on_message(f"{cell.arm.name}: {line}"))
        return server

    def _judge(self) -> _Server | None:
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
        server.start(self._log_dir / f"{baseline.name}.judge.log", lambda line: None)
        self._running[baseline.name, -1] = server
        return server

    def _reset_prefix_cache(self, server: _Server) -> bool | None:
        """Empties the prefix cache between cells where the server lets us; None: it has no such call."""
        if not self._launches or not self._plan.engine.args.get("enable_prefix_caching"):
            return None
        try:
            status, _ = fetch(server.url, "/reset_prefix_cache", method="POST", body=b"", timeout_s=30.0)
        except EngineError:
            return False
        return status == 200

    def _sampler(self, server: _Server, context: CellContext) -> AbstractContextManager[Sampler | None]:
        if not isinstance(server, VllmServer):
            return nullcontext()
        return Sampler(clock=context.clock, pid=server.pid)

    # -- one cell --------------------------------------------------------------------------------

    def _send_warmup(self, server: _Server, cell: Cell, context: CellContext) -> None:
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
        server: _Server,
        cell: Cell,
        requests: Sequence[PlannedRequest],
        context: CellContext,
        *,
        warm_up: bool = False,
    ) -> tuple[list[Answer], ClientFacts]:
        load = self._plan.load
        jobs = [
            self._job(server, cell, request, nonce=None if warm_up else _nonce(cell)) for request in requests
        ]
        client = Client(
            server.url,
            api_key=self._key if not self._launches else None,
            clock=context.clock,
            stall_timeout_s=load.stall_timeout_s,
            request_timeout_s=load.request_timeout_s,
        )
        down = False

        def finished(answer: Answer) -> None:
            nonlocal down
            if answer.error_kind in ("connect", "disconnected", "truncated", "stalled"):
                down = down or not server.is_alive()
            context.on_request_done()

        def is_alive() -> bool:
            return not down and (not self._launches or server.is_alive())

        deadline_s = None if load.cell_timeout_s is None else context.clock() + load.cell_timeout_s
        return client.run(
            self._schedule(cell, jobs, closed=warm_up),
            on_done=finished,
            deadline_s=deadline_s,
            is_alive=is_alive,
        )

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

    def _job(self, server: _Server, cell: Cell, request: PlannedRequest, *, nonce: str | None) -> Job:
        start = f"[{nonce}] " if nonce and self._plan.workload.nonce else ""
        options = BodyOptions(
            return_token_ids=self._returns_token_ids(server),
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

    def _returns_token_ids(self, server: _Server) -> bool:
        """Only vLLM knows `return_token_ids`; it says its version."""
        return self._launches or server.facts().get("version") is not None

    def _idle_scrapes(self, server: _Server, context: CellContext) -> list[tuple[float, str]]:
        """Two scrapes of an idle server, or as many as it gave; none where it has no metrics.

        Idle: no request runs or waits, and two scrapes in a row count the same tokens.
        """
        deadline = time.monotonic() + _IDLE_LIMIT_S
        found: list[tuple[float, str]] = []
        while True:
            try:
                status, body = fetch(server.url, "/metrics", timeout_s=_METRICS_TIMEOUT_S, api_key=self._key)
            except EngineError:
                return found[-1:]
            if status != 200:
                return found[-1:]
            found.append((context.clock(), body.decode("utf-8", errors="replace")))
            if len(found) > 1 and _is_idle(found[-1][1]) and _tokens(found[-1][1]) == _tokens(found[-2][1]):
                return found[-2:]
            if time.monotonic() > deadline:
                return found[-2:]
            time.sleep(_IDLE_PERIOD_S)

    # -- judging ---------------------------------------------------------------------------------

    def _prompt_ids(self, server: _Server, prompt: Prompt) -> list[int] | None:
        """The prompt's token ids by the server's own tokenizer and template; None if it does not say."""
        content: dict[str, Any] = {"model": server.model}
        if self._plan.engine.endpoint == "chat":
            content |= {"messages": _messages(prompt, ""), "add_generation_prompt": True}
            if self._plan.workload.chat_template_kwargs:
                content["chat_template_kwargs"] = dict(self._plan.workload.chat_template_kwargs)
        else:
            content["prompt"] = _as_text(prompt)
        found = self._asked(server, "/tokenize", content)
        ids = found.get("tokens") if found else None
        return [int(token) for token in ids] if isinstance(ids, list) else None

    def _margin(self, server: _Server, ids: list[int], token: int, reference: int) -> float | None:
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

    def _asked(self, server: _Server, path: str, content: dict[str, Any]) -> dict[str, Any] | None:
        try:
            status, body = fetch(
                server.url,
                path,
                method="POST",
                body=json.dumps(content).encode(),
                timeout_s=120.0,
                api_key=self._key,
            )
            answer = json.loads(body) if status == 200 else None
        except (EngineError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None


class _Tables:
    """Answers of one cell as the tables of `schema`."""

    def __init__(
        self, plan: Plan, cell: Cell, requests: Sequence[PlannedRequest], context: CellContext
    ) -> None:
        self._plan = plan
        self._cell = cell
        self._requests = {request.request_id: request for request in requests}
        self._keys = {"run_id": context.run_id, "arm": cell.arm.name, "cell_id": cell.cell_id}
        self.steps_source: str | None = None

    def frames(
        self,
        answers: Sequence[Answer],
        scrapes: Sequence[tuple[float, str]],
        lines: Sequence[str],
        telemetry: pl.DataFrame | None,
        server: _Server | None,
    ) -> dict[str, pl.DataFrame]:
        """Every table that has rows, and the required ones."""
        answers = sorted(answers, key=lambda answer: answer.request_id)
        rows: dict[str, list[dict[str, Any]]] = {
            "requests": [self._request(answer) for answer in answers],
            "chunks": [
                {"request_id": answer.request_id, "chunk": number, "received_s": at, "num_tokens": count}
                for answer in answers
                for number, (at, count) in enumerate(answer.chunks)
            ],
            "steps": [row for answer in answers for row in self._steps(answer)],
            "acceptance": [
                self._acceptance(answer, answer.acceptance) for answer in answers if answer.acceptance
            ],
            "log_lines": [{"line": number, "text": line} for number, line in enumerate(lines)],
            "scrapes": [
                {"scrape": number, "scraped_s": at, "body": body} for number, (at, body) in enumerate(scrapes)
            ],
        }
        found = {}
        for name, content in rows.items():
            table = schema.TABLES[name]
            if content or table.required:
                keys = {key: value for key, value in self._keys.items() if key in table.names}
                found[name] = pl.DataFrame(
                    [{**keys, **row} for row in content], schema=table.polars_schema, orient="row"
                )
        if telemetry is not None and telemetry.height:
            found["telemetry"] = telemetry
        return found

    def _request(self, answer: Answer) -> dict[str, Any]:
        request = self._requests[answer.request_id]
        prompt = request.prompt
        text = answer.output_text
        if answer.reasoning_text:
            text = f"<think>{answer.reasoning_text}</think>{text or ''}"
        ok = answer.status == "ok"
        return {
            "repeat": self._cell.repeat,
            "sampling": self._cell.sampling.name,
            "concurrency": self._cell.concurrency,
            "request_id": answer.request_id,
            "prompt_id": prompt.id,
            "prompt_sha256": prompt.sha256,
            "task": prompt.task,
            "entropy_tier": prompt.tier,
            "length_tier": prompt.length,
            "scheduled_s": answer.scheduled_s,
            "sent_s": answer.sent_s,
            "first_token_s": answer.first_token_s,
            "first_answer_s": answer.first_answer_s,
            "last_token_s": answer.last_token_s,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_cached_tokens": answer.num_cached_tokens,
            "num_output_tokens": answer.num_output_tokens,
            "num_first_chunk_tokens": answer.num_first_chunk_tokens,
            "num_chunks": len(answer.chunks) or None,
            "finish_reason": answer.finish_reason,
            "status": answer.status,
            "error_kind": answer.error_kind,
            "error": answer.error,
            "output_text": text,
            "output_token_ids": answer.output_token_ids,
            "grader_score": grade(prompt, answer.output_text) if ok and not self._plan.modelled else None,
            "mean_token_entropy_nats": None,
        }

    def _acceptance(self, answer: Answer, found: Acceptance) -> dict[str, Any]:
        return {
            "request_id": answer.request_id,
            "prompt_id": self._requests[answer.request_id].prompt.id,
            "source": found.source,
            "num_drafts": found.num_drafts,
            "num_draft_tokens": found.num_draft_tokens,
            "num_accepted_tokens": found.num_accepted_tokens,
            "num_speculative_tokens": found.num_speculative_tokens,
            "acceptance_histogram": list(found.histogram) if found.histogram is not None else None,
        }

    def _steps(self, answer: Answer) -> list[dict[str, Any]]:
        if answer.status != "ok" or answer.num_output_tokens is None:
            return []
        speculative = self._cell.arm.speculative
        source: str | None
        if speculative is None:
            source, steps = "one token a step", [(0, 0, 1)] * (answer.num_output_tokens - 1)
        else:
            source, steps = steps_of_answer(
                answer,
                num_speculative_tokens=speculative.num_speculative_tokens,
                ragged=speculative.method in _RAGGED_METHODS
                or "num_speculative_tokens_per_batch_size" in (speculative.model_extra or {}),
            )
        if source is not None:
            self.steps_source = source
        prompt_id = self._requests[answer.request_id].prompt.id
        return [
            {
                "request_id": answer.request_id,
                "prompt_id": prompt_id,
                "step": number,
                "num_draft_tokens": drafted,
                "num_accepted_tokens": accepted,
                "num_emitted_tokens": emitted,
                "engine_step": None,
            }
            for number, (drafted, accepted, emitted) in enumerate(steps)
        ]


def steps_of_answer(
    answer: Answer, *, num_speculative_tokens: int, ragged: bool
) -> tuple[str | None, list[tuple[int, int, int]]]:
    """Steps of one finished answer of a speculating arm, from the best of what the server said.

    Parameters
    ----------
    answer
        With `num_output_tokens`; the token that prefill gave is not a step.
    num_speculative_tokens
        K of the arm.
    ragged
        Whether a step may carry fewer than K drafts, or none.

    Returns
    -------
    source
        `response, each step` (vLLM's detailed metrics), `response, histogram` (order of the steps not
        known), `chunks` (emitted tokens of each chunk; accepted is a lower bound where a stop cut the
        last step), or None: the steps are not known.
    steps
        (drafted, accepted, emitted) of each step. Emitted tokens add up to the answer less its first
        token. Steps without a draft are in no response: they are placed by the chunks where those
        show one step each, else as many as the tokens need stand at the end.
    """
    assert answer.num_output_tokens is not None
    wanted = answer.num_output_tokens - 1
    chunks = [count for _, count in answer.chunks]
    counts = [int(count) for count in chunks[1:] if count is not None]
    known = None not in chunks and answer.num_first_chunk_tokens == 1 and sum(counts) == wanted
    found = answer.acceptance
    if found is not None and found.per_step_accepted is not None and found.per_step_drafted is not None:
        drafts = list(zip(found.per_step_drafted, found.per_step_accepted, strict=True))
        placed = _placed(drafts, counts) if known else None
        return "response, each step", placed or _filled(drafts, wanted)
    if found is not None and found.histogram is not None and found.num_draft_tokens is not None:
        longest = len(found.histogram) - 1
        if found.num_draft_tokens == longest * sum(found.histogram):
            drafts = [(longest, j) for j, count in enumerate(found.histogram) for _ in range(count)]
            placed = _placed_by_size(drafts, counts) if known else None
            return "response, histogram", placed or _filled(drafts, wanted)
    if known and not ragged and max(counts, default=0) <= num_speculative_tokens + 1:
        return "chunks", [(num_speculative_tokens, count - 1, count) for count in counts]
    return None, []


def _placed(drafts: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Drafted steps laid over the chunks, one step each; None if they don't fit (merged chunks)."""
    steps: list[tuple[int, int, int]] = []
    following = 0
    for number, count in enumerate(counts):
        last = number == len(counts) - 1
        drafted, accepted = drafts[following] if following < len(drafts) else (0, -1)
        if accepted + 1 == count or (last and following == len(drafts) - 1 and count <= accepted + 1):
            steps.append((drafted, accepted, count))
            following += 1
        elif count == 1:
            steps.append((0, 0, 1))
        else:
            return None
    return steps if following == len(drafts) else None


def _placed_by_size(
    drafts: Sequence[tuple[int, int]], counts: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """A histogram's steps in the order of the chunks that show them; None if they don't fit."""
    if len(drafts) != len(counts):
        return None
    left = sorted(drafts, key=lambda draft: draft[1])
    steps = []
    for count in counts[:-1]:
        match = next((draft for draft in left if draft[1] + 1 == count), None)
        if match is None:
            return None
        left.remove(match)
        steps.append((*match, count))
    if left and counts[-1] <= left[0][1] + 1:
        steps.append((*left[0], counts[-1]))
        return steps
    return None


def _filled(drafts: Sequence[tuple[int, int]], wanted: int) -> list[tuple[int, int, int]]:
    """Drafted steps in order, the last ones cut at the answer's end, steps without a draft after them."""
    steps = []
    left = wanted
    for drafted, accepted in drafts:
        emitted = min(accepted + 1, left)
        steps.append((drafted, accepted, emitted))
        left -= emitted
    return steps + [(0, 0, 1)] * left


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


def _nonce(cell: Cell) -> str:
    """The same in every arm, another in every other cell."""
    seed = request_seed("nonce", cell.tier, cell.concurrency, cell.sampling.name, cell.repeat)
    return f"{seed % 16**8:08x}"


def _is_idle(body: str) -> bool:
    """Whether no gauge of running or waiting requests is above 0."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:num_requests_waiting ")
    values = [line.rpartition(" ")[2] for line in body.splitlines() if line.startswith(names)]
    return all(_number(value) == 0 for value in values)


def _tokens(body: str) -> list[str]:
    return [line for line in body.splitlines() if line.startswith("vllm:generation_tokens_total")]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
