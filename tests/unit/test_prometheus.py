"""Scrapes and log lines: names, windows, resets, engines, and every reason for having no number."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specnb import prometheus
from specnb.errors import RecordError
from specnb.prometheus import Scrape, SpecCounters, Window, parse, spec_log_lines

TWO_ENGINES = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 60
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 120
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 50
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 63
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 42
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 21
"""

OLD_SET = """\
vllm:spec_decode_draft_acceptance_rate{model_name="m"} 0.5
vllm:spec_decode_efficiency{model_name="m"} 0.6
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 1000
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 2000
vllm:spec_decode_num_emitted_tokens_total{model_name="m"} 1500
"""

LOG = """\
INFO 11-29 10:00:10 [loggers.py:336] Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs
\x1b[36m(APIServer pid=7)\x1b[0;0m INFO [metrics.py:118] SpecDecoding metrics: Mean acceptance length: 2.87, \
Accepted throughput: 9.40 tokens/s, Drafted throughput: 15.10 tokens/s, Accepted: 282 tokens, \
Drafted: 453 tokens, Per-position acceptance rate: 0.821, 0.609, 0.437, Avg Draft acceptance rate: 62.3%
INFO something else entirely
INFO 11-29 10:00:20 [loggers.py:336] Engine 001: Avg prompt throughput: 0.0 tokens/s, Running: 1 reqs
INFO [metrics.py:118] SpecDecoding metrics: Mean acceptance length: 1.00, \
Accepted throughput: 0.00 tokens/s, Drafted throughput: 1.00 tokens/s, \
Accepted: 0 tokens, Drafted: 30 tokens, \
Per-position acceptance rate: 0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%
"""


def body(*, start: float | None = None, **values: float) -> str:
    """A scrape with spec decode counters of one engine; names as keywords, without their prefix."""
    lines = [f'vllm:{name}_total{{engine="0",model_name="m"}} {value}' for name, value in values.items()]
    if start is not None:
        lines.append(f"process_start_time_seconds {start}")
    return "\n".join(lines) + "\n"


def spec(
    drafts: float, accepted: float | None = None, *, start: float | None = None, **more: float
) -> Scrape:
    values = {"spec_decode_num_drafts": drafts, **more}
    if accepted is not None:
        values["spec_decode_num_accepted_tokens"] = accepted
    return parse(body(start=start, **values))


# Names


@pytest.mark.parametrize("order", [1, -1])
def test_a02_positions_are_summed_over_engines(order: int) -> None:
    scrape = parse("\n".join(TWO_ENGINES.splitlines()[::order]) + "\n")
    found = scrape.acceptance(2)
    assert found.mean_acceptance_length == pytest.approx(2.13)
    assert found.accepted_per_position == (72, 41), "of 100 drafts: 0.72 and 0.41"
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (100, 200, 113)
    lengths = {name: engine.mean_acceptance_length for name, engine in found.by_engine.items()}
    assert lengths == {"0": pytest.approx(2.25), "1": pytest.approx(2.05)}


def test_a02_positions_of_one_engine_alone_are_refused() -> None:
    lost = "".join(
        line
        for line in TWO_ENGINES.splitlines(keepends=True)
        if "per_pos" not in line or 'engine="1"' in line
    )
    with pytest.raises(RecordError, match=r"add up to 63, not to 113 accepted \(1\.63 and 2\.13\)"):
        parse(lost).acceptance(2)


def test_a03_names_are_exact_and_created_is_a_time() -> None:
    scrape = parse(
        """\
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 50.0
# TYPE vllm:spec_decode_num_accepted_tokens_created gauge
vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 20.0
"""
    )
    assert scrape.total("vllm:spec_decode_num_accepted_tokens") == 50
    assert scrape.total("vllm:spec_decode_num_accepted_tokens_per_pos") == 50
    bare = parse('vllm:spec_decode_num_accepted_tokens{engine="0"} 50\n')
    assert bare.total("vllm:spec_decode_num_accepted_tokens") == 50
    assert bare.total("vllm:spec_decode_num_accepted") is None


def test_what_prometheus_client_writes_is_read() -> None:
    registry = CollectorRegistry()
    labels = {"engine": "0", "model_name": 'odd "name"\\{}'}
    drafts = Counter("vllm:spec_decode_num_drafts", "text", list(labels), registry=registry)
    drafts.labels(**labels).inc(7)
    accepted = Counter("vllm:spec_decode_num_accepted_tokens", "text", list(labels), registry=registry)
    accepted.labels(**labels).inc(14)
    iterations = Histogram("vllm:iteration_tokens_total", "text", list(labels), registry=registry)
    for tokens in (1, 8, 4000):
        iterations.labels(**labels).observe(tokens)
    Gauge("vllm:kv_cache_usage_perc", "text", registry=registry).set(math.nan)
    scrape = parse(generate_latest(registry).decode())
    found = scrape.acceptance(3)
    assert (found.num_drafts, found.mean_acceptance_length, found.dialect) == (7, 3.0, "vllm")
    assert scrape.models == ('odd "name"\\{}',)
    assert scrape.total("vllm:iteration_tokens_total_count") == 3
    assert "vllm:iteration_tokens_total_count" in scrape.monotonic
    assert not any(name.endswith(("_created", "_bucket")) for name in scrape.monotonic)
    assert "vllm:kv_cache_usage_perc" not in scrape.samples, "NaN is no value"


def test_a_window_of_vllm_0_32_on_the_cpu() -> None:
    """N-gram drafts, K = 5, 7 requests of 272 tokens: their responses held 77 drafts, 381 and 152 tokens."""

    def scrape(drafts: int, drafted: int, accepted: int, places: tuple[int, ...], *tokens: int) -> Scrape:
        labels = 'engine="0",model_name="demo"'
        counters = {
            "spec_decode_num_drafts": drafts,
            "spec_decode_num_draft_tokens": drafted,
            "spec_decode_num_accepted_tokens": accepted,
            "generation_tokens": tokens[0],
        }
        lines = ["# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1.796004571e+09"]
        for name, value in counters.items():
            lines += [
                f"# HELP vllm:{name}_total Number.",
                f"# TYPE vllm:{name}_total counter",
                f"vllm:{name}_total{{{labels}}} {value}.0",
                f"# TYPE vllm:{name}_created gauge",
                f"vllm:{name}_created{{{labels}}} 1.7960046423118143e+09",
            ]
        lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter")
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {count}.0'
            for place, count in enumerate(places)
        ]
        lines += [
            "# TYPE vllm:iteration_tokens_total histogram",
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="demo"}} {tokens[1]}.0',
            f"vllm:iteration_tokens_total_count{{{labels}}} {tokens[1]}.0",
            f"vllm:iteration_tokens_total_sum{{{labels}}} {tokens[2]}.0",
        ]
        return parse("\n".join(lines) + "\n")

    before = scrape(0, 0, 0, (0,) * 5, 8, 8, 40)
    after = scrape(77, 381, 152, (54, 30, 26, 21, 21), 280, 58, 639)
    window = Window.over([before, before, after, after])
    found = window.acceptance(5)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (77, 381, 152)
    assert found.mean_acceptance_length == pytest.approx(2.974, abs=5e-4)
    assert found.flags == ("ragged: draft tokens / drafts = 4.948, not 5",)
    assert (window.generation_tokens, window.engine_iterations, window.reset) == (272, 50, None)


def test_a21_the_old_set_derives_drafts_from_k() -> None:
    found = parse(OLD_SET).acceptance(4)
    assert (found.dialect, found.num_drafts, found.num_draft_tokens) == ("vllm-v0", 500, 2000)
    assert found.mean_acceptance_length == 3.0
    assert (found.num_accepted_tokens, found.accepted_per_position) == (1000, None)
    assert found.flags == ("derived: drafts = 2000 draft tokens / 4",), "0.60 = 1500 / (500 x 5) agrees"


def test_a21_without_k_the_old_set_gives_no_length() -> None:
    found = parse(OLD_SET).acceptance()
    assert (found.mean_acceptance_length, found.num_drafts) == (None, None)
    assert found.reason == "metrics_missing: this server counts no drafts, and K is unknown"
    assert "no multiple of K = 3" in (parse(OLD_SET).acceptance(3).reason or "")
    wrong = parse(OLD_SET).acceptance(5)
    assert wrong.flags[1:] == (
        "emitted tokens 1500 are not accepted 1000 + drafts 400",
        "spec_decode_efficiency is 0.600, the counters give 0.583: K is not 5?",
    )


def test_llama_cpp_mirrors_the_names_and_sglang_has_a_gauge() -> None:
    text = TWO_ENGINES.replace("vllm:", "llamacpp:").replace(',model_name="m"', "")
    assert parse(text).acceptance(2).mean_acceptance_length == pytest.approx(2.13)
    found = parse('sglang:spec_accept_length{model_name="m"} 3.5\nsglang:spec_accept_rate 0.4\n').acceptance(
        7
    )
    assert (found.mean_acceptance_length, found.reported_acceptance_length) == (None, 3.5)
    assert found.reason is not None
    assert "gauge over an interval" in found.reason


def test_several_models_in_one_body_need_a_name() -> None:
    text = TWO_ENGINES + 'vllm:spec_decode_num_drafts_total{engine="0",model_name="other"} 9\n'
    found = parse(text).acceptance(2)
    assert (found.mean_acceptance_length, found.reason) == (
        None,
        "several_models: the counters are of m, other; name the one to count",
    )
    window = Window(parse("vllm:num_requests_running 0\n"), parse(text))
    assert window.acceptance(2, model="m").num_drafts == 100
    assert window.acceptance(2, model="other").num_drafts == 9


# Windows


def test_a05_a_window_is_a_difference() -> None:
    window = Window(spec(1000, 2500), spec(1200, 2900))
    found = window.acceptance()
    assert (found.num_drafts, found.num_accepted_tokens) == (200, 400)
    assert found.mean_acceptance_length == 3.0
    assert spec(1200, 2900).acceptance().mean_acceptance_length == pytest.approx(3.417, abs=5e-4)


def test_a06_a_restart_leaves_null_and_not_2_795() -> None:
    window = Window(spec(5000, 9000, start=1000), spec(120, 240, start=1800))
    assert window.reset == (
        "counter_reset: the server restarted in the window (process_start_time_seconds 1000 to 1800)"
    )
    found = window.acceptance(3)
    assert (found.mean_acceptance_length, found.num_drafts, found.reason) == (None, None, window.reset)
    trap = 1 + (240 - 9000) / (120 - 5000)
    assert trap == pytest.approx(2.795, abs=5e-4), "looks perfectly normal"
    assert Window(spec(5000, 9000), spec(120, 240)).reset == (
        'counter_reset: the server restarted in the window (vllm:spec_decode_num_drafts_total{engine="0",'
        'model_name="m"} 5000 to 120)'
    )
    assert window.generation_tokens is None


def test_a06_a_restart_that_counted_on_beyond_is_found_by_its_start_time() -> None:
    window = Window(spec(50, 90, start=1000), spec(120, 240, start=1800))
    assert window.acceptance(3).mean_acceptance_length is None


@pytest.mark.parametrize("start", [None, 1000.0])
def test_a07_counters_that_saw_tooth_are_several_processes(start: float | None) -> None:
    scrapes = [spec(drafts, start=start) for drafts in (120, 80, 120)]
    window = Window.over(scrapes)
    assert window.reset is not None
    assert window.reset.startswith("per_process_metrics: ")
    assert "PROMETHEUS_MULTIPROC_DIR" in window.reset
    assert window.acceptance(3).reason == window.reset
    assert window.acceptance(3).mean_acceptance_length is None


def test_a07_other_signs_of_several_processes() -> None:
    """A fall in one process, to another value than 0 on an idle server, twice, or to an older process."""
    quiet = spec(10, 10)
    for scrapes in (
        [spec(120, start=5), spec(80, start=5)],
        [spec(120), spec(80), quiet, spec(700), spec(700)],
        [spec(120), spec(80), spec(150), spec(110)],
        [spec(120, start=9), spec(150, start=4)],
        [spec(120, start=4), spec(150, start=9), spec(160, start=4)],
    ):
        assert (Window.over(scrapes).reset or "").startswith("per_process_metrics")
    restarted = [spec(120), spec(120), spec(10), spec(500), spec(500)]
    assert (Window.over(restarted).reset or "").startswith("counter_reset")
    assert (Window.over([spec(5), parse("vllm:num_requests_running 0\n")]).reset or "").startswith(
        "counter_reset"
    )


def test_the_first_two_and_last_two_of_many_scrapes_are_idle() -> None:
    scrapes = [spec(drafts, drafts, generation_tokens=drafts) for drafts in (100, 100, 130, 200, 200)]
    window = Window.over(scrapes)
    assert (window.acceptance(3).num_drafts, window.idle_change, window.generation_tokens) == (100, None, 100)
    busy = Window.over([spec(1, generation_tokens=t) for t in (5, 9, 30, 30)])
    assert busy.reset is None
    assert busy.idle_change is not None
    assert busy.idle_change.startswith("not_idle: vllm:generation_tokens rose by 4 between two scrapes")
    with pytest.raises(RecordError, match="1 scrape of /metrics; a window needs one before and one after"):
        Window.over([spec(1)])


def test_other_counters_of_a_window() -> None:
    registry = CollectorRegistry()
    iterations = Histogram("vllm:iteration_tokens_total", "text", ["engine"], registry=registry)
    preemptions = Counter("vllm:num_preemptions", "text", registry=registry)
    running = Gauge("vllm:num_requests_running", "text", ["engine"], registry=registry)
    scrapes = []
    for requests in (0, 0, 100, 0, 0):
        for engine in ("0", "1"):
            running.labels(engine).set(requests / 2)
            if requests:
                iterations.labels(engine).observe(40)
        preemptions.inc(requests / 50)
        scrapes.append(parse(generate_latest(registry).decode()))
    window = Window.over(scrapes)
    assert (window.engine_iterations, window.num_preemptions, window.max_requests_running) == (2, 2, 100)
    assert (window.generation_tokens, window.prefix_cache_hit_rate) == (None, None)


def test_b18_prefix_cache_of_an_earlier_cell() -> None:
    def scrape(*values: tuple[int, int], start: int = 1) -> Scrape:
        lines = [
            f'vllm:prefix_cache_{name}_total{{engine="{engine}"}} {value}'
            for engine, pair in enumerate(values)
            for name, value in zip(("queries", "hits"), pair, strict=True)
        ]
        return parse("\n".join([*lines, f"process_start_time_seconds {start}"]) + "\n")

    assert Window(scrape((0, 0)), scrape((10240, 0))).prefix_cache_hit_rate == 0.0
    assert Window(scrape((10240, 0)), scrape((20480, 9216))).prefix_cache_hit_rate == 0.90
    engines = Window(scrape((0, 0), (10240, 0)), scrape((10240, 0), (20480, 9216)))
    assert engines.prefix_cache_hit_rate == 0.45
    assert Window(scrape((10240, 0)), scrape((20480, 9216), start=2)).prefix_cache_hit_rate is None
    assert Window(scrape((5, 0)), scrape((5, 0))).prefix_cache_hit_rate is None


IDLE = {
    "vllm": ("num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    "sglang": ("num_running_reqs", "num_queue_reqs", "generation_tokens_total"),
    "llamacpp": ("requests_processing", "requests_deferred", "tokens_predicted_total"),
}


@pytest.mark.parametrize("server", IDLE)
def test_an_idle_server_runs_nothing_and_lets_nothing_wait(server: str) -> None:
    def scrape(running: float, waiting: float, tokens: int) -> Scrape:
        values = zip(IDLE[server], (running, waiting, tokens), strict=True)
        return parse("".join(f'{server}:{name}{{engine="0"}} {value}\n' for name, value in values))

    assert scrape(0, 0, 7).is_idle
    assert not scrape(1, 0, 7).is_idle
    assert not scrape(0, 2, 7).is_idle
    assert scrape(0, 0, 7).generation_tokens == 7
    assert Window(scrape(0, 0, 7), scrape(0, 0, 19)).generation_tokens == 12
    busy = Window.over([scrape(0, 0, tokens) for tokens in (5, 9, 30, 30)])
    assert (busy.idle_change or "").startswith(f"not_idle: {server}:")


def test_one_busy_engine_is_enough_and_no_gauge_is_no_sign_of_work() -> None:
    engines = 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_running{engine="1"} 1\n'
    assert not parse(engines).is_idle
    for text in ("", "a 1\n", "<html>404</html>"):
        assert parse(text).is_idle
        assert parse(text).generation_tokens is None


# Reasons for no number


def test_a19_no_drafts_is_null_and_inactive() -> None:
    zero = body(spec_decode_num_drafts=0, spec_decode_num_draft_tokens=0, spec_decode_num_accepted_tokens=0)
    positions = (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 0\n'
    )
    tokens = 'vllm:generation_tokens_total{engine="0",model_name="m"} '
    window = Window(parse(zero + positions + tokens + "100\n"), parse(zero + positions + tokens + "2500\n"))
    found = window.acceptance(3)
    assert (found.mean_acceptance_length, found.accepted_per_position) == (None, None)
    assert found.num_drafts == 0
    assert found.reason == "speculation_inactive: 0 drafts while 2400 tokens were generated"


def test_a20_a_baseline_does_not_apply_and_a_server_without_its_metrics_is_an_error() -> None:
    without = parse('vllm:generation_tokens_total{engine="0"} 5\n')
    zero = parse(body(spec_decode_num_drafts=0, spec_decode_num_draft_tokens=0))
    for scrape in (without, zero):
        found = Window(scrape, scrape).acceptance(speculating=False)
        assert (found.reason, found.num_drafts, found.mean_acceptance_length) == (
            "n/a (not speculating)",
            None,
            None,
        )
    missing = Window(without, without).acceptance(3)
    assert missing.mean_acceptance_length is None
    assert missing.reason is not None
    assert missing.reason.startswith("metrics_missing: ")
    assert "log statistics are disabled, this is another server's endpoint, or it does not" in missing.reason
    drafting = Window(spec(0, 0), spec(4, 4)).acceptance(speculating=False)
    assert drafting.flags == ("a baseline that drafted: 4 drafts",)


@pytest.mark.parametrize("text", ["", 'python_gc_objects_collected_total{generation="0"} 10\n'])
def test_a28_no_engine_families_is_null_and_names_what_was_looked_for(text: str) -> None:
    scrape = parse(text)
    assert scrape.malformed is None
    found = Window(scrape, scrape).acceptance(3)
    assert found.mean_acceptance_length is None
    assert found.reason is not None
    assert found.reason.startswith("engine metrics absent: looked for vllm:spec_decode_num_drafts, ")
    assert "try /metrics/ and follow its redirect" in found.reason
    late = Window(scrape, spec(5, 5))
    assert (late.acceptance(3).reason or "").startswith("engine metrics absent before the window")
    assert late.generation_tokens is None


@pytest.mark.parametrize("text", ["<html>404</html>", '{"detail":"Not Found"}', "vllm:x oops\n", "\x00\n"])
def test_what_is_no_scrape_has_a_reason(text: str) -> None:
    found = Window(spec(1, 1), parse(text)).acceptance(3)
    assert (found.mean_acceptance_length, found.num_drafts) == (None, None)
    assert (found.reason or "").startswith("not Prometheus text: ")


def test_a15_short_drafts_are_flagged() -> None:
    places = {0: 3, 1: 2, 2: 1, 3: 1}
    text = body(
        spec_decode_num_drafts=4, spec_decode_num_draft_tokens=8, spec_decode_num_accepted_tokens=7
    ) + "".join(
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}\n'
        for place, count in places.items()
    )
    found = parse(text).acceptance(4)
    assert found.mean_acceptance_length == 2.75
    assert (found.num_accepted_tokens, found.num_draft_tokens, found.num_drafts) == (7, 8, 4)
    assert found.accepted_per_position == (3, 2, 1, 1)
    assert found.flags == ("ragged: draft tokens / drafts = 2, not 4",)


def test_positions_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RecordError, match=r"positions add up to 3, not to 2 accepted; an engine's lines"):
        SpecCounters(dialect="vllm", num_accepted_tokens=2, accepted_per_position=(2, 1))


# The KV cache and the log


def test_d07_the_kv_cache_shrinks_with_a_drafter() -> None:
    def scrape(*blocks: object) -> Scrape:
        return parse(
            "".join(
                f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="{count}"}} 1\n'
                for engine, count in enumerate(blocks)
            )
        )

    assert prometheus.kv_cache_tokens(scrape(6250)) == 100_000
    assert prometheus.kv_cache_tokens(scrape(4375)) == 70_000
    assert prometheus.kv_cache_tokens(scrape(4375, 4375)) == 140_000
    assert prometheus.kv_cache_tokens(scrape("None")) is None
    told = 'vllm:cache_config_info{block_size="128",kv_cache_size_tokens="46592",num_gpu_blocks="999"} 1\n'
    assert prometheus.kv_cache_tokens(parse(told)) == 46_592, "the server's own count comes first"
    assert prometheus.kv_cache_tokens(parse("")) is None


def test_log_lines_give_counts_of_their_interval() -> None:
    first, second = spec_log_lines(LOG)
    assert (first.engine, first.mean_acceptance_length) == ("0", 2.87)
    assert (first.num_accepted_tokens, first.num_draft_tokens) == (282, 453)
    assert first.acceptance_rate_by_position == (0.821, 0.609, 0.437)
    assert (first.num_drafts, first.num_drafts_exact) == (151, True), "453 / 3; 1 + 282 / 151 = 2.87"
    assert (second.engine, second.num_drafts, second.num_drafts_exact) == ("1", 10, False)
    assert spec_log_lines("") == []
    assert spec_log_lines("SpecDecoding metrics: Mean acceptance length: nan\n") == []


def test_log_lines_of_short_drafts_give_their_drafts_by_rounding() -> None:
    line = LOG.splitlines()[1].replace("Drafted: 453", "Drafted: 300")
    (found,) = spec_log_lines(line)
    assert (found.num_drafts, found.num_drafts_exact) == (151, True), "only 151 drafts give 2.87"
    (rough,) = spec_log_lines(line.replace("282 tokens", "2820 tokens"))
    assert (rough.num_drafts, rough.num_drafts_exact) == (1508, False)
    (none,) = spec_log_lines(LOG.splitlines()[-1].replace("Drafted: 30", "Drafted: 31"))
    assert none.num_drafts is None
