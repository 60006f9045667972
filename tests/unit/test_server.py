"""The engine of servers without its tables: what is asked of servers, in which order, and what they say."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_server import FakeServer
from fake_vllm import make_fake_vllm

from specnb import schema
from specnb.config import Cell, Plan, plan_cells, plan_from_dict, read_plan
from specnb.engines import server as engine_module
from specnb.engines.attached import AttachedServer, Watch
from specnb.engines.base import CellContext, Engine, PlannedRequest, make_engine
from specnb.engines.responses import Answer
from specnb.engines.server import LOG_MARKS, ServerEngine
from specnb.errors import EngineError, PlanError
from specnb.workloads import Message, Prompt

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
GREEDY: dict[str, Any] = {"name": "greedy", "temperature": 0.0, "max_tokens": 8, "seed": 5}


def make_plan(url: str | None = None, **overrides: Any) -> Plan:
    """A plan for running servers at `url`, or without one for launched servers."""
    where = {"url": url} if url else {}
    return plan_from_dict(
        {
            "name": "plan",
            "target": {"model": "fake-model"},
            "engine": {"kind": "openai" if url else "vllm", **overrides.pop("engine", {})},
            "arms": [{"name": "baseline", **where}, {"name": "draft", "speculative": NGRAM, **where}],
            "workload": {"set": "builtin-en", "tiers": ["low"], **overrides.pop("workload", {})},
            "sampling": overrides.pop("sampling", [GREEDY]),
            "load": {"concurrency": [1], **overrides.pop("load", {})},
            **overrides,
        }
    )


def prompt(number: int = 0, text: str | None = None) -> Prompt:
    return Prompt(id=f"p{number}", tier="low", length="short", text=text or f"question {number}")


def chat(*turns: tuple[str, str]) -> Prompt:
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Prompt(id="chat", tier="low", length="short", messages=messages)


def planned(*prompts: Prompt) -> list[PlannedRequest]:
    return [
        PlannedRequest(request_id=f"r{number}", prompt=found, max_tokens=8, seed=100 + number)
        for number, found in enumerate(prompts)
    ]


@dataclass
class Notes:
    """What an engine reported while it worked."""

    messages: list[str] = field(default_factory=list)
    num_done: int = 0

    def done(self) -> None:
        self.num_done += 1

    def context(self, log_dir: Path | None = None) -> CellContext:
        return CellContext(
            run_id="run",
            clock=time.perf_counter,
            on_request_done=self.done,
            on_message=self.messages.append,
            log_dir=log_dir,
        )


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A running server of `fake-model`, four tokens a chunk."""
    with FakeServer(defaults={"gap_s": 0.001}) as found:
        yield found


Closing = Callable[[Plan], ServerEngine]


@pytest.fixture
def engine_of() -> Iterator[Closing]:
    """`engine_of(plan)`: its engine, closed with the test."""
    made: list[ServerEngine] = []

    def make(plan: Plan) -> ServerEngine:
        engine = make_engine(plan)
        assert isinstance(engine, ServerEngine)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def bodies(fake: FakeServer) -> list[dict[str, Any]]:
    """What was asked since the last call, without preflight's control."""
    return [record["body"] for record in fake.records() if not is_control(record["body"])]


def is_control(body: Mapping[str, Any]) -> bool:
    return str(body["model"]).startswith("specnb-control")


def cell_of(plan: Plan, arm: str = "baseline", **wanted: Any) -> Cell:
    return next(
        cell
        for cell in plan_cells(plan)
        if cell.arm.name == arm and all(getattr(cell, name) == value for name, value in wanted.items())
    )


# -- what is sent ----------------------------------------------------------------------------------


def test_b28_every_sampling_field_is_sent_and_recorded(fake: FakeServer, engine_of: Closing) -> None:
    setting = {"name": "hot", "temperature": 0.7, "top_p": 0.9, "max_tokens": 8, "seed": 5}
    plan = make_plan(fake.url, sampling=[setting])
    engine = engine_of(plan)
    engine.run_cell(cell_of(plan), planned(prompt()), Notes().context())
    sent = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "n": 1,
    }
    (body,) = bodies(fake)
    assert {name: body[name] for name in sent} == sent
    assert body["seed"] == 100
    assert "ignore_eos" not in body
    for arm in plan.arms:
        recorded = engine.describe_arm(arm)["sampling"]["hot"]
        assert recorded == {**sent, "seed": "one a request, from 5"}


def test_chat_prompts_and_raw_ones_on_either_endpoint(fake: FakeServer, engine_of: Closing) -> None:
    prompts = [chat(("system", "be brief"), ("user", "why?")), prompt(text="once upon")]
    for endpoint in ("chat", "completions"):
        plan = make_plan(
            fake.url,
            engine={"endpoint": endpoint},
            workload={"chat_template_kwargs": {"enable_thinking": False}},
        )
        engine_of(plan).run_cell(cell_of(plan), planned(*prompts), Notes().context())
    first, second, third, fourth = bodies(fake)
    assert first["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "why?"},
    ]
    assert second["messages"] == [{"role": "user", "content": "once upon"}]
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert third["prompt"] == "be brief\n\nwhy?"
    assert fourth["prompt"] == "once upon"


def test_b18_a_nonce_is_the_same_in_every_arm_and_another_in_every_other_cell(
    fake: FakeServer, engine_of: Closing
) -> None:
    plan = make_plan(
        fake.url,
        engine={"endpoint": "completions"},
        workload={"nonce": True},
        load={"concurrency": [1, 2]},
        repeats=2,
    )
    engine = engine_of(plan)
    starts: dict[str, set[str]] = {"baseline": set(), "draft": set()}
    for cell in plan_cells(plan):
        engine.run_cell(cell, planned(prompt(0), prompt(1)), Notes().context())
        found = {body["prompt"].partition("] ")[0] for body in bodies(fake)}
        assert len(found) == 1
        starts[cell.arm.name] |= found
    assert len(starts["baseline"]) == 4
    assert starts["baseline"] == starts["draft"]
    assert all(start.startswith("[") and len(start) == 9 for start in starts["draft"])


def test_a_nonce_stands_before_the_first_turn_and_not_in_a_warm_up(
    fake: FakeServer, engine_of: Closing
) -> None:
    plan = make_plan(fake.url, workload={"nonce": True})
    engine = engine_of(plan)
    requests = planned(chat(("system", "be brief"), ("user", "why?")))
    engine.warm_up(cell_of(plan), requests, Notes().context())
    engine.run_cell(cell_of(plan), requests, Notes().context())
    warm, measured = bodies(fake)
    assert warm["messages"][0]["content"] == "be brief"
    assert measured["messages"][0]["content"].endswith("] be brief")
    assert measured["messages"][1]["content"] == "why?"


def test_servers_without_ids_are_asked_for_running_counts(fake: FakeServer, engine_of: Closing) -> None:
    """Else nobody knows how many tokens a chunk of theirs holds."""
    plan = make_plan(fake.url)
    frames = engine_of(plan).run_cell(cell_of(plan), planned(prompt()), Notes().context())
    (body,) = bodies(fake)
    assert "return_token_ids" not in body
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert frames["chunks"]["num_tokens"].to_list() == [4, 4]
    assert frames["requests"]["num_first_chunk_tokens"].to_list() == [4]


# -- open loop -------------------------------------------------------------------------------------


def due_s(fake: FakeServer, engine: ServerEngine, cell: Cell, count: int) -> list[float]:
    """Scheduled times after the first one."""
    requests = planned(*(prompt(number) for number in range(count)))
    frames = engine.run_cell(cell, requests, Notes().context())
    times = frames["requests"].sort("request_id")["scheduled_s"]
    return [time - times[0] for time in times]


def test_b24_the_same_arrivals_in_every_arm_and_others_in_every_other_cell(
    fake: FakeServer, engine_of: Closing
) -> None:
    load = {"mode": "open", "request_rate": 200.0, "concurrency": [4, 8]}
    plan = make_plan(fake.url, load=load, repeats=2)
    engine = engine_of(plan)
    times = {cell.cell_id: due_s(fake, engine, cell, 6) for cell in plan_cells(plan)}
    others = []
    for cell in plan_cells(plan):
        if cell.arm.name == "baseline":
            other = cell_of(plan, "draft", concurrency=cell.concurrency, repeat=cell.repeat)
            assert times[cell.cell_id] == pytest.approx(times[other.cell_id], abs=1e-9)
            others.append(tuple(round(time, 9) for time in times[cell.cell_id]))
    assert len(set(others)) == 4
    assert all(0 < times[-1] < 0.3 for times in others)


def test_a_traces_arrivals(fake: FakeServer, engine_of: Closing, tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("10.0\n10.02\n10.05\n")
    content = make_plan(fake.url).model_dump(mode="json", exclude_none=True)
    content["load"] = {"mode": "open", "trace": "trace.txt", "concurrency": [4]}
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    plan = read_plan(tmp_path / "plan.yaml")
    assert due_s(fake, engine_of(plan), cell_of(plan), 3) == pytest.approx([0, 0.02, 0.05])


def test_warm_up_is_a_closed_loop_whatever_the_plan_says(fake: FakeServer, engine_of: Closing) -> None:
    """At one request in 1000 s an open loop would not end."""
    plan = make_plan(fake.url, load={"mode": "open", "request_rate": 0.001, "concurrency": [2]})
    notes = Notes()
    requests = planned(prompt(0), prompt(1), prompt(2))
    engine_of(plan).warm_up(cell_of(plan), requests, notes.context())
    assert len(bodies(fake)) == 3
    assert notes.messages == []


def test_failed_warm_up_requests_are_said(engine_of: Closing) -> None:
    with FakeServer(requests={2: {"fail": "http_500"}}, defaults={"gap_s": 0.001}) as fake:
        plan = make_plan(fake.url)  # numbers 0 and 1 are preflight's
        notes = Notes()
        engine_of(plan).warm_up(cell_of(plan), planned(prompt(0), prompt(1)), notes.context())
    assert notes.messages == ["baseline: 1 of 2 warm-up requests failed (HTTP 500: as asked: 500)"]


# -- idle servers and their counters ---------------------------------------------------------------


class Told:
    """A server that answers each path with the next of its answers, the last one for good."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {f"/{name.replace('__', '/')}": list(found) for name, found in answers.items()}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

            def _answer(self, body: dict[str, Any]) -> None:
                told.asked.append((self.path, body))
                waiting = told.answers.get(self.path, [(404, b"{}")])
                status, content = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                if callable(content):
                    status, content = content(body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Told:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


MODELS = (200, {"data": [{"id": "fake-model"}]})


def scrapes_of(url: str, engine_of: Closing) -> list[str]:
    engine = engine_of(make_plan(url))
    return [body for _, body in engine._idle_scrapes(engine._running["baseline", 0], Notes().context())]


def counters(running: float, tokens: int, prefix: str = "vllm") -> bytes:
    names = {
        "vllm": ("num_requests_running", "generation_tokens_total"),
        "sglang": ("num_running_reqs", "generation_tokens_total"),
        "llamacpp": ("requests_processing", "tokens_predicted_total"),
    }[prefix]
    return (
        f"# HELP {prefix}:{names[0]} 7\n"
        f'{prefix}:{names[0]}{{engine="0"}} {running}\n{prefix}:{names[1]}{{engine="0"}} {tokens}\n'
    ).encode()


@pytest.mark.parametrize("prefix", ["vllm", "sglang", "llamacpp"])
def test_a_server_is_idle_when_nothing_runs_and_its_tokens_stand_still(
    engine_of: Closing, prefix: str
) -> None:
    states = [(1.0, 10), (1.0, 10), (0.0, 14), (0.0, 17), (0.0, 17), (0.0, 99)]
    metrics = [(200, counters(running, tokens, prefix)) for running, tokens in states]
    with Told(v1__models=[MODELS], metrics=metrics) as told:
        bodies = scrapes_of(told.url, engine_of)
    assert [body.encode() for body in bodies] == [counters(0.0, 17, prefix)] * 2


def test_a_server_that_is_never_idle_is_scraped_all_the_same(
    engine_of: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_IDLE_LIMIT_S", 0.2)
    with Told(v1__models=[MODELS], metrics=[(200, counters(1.0, 10))]) as told:
        assert len(scrapes_of(told.url, engine_of)) == 2


def test_a_server_without_metrics_has_no_scrapes(engine_of: Closing) -> None:
    with Told(v1__models=[MODELS]) as told:
        assert scrapes_of(told.url, engine_of) == []


def test_an_error_page_is_no_scrape(engine_of: Closing) -> None:
    with Told(v1__models=[MODELS], metrics=[(200, b"a 1\n"), (503, b"overloaded")]) as told:
        assert scrapes_of(told.url, engine_of) == ["a 1\n"]


def test_a05_scrapes_of_one_end_alone_are_no_window(engine_of: Closing) -> None:
    """Two scrapes before the first request and none after the last would say that nothing was drafted."""
    with FakeServer(defaults={"gap_s": 0.001}, requests={3: {"fail": "die"}}) as fake:
        plan = make_plan(fake.url)
        engine = engine_of(plan)
        frames = engine.run_cell(cell_of(plan), planned(prompt(0), prompt(1)), Notes().context())
    assert frames["requests"]["status"].to_list() == ["ok", "error"]
    assert frames["scrapes"]["scrape"].to_list() == [0]
    facts = engine.cell_facts()["server"]
    assert facts["alive_at_end"] is False
    assert facts["death"] == "no longer answers"


def test_statistics_lines_of_the_log_are_those_of_vllm() -> None:
    """As vLLM 0.32 writes them; `reconciliation` reads the first kind."""
    lines = [
        "(APIServer pid=1) INFO 01-01 00:00:00 [loggers.py:259] Engine 000: Avg prompt throughput: 5.1 tok",
        "(APIServer pid=1) INFO 01-01 00:00:00 [metrics.py:100] SpecDecoding metrics: Mean acceptance len",
    ]
    assert all(any(mark in line for mark in LOG_MARKS) for line in lines)


# -- running servers -------------------------------------------------------------------------------


def attached(url: str, *, endpoint: str = "chat", key: str | None = None) -> AttachedServer:
    plan = make_plan(url, engine={"endpoint": endpoint})
    return AttachedServer(plan, plan.arms[1], api_key=key)


def test_b38_the_list_of_models_must_name_the_target() -> None:
    """An echo is no evidence: this server answers 200 to `fake-model`, and says that it was that model."""
    with FakeServer(model="other", any_model=True) as fake:
        with pytest.raises(EngineError) as caught:
            attached(fake.url)
        assert str(caught.value) == (
            f"arms.draft.url: {fake.url}: serves other, not fake-model; correct the url or target.model"
        )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_b38_a_server_that_answers_for_any_name_is_recorded_and_warned_about(
    engine_of: Closing, endpoint: str
) -> None:
    with FakeServer(any_model=True) as fake:
        assert attached(fake.url, endpoint=endpoint).facts()["answers_any_model"] is True
        fake.control(any_model=False)
        assert attached(fake.url, endpoint=endpoint).facts()["answers_any_model"] is False
        controls = fake.records()
        assert all(is_control(record["body"]) for record in controls)
        assert {record["path"].endswith("chat/completions") for record in controls} == {endpoint == "chat"}
        fake.control(any_model=True)
        with FakeServer(any_model=True) as other:
            engine = engine_of(apart(make_plan(fake.url), other.url))
            found = engine.describe()["warnings"]
        assert found == [
            f"arms.{arm}.url: the server answers for any model's name; only its list of models says what it "
            "serves"
            for arm in ("baseline", "draft")
        ]


def test_a_server_that_can_not_be_reached() -> None:
    with FakeServer() as fake:
        url = fake.url
    with pytest.raises(EngineError) as caught:
        attached(url)
    assert str(caught.value) == (
        f"arms.draft.url: {url}: {url.removeprefix('http://')}/v1/models: can't be reached "
        "(Connection refused); is the server up?"
    )


def test_a_refused_key_names_where_keys_come_from() -> None:
    with FakeServer(api_key="right") as fake:
        for key in (None, "wrong"):
            with pytest.raises(
                EngineError, match=r"refused \(401\); put the key into the variable of engine"
            ):
                attached(fake.url, key=key)
        assert attached(fake.url, key="right").facts()["models"] == ["fake-model"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>It works!</html>"), "/v1/models is not an OpenAI list of models; correct the url"),
        ((200, {"models": []}), "/v1/models is not an OpenAI list of models; correct the url"),
        ((200, {"data": ["fake-model"]}), "/v1/models is not an OpenAI list of models; correct the url"),
        ((200, {"data": []}), "serves no model, not fake-model; correct the url or target.model"),
        ((500, b"{}"), "/v1/models answers 500; correct the url"),
        ((404, b"{}"), "/v1/models answers 404; correct the url"),
    ],
)
def test_b38_what_is_no_list_of_models(answer: tuple[int, Any], message: str) -> None:
    with Told(v1__models=[answer]) as told, pytest.raises(EngineError) as caught:
        attached(told.url)
    assert str(caught.value) == f"arms.draft.url: {told.url}: {message}"


@pytest.mark.parametrize("url", ["ftp://host:1", "http://me:secret@host:1", "http://host:1/?key=secret"])
def test_a_malformed_url_is_named_by_its_arm(url: str) -> None:
    with pytest.raises(PlanError, match=r"^arms\.draft\.url: ") as caught:
        attached(url)
    assert "me:secret" not in str(caught.value)


def test_vllm_says_its_version_and_is_asked_for_ids(engine_of: Closing) -> None:
    answers = {"v1__models": [MODELS], "version": [(200, {"version": "0.32.0"})]}
    with Told(**answers) as told:
        plan = make_plan(told.url)
        engine = engine_of(plan)
        engine.run_cell(cell_of(plan), planned(prompt()), Notes().context())
        body = next(
            body for path, body in told.asked if path.endswith("completions") and not is_control(body)
        )
    assert engine.describe_arm(plan.arms[0])["server"]["version"] == "0.32.0"
    assert body["return_token_ids"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_facts_of_a_cell(fake: FakeServer, engine_of: Closing) -> None:
    plan = make_plan(fake.url)
    engine = engine_of(plan)
    engine.run_cell(cell_of(plan), planned(prompt()), Notes().context())
    facts = engine.cell_facts()
    assert facts["server"] == {
        "models": ["fake-model"],
        "answers_any_model": False,
        "version": None,
        "settings": {},
        "served_model_name": "fake-model",
        "alive_at_end": True,
        "death": None,
        "restarts": 0,
        "prefix_cache_reset": None,
    }
    assert facts["client"]["max_in_flight"] == 1
    assert facts["client"]["limited"] == []
    assert facts["steps_source"] == "one token a step"


# -- is it gone? -----------------------------------------------------------------------------------


@dataclass
class Alive:
    """A server that counts how often it was asked whether it lives."""

    lives: bool = True
    num_asked: int = 0
    url: str = ""
    model: str = ""

    def is_alive(self) -> bool:
        self.num_asked += 1
        return self.lives

    def facts(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        pass


def failed(kind: str | None) -> Answer:
    status = "ok" if kind is None else "error"
    return Answer(request_id="r", scheduled_s=0.0, sent_s=0.0, status=status, error_kind=kind)


def test_a_running_server_is_asked_after_lost_requests_only() -> None:
    server = Alive()
    watch = Watch(server, concurrency=2, launched=False)
    for kind in (None, "http_500", "http_429", "garbage", "empty", "server_error", "deadline"):
        watch.note(failed(kind))
    assert watch.is_alive()
    assert server.num_asked == 0
    for _ in range(50):
        watch.note(failed("truncated"))  # each question may take as long as a round trip
    assert server.num_asked == 1
    watch.note(failed("connect"))
    watch.note(failed("stalled"))
    assert server.num_asked == 3
    server.lives = False
    assert watch.is_alive()
    watch.note(failed("connect"))
    assert not watch.is_alive()
    server.lives = True
    assert not watch.is_alive()  # not within the same cell


def test_a_launched_server_is_asked_at_any_time() -> None:
    server = Alive()
    watch = Watch(server, concurrency=2, launched=True)
    watch.note(failed("disconnected"))
    assert server.num_asked == 0
    assert watch.is_alive()
    server.lives = False
    assert not watch.is_alive()


@pytest.mark.parametrize("launched", [False, True])
def test_a_server_hangs_when_twice_its_concurrency_stalled_without_an_answer(launched: bool) -> None:
    watch = Watch(Alive(), concurrency=2, launched=launched)
    for kind in ("stalled", "stalled", "stalled", None, "stalled", "http_500", "stalled", "stalled"):
        watch.note(failed(kind))
        assert watch.is_alive()
        assert not watch.hangs
    watch.note(failed("stalled"))
    assert watch.hangs
    assert not watch.is_alive()


# -- keys ------------------------------------------------------------------------------------------


def test_the_key_is_that_of_the_plans_variable(
    fake: FakeServer, engine_of: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(fake.url, engine={"api_key_env": "MY_KEY"})
    monkeypatch.setenv("SPECNB_API_KEY", "another")
    engine_of(plan).run_cell(cell_of(plan), planned(prompt()), Notes().context())
    assert {record["has_key"] for record in fake.records()} == {False}
    monkeypatch.setenv("MY_KEY", "sk-mine")
    fake.control(api_key="sk-mine")
    engine = engine_of(plan)
    frames = engine.run_cell(cell_of(plan), planned(prompt()), Notes().context())
    assert frames["requests"]["status"].to_list() == ["ok"]
    assert {record["has_key"] for record in fake.records()} == {True}
    with FakeServer() as other:
        engine = engine_of(apart(plan, other.url))
        assert "sk-mine" not in json.dumps([engine.describe(), engine.describe_arm(plan.arms[0])])


def apart(plan: Plan, url: str) -> Plan:
    """The plan with its second arm on a server of its own."""
    baseline, arm = plan.arms
    return plan.model_copy(update={"arms": (baseline, arm.model_copy(update={"url": url}))})


@pytest.mark.parametrize("form", ["{url}", "{url}/v1", "{url}/"])
def test_two_arms_on_one_server_are_refused(fake: FakeServer, engine_of: Closing, form: str) -> None:
    plan = make_plan(fake.url)
    other = form.format(url=fake.url).replace("127.0.0.1", "localhost")
    engine = engine_of(apart(plan, other))
    with pytest.raises(PlanError) as caught:
        engine.describe()
    assert str(caught.value) == (
        f"arms.draft.url: {other} is the server of arm baseline, too; give each arm a server of its own"
    )


def test_a_key_that_is_none_is_refused_without_being_shown(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECNB_API_KEY", "two words")
    with pytest.raises(PlanError, match=r"engine.api_key_env: the key holds spaces") as caught:
        make_engine(make_plan(fake.url))
    assert "two" not in str(caught.value).removeprefix("engine.api_key_env: the key holds spaces")


# -- judging splits --------------------------------------------------------------------------------


def split(prompt_id: str = "p0", **fields: Any) -> dict[str, Any]:
    return {
        "run_id": "run",
        "sampling": "greedy",
        "concurrency": 1,
        "prompt_id": prompt_id,
        "arm": "draft",
        "repeat": 0,
        "reference_arm": "baseline",
        "reference_repeat": 0,
        "index": 1,
        "token_id": 8,
        "reference_token_id": 7,
        "margin_nats": None,
        "margin_fp64_nats": None,
        **fields,
    }


def judged(engine: Engine, *splits: Mapping[str, Any], prompts: Sequence[Prompt] = ()) -> list[float | None]:
    """Margins of splits between the baseline's [5, 7, 9] and another answer to the same prompt."""
    rows = [
        {
            "arm": "baseline",
            "repeat": repeat,
            "sampling": "greedy",
            "concurrency": 1,
            "prompt_id": found.id,
            "output_token_ids": [5, 7, 9],
        }
        for found in prompts or [prompt()]
        for repeat in (0, 1)
    ]
    names = {name: schema.REQUESTS.polars_schema[name] for name in rows[0]}
    frame = pl.DataFrame(splits, schema=schema.SPLITS.polars_schema)
    by_id = {found.id: found for found in prompts or [prompt()]}
    found = engine.judge_splits(frame, pl.DataFrame(rows, schema=names), by_id)
    assert found.schema == schema.SPLITS.polars_schema
    return found["margin_nats"].to_list()


def top(**logprobs: float) -> tuple[int, dict[str, Any]]:
    """A completion's answer with these log probabilities; names are `t8` for `token_id:8`."""
    found = {f"token_id:{name[1:]}": value for name, value in logprobs.items()}
    return 200, {"choices": [{"logprobs": {"top_logprobs": [found]}}]}


TOKENS = (200, {"tokens": [1, 2, 3]})


def judging(*answers: Any, tokens: Any = TOKENS) -> Told:
    """A server of `fake-model` that answers completions; the first two are preflight's controls."""
    controls = [(404, b"{}"), (404, b"{}")]
    return Told(v1__models=[MODELS], tokenize=[tokens], v1__completions=[*controls, *answers])


COMPLETIONS = {"endpoint": "completions"}


def test_a_margin_is_what_the_baselines_server_gives_after_the_common_prefix(engine_of: Closing) -> None:
    with judging(top(t7=-0.25, t8=-0.75, t4=-3.0)) as told:
        engine = engine_of(make_plan(told.url, engine=COMPLETIONS))
        assert judged(engine, split()) == [pytest.approx(0.5)]
        (_, tokenized), (_, asked) = told.asked[-2:]
    assert tokenized == {"model": "fake-model", "prompt": "question 0"}
    assert asked == {
        "model": "fake-model",
        "prompt": [1, 2, 3, 5],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
    }


def test_a_token_outside_the_top_has_at_least_the_margin_of_the_last_one(engine_of: Closing) -> None:
    with judging(top(t7=-0.25, t4=-3.0)) as told:
        assert judged(engine_of(make_plan(told.url, engine=COMPLETIONS)), split()) == [pytest.approx(2.75)]


@pytest.mark.parametrize(
    "answer",
    [
        (400, b"{}"),
        (200, b"no json"),
        (200, [1]),
        (200, {"choices": []}),
        (200, {"choices": [{"logprobs": None}]}),
        (200, {"choices": [{"logprobs": {"top_logprobs": [{"the": -1.0}]}}]}),
        top(),
        top(t8=-0.5),  # without the reference's own token
    ],
    ids=["refused", "no JSON", "no object", "no choice", "no logprobs", "names", "empty", "no reference"],
)
def test_a_margin_that_the_server_does_not_give_is_null(engine_of: Closing, answer: Any) -> None:
    with judging(answer) as told:
        assert judged(engine_of(make_plan(told.url, engine=COMPLETIONS)), split()) == [None]


@pytest.mark.parametrize("tokens", [(404, b"{}"), (200, {"tokens": "abc"}), (200, {})])
def test_without_the_prompts_ids_nothing_is_judged(engine_of: Closing, tokens: Any) -> None:
    with judging(top(t7=-0.25, t8=-0.75), tokens=tokens) as told:
        assert judged(engine_of(make_plan(told.url, engine=COMPLETIONS)), split()) == [None]


def test_an_answer_that_ended_has_no_margin_and_a_prompt_is_tokenized_once(engine_of: Closing) -> None:
    with judging(top(t7=-0.25, t8=-0.75)) as told:
        engine = engine_of(make_plan(told.url, engine=COMPLETIONS))
        splits = [split(), split(token_id=None), split(arm="other", index=0), split(sampling="absent")]
        assert judged(engine, *splits) == [pytest.approx(0.5), None, pytest.approx(0.5), None]
        asked = [path for path, _ in told.asked]
    assert asked.count("/tokenize") == 1
    assert asked.count("/v1/completions") == 2 + 2


def test_a_chat_is_tokenized_with_its_template(engine_of: Closing) -> None:
    with judging(top(t7=-0.25, t8=-0.75)) as told:
        kwargs = {"enable_thinking": False}
        engine = engine_of(make_plan(told.url, workload={"chat_template_kwargs": kwargs}))
        turns = [chat(("system", "be brief"), ("user", "why?"))]
        told.answers["/v1/completions"] = [top(t7=-0.25, t8=-0.75)]
        assert judged(engine, split("chat"), prompts=turns) == [pytest.approx(0.5)]
        tokenized = next(body for path, body in told.asked if path == "/tokenize")
    assert tokenized == {
        "model": "fake-model",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}],
        "add_generation_prompt": True,
        "chat_template_kwargs": kwargs,
    }


def test_a_prompt_with_a_nonce_is_judged_with_it(engine_of: Closing) -> None:
    """Answers of two repeats are to two prompts: there is nothing to judge between them."""
    with judging(top(t7=-0.25, t8=-0.75)) as told:
        plan = make_plan(told.url, engine=COMPLETIONS, workload={"nonce": True}, repeats=2)
        engine = engine_of(plan)
        splits = [
            split(),
            split(repeat=1, reference_repeat=1),
            split(repeat=1, reference_arm="draft", reference_repeat=0),
        ]
        assert judged(engine, *splits) == [pytest.approx(0.5), pytest.approx(0.5), None]
        tokenized = [body["prompt"] for path, body in told.asked if path == "/tokenize"]
        told.asked.clear()
        engine.run_cell(cell_of(plan, "draft", repeat=1), planned(prompt()), Notes().context())
        sent = next(body["prompt"] for path, body in told.asked if path == "/v1/completions")
    assert len(set(tokenized)) == 2
    assert tokenized[1] == sent


def test_a_server_that_goes_away_while_it_judges_leaves_nulls(engine_of: Closing) -> None:
    notes = Notes()
    with FakeServer(defaults={"gap_s": 0.001}) as fake:
        plan = make_plan(fake.url)
        engine = engine_of(plan)
        engine.run_cell(cell_of(plan), planned(prompt()), notes.context())
    assert judged(engine, split(), split(index=2)) == [None, None]


def test_modelled_text_is_not_judged(engine_of: Closing) -> None:
    with judging(top(t7=-0.25, t8=-0.75)) as told:
        assert judged(engine_of(make_plan(told.url, engine=COMPLETIONS, modelled=True)), split()) == [None]
        assert "/tokenize" not in [path for path, _ in told.asked]


# -- launched servers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_fake_vllm(tmp_path_factory.mktemp("fake"))


def test_a_plan_that_the_version_can_not_run_is_refused_before_anything_starts(python: str) -> None:
    content = make_plan(engine={"python": python}).model_dump(mode="json", exclude_none=True)
    content["modelled"] = True
    content["arms"][1]["speculative"]["rejection_sample_method"] = "fly"
    with pytest.raises(PlanError, match=r"fly.* 0\.33"):
        make_engine(plan_from_dict(content))


def test_launch_arguments_name_no_folder_of_this_machine(
    python: str, engine_of: Closing, tmp_path: Path
) -> None:
    for name in ("target", "drafter", "tokenizer"):
        (tmp_path / name).mkdir()
    content = make_plan(engine={"python": python}).model_dump(mode="json", exclude_none=True)
    content["target"]["model"] = "target"
    content["engine"]["args"] = {"tokenizer": "tokenizer", "max_model_len": 4096}
    content["arms"][1]["speculative"] = {
        "method": "draft_model",
        "model": "drafter",
        "num_speculative_tokens": 3,
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    plan = read_plan(tmp_path / "plan.yaml")
    engine = engine_of(plan)
    facts = [engine.describe_arm(arm) for arm in plan.arms]
    assert str(tmp_path) not in json.dumps(facts)
    assert facts[1]["arguments"]["tokenizer"] == "tokenizer"
    assert facts[1]["arguments"]["max_model_len"] == 4096
    assert facts[1]["arguments"]["speculative_config"] == {**content["arms"][1]["speculative"]}
    assert facts[0]["sampling"]["greedy"]["temperature"] == 0.0
    assert facts[0] == engine.describe_arm(plan.arms[0])  # a resumed run compares them


def test_a_launched_server_gets_no_key(
    python: str, engine_of: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECNB_API_KEY", "sk-mine")
    assert engine_of(make_plan(engine={"python": python}))._key is None
    assert os.environ["SPECNB_API_KEY"] == "sk-mine"
