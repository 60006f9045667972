"""A server's /metrics and statistics lines: what they say about acceptance over one window.

Text in, counts out: scrapes are parsed by prometheus_client, counters are summed over
engines and subtracted, and whatever can't be trusted is None with a reason. Knows no run
directory, statistics or engine. Separate so that a counter's name, its traps (`_created`,
resets, several processes, several engines) and its meaning stand in one place.

Definitions, as vLLM has them (`vllm/v1/spec_decode/metrics.py`): a draft is a request's verification step
with at least one drafted token; accepted tokens exclude the bonus token and are counted before a stop or a
limit cuts the answer off; entry i of the per-position counts is the number of drafts whose first i + 1 tokens
were all accepted. Mean acceptance length = 1 + accepted / drafts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from specnb.errors import RecordError

ENGINE_PREFIXES: Final = ("vllm:", "llamacpp:", "sglang:")
COUNTER_RESET: Final = "counter_reset"
PER_PROCESS: Final = "per_process_metrics"
METRICS_MISSING: Final = "metrics_missing"
METRICS_ABSENT: Final = "engine metrics absent"
INACTIVE: Final = "speculation_inactive"
NOT_SPECULATING: Final = "n/a (not speculating)"
SEVERAL_MODELS: Final = "several_models"
NOT_TEXT: Final = "not Prometheus text"

DRAFTS: Final = "spec_decode_num_drafts"
DRAFT_TOKENS: Final = "spec_decode_num_draft_tokens"
ACCEPTED_TOKENS: Final = "spec_decode_num_accepted_tokens"
PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos"
EMITTED_TOKENS: Final = "spec_decode_num_emitted_tokens"
EFFICIENCY: Final = "spec_decode_efficiency"
SGLANG_LENGTH: Final = "sglang:spec_accept_length"
START_TIME: Final = "process_start_time_seconds"
GENERATED_TOKENS: Final = ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")
"""Counters of output tokens, whoever asked for them, by server."""
PROMPT_TOKENS: Final = ("vllm:prompt_tokens", "sglang:prompt_tokens", "llamacpp:prompt_tokens")
"""Counters of prompt tokens; cached ones are in vLLM's and SGLang's, not in llama.cpp's."""
REQUESTS_FINISHED: Final = "vllm:request_success"
BUSY_GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
)
"""Gauges that are 0 on a server that works on nothing."""

# Histogram buckets are nine tenths of a scrape and nothing here needs them.
_BUCKET: Final = re.compile(r"^[^\s{]+_bucket[{ ].*$\n?", re.MULTILINE)
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a scrape: its labels and its value, which is finite."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One parsed scrape.

    Attributes
    ----------
    samples
        Samples by their exact name (`x_total` and `x_created` are two names). Histogram buckets and values
        that are NaN or infinite are left out.
    monotonic
        Names that may not fall: counters, counts and sums of histograms, and untyped names in `_total`.
    malformed
        Why the body is no Prometheus text; None if it is (an empty body is).
    """

    samples: Mapping[str, tuple[Sample, ...]]
    monotonic: frozenset[str]
    malformed: str | None = None

    def find(self, name: str) -> tuple[Sample, ...]:
        """Samples of a counter or gauge under `name_total`, else `name`; never `name_created`."""
        return self.samples.get(f"{name}_total") or self.samples.get(name, ())

    def total(self, name: str, *, model: str | None = None) -> float | None:
        """Sum over engines (and every other label); None if the name is absent.

        Parameters
        ----------
        name
            Without `_total`.
        model
            Only samples with this `model_name`, or without that label; None: all.
        """
        found = [sample.value for sample in self.find(name) if _is_of(sample, model)]
        return math.fsum(found) if found else None

    @property
    def has_engine_metrics(self) -> bool:
        """Whether any family of vLLM, SGLang or llama.cpp is there."""
        return any(name.startswith(ENGINE_PREFIXES) for name in self.samples)

    @property
    def lacks_acceptance(self) -> bool:
        """Whether vLLM's metrics are there without any of acceptance: it speculates for nobody.

        SGLang and llama.cpp may speculate without such metrics.
        """
        return self.dialect is None and any(name.startswith("vllm:") for name in self.samples)

    @property
    def is_idle(self) -> bool:
        """Whether no gauge says that a request runs or waits; true as well where there is no such gauge."""
        return not any(self.total(name) for name in BUSY_GAUGES)

    @property
    def generation_tokens(self) -> float | None:
        """Output tokens since the server started, whoever asked for them; None if it does not count them."""
        found = (self.total(name) for name in GENERATED_TOKENS)
        return next((total for total in found if total is not None), None)

    @property
    def start_time_s(self) -> float | None:
        """When the answering process began, Unix seconds; None if the scrape does not say."""
        found = self.find(START_TIME)
        return max(sample.value for sample in found) if found else None

    @property
    def models(self) -> tuple[str, ...]:
        """Values of `model_name` on the token and draft counters, sorted."""
        names = [f"{prefix}{kind}" for prefix in ENGINE_PREFIXES for kind in (DRAFTS, DRAFT_TOKENS)]
        found = {
            sample.labels.get("model_name")
            for name in (*names, *GENERATED_TOKENS)
            for sample in self.find(name)
        }
        return tuple(sorted(name for name in found if name is not None))

    @property
    def dialect(self) -> str | None:
        """Whose acceptance metrics these are: `vllm`, `vllm-v0`, `llamacpp`, `sglang`; None without any.

        `vllm-v0` is the old set (emitted tokens, no count of drafts).
        """
        for prefix in ("vllm", "llamacpp"):
            if self.find(f"{prefix}:{DRAFTS}"):
                return prefix
        if self.find(f"vllm:{EMITTED_TOKENS}"):
            return "vllm-v0"
        return "sglang" if self.find(SGLANG_LENGTH) else None

    def acceptance(self, num_speculative_tokens: int | None = None) -> SpecCounters:
        """Acceptance since the server started, warm-up and everyone's traffic included.

        For a cell use `Window.acceptance`. Parameters and result are the same.
        """
        nothing = Scrape(samples={}, monotonic=frozenset())
        return _acceptance(nothing, self, num_speculative_tokens, speculating=True, model=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """Acceptance counts of one server over one window, summed over its engines.

    Attributes
    ----------
    dialect
        Which metric names they came from (`Scrape.dialect`).
    num_drafts, num_draft_tokens, num_accepted_tokens
        Counts; None where the server does not say, or where `reason` says why not.
    accepted_per_position
        Drafts whose first i + 1 tokens were accepted, shape: [num_positions]; None if unknown.
    reported_acceptance_length
        A length that the server computed itself over an interval of its own (SGLang's gauge): not the
        window's, never pooled.
    reason
        Why `mean_acceptance_length` is None; its first word is one of the constants of this module.
    flags
        Remarks that leave the numbers valid: drafts derived, drafts shorter than K.
    by_engine
        The same for each value of the `engine` label, where there are several.

    Raises
    ------
    RecordError
        The per-position counts don't add up to the accepted tokens: engines were mixed up or lines lost.
    """

    dialect: str | None
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] | None = None
    reported_acceptance_length: float | None = None
    reason: str | None = None
    flags: tuple[str, ...] = ()
    by_engine: Mapping[str, SpecCounters] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positions, accepted, drafts = self.accepted_per_position, self.num_accepted_tokens, self.num_drafts
        if positions is None or accepted is None or sum(positions) == accepted:
            return
        lengths = f" ({1 + sum(positions) / drafts:.2f} and {1 + accepted / drafts:.2f})" if drafts else ""
        raise RecordError(
            f"acceptance counters: positions add up to {sum(positions)}, not to {accepted} accepted"
            f"{lengths}; an engine's lines were overwritten or lost"
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, bonus token included; None without drafts or where `reason` is set."""
        if self.reason is not None or not self.num_drafts or self.num_accepted_tokens is None:
            return None
        return 1 + self.num_accepted_tokens / self.num_drafts


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two scrapes of one server: differences of its counters.

    Attributes
    ----------
    before
        Taken after the warm-up, before the first measured request.
    after
        Taken after the last one.
    scrapes
        All scrapes of the window in order, these two included; empty: only these two.
    idle_pairs
        Pairs of scrapes between which no request of ours was in flight.
    """

    before: Scrape
    after: Scrape
    scrapes: tuple[Scrape, ...] = ()
    idle_pairs: tuple[tuple[Scrape, Scrape], ...] = ()

    @classmethod
    def over(cls, scrapes: Sequence[Scrape]) -> Self:
        """The window of a cell's scrapes in order: from four on, the first two and the last two are idle.

        Raises
        ------
        RecordError
            Fewer than two scrapes: nothing can be subtracted.
        """
        if len(scrapes) < 2:
            raise RecordError(f"{len(scrapes)} scrape of /metrics; a window needs one before and one after")
        if len(scrapes) < 4:
            return cls(scrapes[0], scrapes[-1], tuple(scrapes))
        idle = ((scrapes[0], scrapes[1]), (scrapes[-2], scrapes[-1]))
        return cls(scrapes[1], scrapes[-1], tuple(scrapes), idle)

    @property
    def _in_order(self) -> tuple[Scrape, ...]:
        return self.scrapes or (self.before, self.after)

    @property
    def malformed(self) -> str | None:
        """Why a scrape of the window can't be read; None if all can."""
        return next((scrape.malformed for scrape in self._in_order if scrape.malformed), None)

    @property
    def reset(self) -> str | None:
        """Why the counters of this window are not one history; None if they are.

        Returns
        -------
        str or None
            Begins with `counter_reset` (the server restarted: its start time moved on, or counters
            fell) or `per_process_metrics` (scrapes are answered by different processes: values come
            back after a fall, fall without a new start time, or fall to another value than 0 while the
            server is idle).
        """
        return _reset(self._in_order, self.idle_pairs)

    @property
    def idle_change(self) -> str | None:
        """Why the server was not idle when it should have been; None if generated tokens stood still."""
        for first, second in self.idle_pairs:
            for name in (*GENERATED_TOKENS, f"vllm:{DRAFTS}"):
                earlier, later = first.total(name), second.total(name)
                if earlier is not None and later is not None and later > earlier:
                    return (
                        f"not_idle: {name} rose by {later - earlier:g} between two scrapes with no request "
                        "in flight: other traffic, or several processes answer"
                    )
        return None

    def delta(self, name: str, *, model: str | None = None) -> float | None:
        """Growth of a counter, summed over engines; None if it is absent at the end or the window is broken.

        A counter absent at the start of a server that had other engine metrics began at 0.
        """
        if self.malformed or self.reset:
            return None
        later = self.after.total(name, model=model)
        earlier = self.before.total(name, model=model)
        if later is None or (earlier is None and not self.before.has_engine_metrics):
            return None
        return later - (earlier or 0.0)

    def acceptance(
        self,
        num_speculative_tokens: int | None = None,
        *,
        speculating: bool = True,
        model: str | None = None,
    ) -> SpecCounters:
        """Acceptance counts of the window, or the reason why there are none.

        Parameters
        ----------
        num_speculative_tokens
            K of the plan: needed to derive the drafts of old servers, and to tell short drafts.
        speculating
            False for a baseline: its counts are not 0 but don't apply.
        model
            `model_name` to count; needed where one body holds several.

        Returns
        -------
        SpecCounters
            With drafts, or with a `reason`: `counter_reset`, `per_process_metrics`, `metrics_missing`,
            `engine metrics absent`, `speculation_inactive` (drafts is then a true 0), `several_models`,
            `n/a (not speculating)` or `not Prometheus text`.

        Raises
        ------
        RecordError
            Per-position counts that don't add up to the accepted tokens.
        """
        broken = self.malformed or self.reset
        if broken:
            return SpecCounters(dialect=self.after.dialect, reason=broken)
        if self.after.has_engine_metrics and not self.before.has_engine_metrics:
            return SpecCounters(
                dialect=self.after.dialect,
                reason=f"{METRICS_ABSENT} before the window, so what was counted in it is not known",
            )
        return _acceptance(
            self.before, self.after, num_speculative_tokens, speculating=speculating, model=model
        )

    @property
    def generation_tokens(self) -> int | None:
        """Tokens the server generated for anyone, after stops and limits; None if it does not say."""
        return self._count(*GENERATED_TOKENS)

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens of anyone's requests; None if the server does not say."""
        return self._count(*PROMPT_TOKENS)

    @property
    def requests_finished(self) -> int | None:
        """Requests of anyone that ended, by whatever reason (vLLM); None if the server does not say."""
        return self._count(REQUESTS_FINISHED)

    @property
    def num_preemptions(self) -> int | None:
        """Requests that lost their KV cache and were computed again; None if the server does not say."""
        return self._count(*(f"{prefix}num_preemptions" for prefix in ENGINE_PREFIXES))

    @property
    def engine_iterations(self) -> int | None:
        """Engine steps in the window, prefill steps included, summed over engines; None if unknown.

        The number of observations of vLLM's histogram `iteration_tokens_total`.
        """
        found = self.delta("vllm:iteration_tokens_total_count")
        return None if found is None else round(found)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache / looked up, summed over engines, in [0, 1].

        None if the counters are absent or were reset, or if nothing was looked up.
        """
        queries = self.delta("vllm:prefix_cache_queries")
        hits = self.delta("vllm:prefix_cache_hits")
        return hits / queries if hits is not None and queries else None

    @property
    def max_requests_running(self) -> int | None:
        """Largest number of requests that any scrape found running; None if the server does not say."""
        found = [scrape.total("vllm:num_requests_running") for scrape in self._in_order]
        known = [value for value in found if value is not None]
        return round(max(known)) if known else None

    def _count(self, *names: str) -> int | None:
        """Growth of the first of these counters that is there."""
        for name in names:
            found = self.delta(name)
            if found is not None:
                return round(found)
        return None


@lru_cache(maxsize=1024)
def parse(body: str) -> Scrape:
    """A scrape's text, parsed by prometheus_client's parser; histogram buckets are skipped.

    Parameters
    ----------
    body
        What the server answered to GET /metrics.

    Returns
    -------
    Scrape
        Without samples and with `malformed` set if the text is no exposition format: raw data are
        kept as they are, and every number taken from them is then None.

    References
    ----------
    Prometheus text exposition format 0.0.4.
    """
    samples: dict[str, list[Sample]] = {}
    monotonic = set()
    try:
        for family in text_string_to_metric_families(_BUCKET.sub("", body)):
            for name, labels, value, *_ in family.samples:
                if not math.isfinite(value):
                    continue
                samples.setdefault(name, []).append(Sample(labels=labels, value=float(value)))
                if _may_not_fall(name, family.type):
                    monotonic.add(name)
    except (ValueError, IndexError, KeyError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Scrape(samples={}, monotonic=frozenset(), malformed=f"{NOT_TEXT}: {said[0][:120]}")
    frozen = {name: tuple(found) for name, found in samples.items()}
    return Scrape(samples=frozen, monotonic=frozenset(monotonic))


def falling_counter(before: Scrape, after: Scrape) -> tuple[str, float, float] | None:
    """The first counter that is lower in `after`: its name with labels, and both values; None if none is.

    An engine's counter that is gone counts as 0: a living process keeps its series.
    """
    return next(_falls(before, after), None)


def _falls(before: Scrape, after: Scrape) -> Iterator[tuple[str, float, float]]:
    for name, samples in before.samples.items():
        if name not in before.monotonic:
            continue
        later = {_key(sample): sample.value for sample in after.samples.get(name, ())}
        gone = 0.0 if name.startswith(ENGINE_PREFIXES) else None
        for sample in samples:
            value = later.get(_key(sample), gone)
            if value is not None and value < sample.value:
                labels = ",".join(f'{key}="{text}"' for key, text in sample.labels.items())
                yield (f"{name}{{{labels}}}" if labels else name), sample.value, value


def kv_cache_tokens(scrape: Scrape) -> int | None:
    """Tokens that fit the KV cache, from the labels of `vllm:cache_config_info`.

    Returns
    -------
    int or None
        `kv_cache_size_tokens` where the server gives it, else block_size x num_gpu_blocks (too many for
        models that mix kinds of attention); summed over engines. None if the metric is absent or a
        label is not a number yet.
    """
    engines = scrape.find("vllm:cache_config_info")
    total = 0
    for sample in engines:
        told, size, blocks = (
            sample.labels.get(name, "") for name in ("kv_cache_size_tokens", "block_size", "num_gpu_blocks")
        )
        if told.isdecimal():
            total += int(told)
        elif size.isdecimal() and blocks.isdecimal():
            total += int(size) * int(blocks)
        else:
            return None
    return total if engines else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecLogLine:
    """One `SpecDecoding metrics:` line of a server's log: one engine over one log interval.

    Attributes
    ----------
    engine
        From the engine's statistics line just before it; None if none said.
    mean_acceptance_length
        As printed, to two decimals.
    num_accepted_tokens, num_draft_tokens
        Counts of the interval.
    acceptance_rate_by_position
        Accepted beyond each position / drafts, as printed, shape: [K].
    num_drafts
        Not printed: drafted / K where the printed length agrees with full drafts, else the whole
        number nearest to accepted / (length - 1); None where nothing was accepted and drafts may be short.
    num_drafts_exact
        Whether the printed numbers leave no other count of drafts (assuming full drafts where they fit).
    """

    engine: str | None
    mean_acceptance_length: float
    num_accepted_tokens: int
    num_draft_tokens: int
    acceptance_rate_by_position: tuple[float, ...]
    num_drafts: int | None
    num_drafts_exact: bool


def spec_log_lines(text: str) -> list[SpecLogLine]:
    """Acceptance lines of a server's log, in order; other lines are skipped.

    Parameters
    ----------
    text
        Any part of a vLLM log, colours and prefixes allowed.

    Notes
    -----
    Values are those of a log interval (10 s by default) and are reset by each line, so the lines of a
    cell rarely begin and end with it.
    """
    found = []
    engine = None
    for line in _ANSI.sub("", text).splitlines():
        named = re.search(r"Engine (\d+): ", line)
        if named:
            engine = str(int(named[1]))
        elif "Engines Aggregated: " in line:
            engine = None
        _, marker, rest = line.partition("SpecDecoding metrics:")
        if not marker:
            continue
        length = re.search(r"[Mm]ean acceptance length: ([\d.]+)", rest)
        accepted = re.search(r"Accepted: (\d+) tokens", rest)
        drafted = re.search(r"Drafted: (\d+) tokens", rest)
        if not (length and accepted and drafted):
            continue
        rates = re.search(r"Per-position acceptance rate: ((?:[\d.]+(?:, )?)+)", rest)
        by_position = tuple(float(rate) for rate in rates[1].strip(", ").split(", ")) if rates else ()
        drafts, exact = _drafts_of_line(
            float(length[1]), int(accepted[1]), int(drafted[1]), len(by_position) or None
        )
        found.append(
            SpecLogLine(
                engine=engine,
                mean_acceptance_length=float(length[1]),
                num_accepted_tokens=int(accepted[1]),
                num_draft_tokens=int(drafted[1]),
                acceptance_rate_by_position=by_position,
                num_drafts=drafts,
                num_drafts_exact=exact,
            )
        )
    return found


def _drafts_of_line(
    length: float, accepted: int, drafted: int, longest: int | None
) -> tuple[int | None, bool]:
    """Drafts behind a printed line, and whether they are certain; see `SpecLogLine`."""
    full = drafted // longest if longest and drafted % longest == 0 else None
    if accepted == 0:
        return full, False
    low = accepted / (length + 0.005 - 1)
    high = accepted / (length - 0.005 - 1) if length > 1.005 else math.inf
    slack = 1e-9 * (1 + low)
    if full is not None and low - slack <= full <= high + slack:
        return full, True
    if length <= 1:
        return None, False
    nearest = round(accepted / (length - 1))
    return nearest, math.ceil(low - slack) == math.floor(high + slack) if math.isfinite(high) else False


def _may_not_fall(name: str, kind: str) -> bool:
    if kind == "counter":
        return not name.endswith("_created")
    if kind in ("histogram", "summary"):
        return name.endswith(("_count", "_sum"))
    return kind in ("unknown", "untyped") and name.endswith("_total")


def _key(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(sample.labels.items()))


def _is_of(sample: Sample, model: str | None) -> bool:
    return model is None or sample.labels.get("model_name", model) == model


def _reset(scrapes: Sequence[Scrape], idle_pairs: Iterable[tuple[Scrape, Scrape]]) -> str | None:
    idle = {(id(first), id(second)) for first, second in idle_pairs}
    pairs = list(pairwise(scrapes))
    starts = [scrape.start_time_s for scrape in scrapes]
    for number, (earlier, later) in enumerate(pairwise(starts)):
        if earlier is None or later is None or earlier == later:
            continue
        moved = f"{START_TIME} {earlier:g} to {later:g}"
        if later < earlier or earlier in starts[number + 2 :]:
            return _per_process(moved)
        return f"{COUNTER_RESET}: the server restarted in the window ({moved})"
    fallen = [(number, fall) for number, pair in enumerate(pairs) if (fall := falling_counter(*pair))]
    if not fallen:
        return None
    number, (name, high, low) = fallen[0]
    said = f"{name} {high:g} to {low:g}"
    # A restart falls once, to 0 on an idle server, and is a new process.
    same_process = starts[number] is not None and starts[number + 1] is not None
    idle_fall = low > 0 and (id(pairs[number][0]), id(pairs[number][1])) in idle
    if same_process or idle_fall or len(fallen) > 1 or _comes_back(scrapes, number):
        return _per_process(said)
    return f"{COUNTER_RESET}: the server restarted in the window ({said})"


def _comes_back(scrapes: Sequence[Scrape], number: int) -> bool:
    """Whether all counters of a scrape that fell after it are seen again at their very values."""
    fallen = list(_falls(scrapes[number], scrapes[number + 1]))
    return any(
        not {fall[0] for fall in _falls(scrapes[number], later)} & {fall[0] for fall in fallen}
        and not {fall[0] for fall in _falls(later, scrapes[number])} & {fall[0] for fall in fallen}
        for later in scrapes[number + 2 :]
    )


def _per_process(what: str) -> str:
    return (
        f"{PER_PROCESS}: scrapes are answered by different processes ({what}); set PROMETHEUS_MULTIPROC_DIR "
        "or use a single API server process"
    )


def _acceptance(
    before: Scrape, after: Scrape, longest: int | None, *, speculating: bool, model: str | None
) -> SpecCounters:
    dialect = after.dialect
    if not after.has_engine_metrics:
        names = ", ".join((f"vllm:{DRAFTS}", f"llamacpp:{DRAFTS}", SGLANG_LENGTH))
        return SpecCounters(
            dialect=None,
            reason=f"{METRICS_ABSENT}: looked for {names}; try /metrics/ and follow its redirect",
        )
    if dialect is None:
        if not speculating:
            return SpecCounters(dialect=None, reason=NOT_SPECULATING)
        return SpecCounters(
            dialect=None,
            reason=f"{METRICS_MISSING}: the server has metrics but none of acceptance: "
            "log statistics are disabled, this is another server's endpoint, or it does not speculate",
        )
    if dialect == "sglang":
        lengths = {sample.value for sample in after.find(SGLANG_LENGTH)}
        return SpecCounters(
            dialect=dialect,
            reported_acceptance_length=lengths.pop() if len(lengths) == 1 else None,
            reason="no counters: sglang:spec_accept_length is a gauge over an interval of the server's own",
        )
    models = after.models
    if model is None and len(models) > 1:
        return SpecCounters(
            dialect=dialect,
            reason=f"{SEVERAL_MODELS}: the counters are of {', '.join(models)}; name the one to count",
        )
    engines = _by_engine(before, after, dialect, longest, model)
    total = _summed(list(engines.values()), dialect)
    drafted_for_nobody = not speculating and not total.num_drafts and not total.num_draft_tokens
    if drafted_for_nobody:
        return SpecCounters(dialect=dialect, reason=NOT_SPECULATING)
    flags = list(total.flags)
    if not speculating:
        flags.append(f"a baseline that drafted: {total.num_drafts or total.num_draft_tokens} drafts")
    if (
        longest is not None
        and total.num_drafts
        and total.num_draft_tokens is not None
        and total.num_draft_tokens != longest * total.num_drafts
    ):
        flags.append(
            f"ragged: draft tokens / drafts = {total.num_draft_tokens / total.num_drafts:.4g}, not {longest}"
        )
    reason = total.reason
    if reason is None and total.num_drafts == 0:
        window = Window(before, after)
        generated = window.generation_tokens
        tokens = "" if generated is None else f" while {generated} tokens were generated"
        reason = f"{INACTIVE}: 0 drafts{tokens}"
    if dialect == "vllm-v0":
        flags += _efficiency_check(after, total, longest, since_start=not before.has_engine_metrics)
    return SpecCounters(
        dialect=dialect,
        num_drafts=total.num_drafts,
        num_draft_tokens=total.num_draft_tokens,
        num_accepted_tokens=total.num_accepted_tokens,
        accepted_per_position=None if reason is not None else total.accepted_per_position,
        reason=reason,
        flags=tuple(flags),
        by_engine=engines if len(engines) > 1 else {},
    )


def _by_engine(
    before: Scrape, after: Scrape, dialect: str, longest: int | None, model: str | None
) -> dict[str, SpecCounters]:
    """Counts of each engine; positions of one engine are those that carry its label."""
    prefix = dialect.removesuffix("-v0")
    names = [DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, EMITTED_TOKENS]
    grown = {name: dict(_grown(before, after, f"{prefix}:{name}", model)) for name in names}
    positions = {
        key: count
        for key, count in _grown(before, after, f"{prefix}:{PER_POSITION}", model)
        if key[1].isdecimal()
    }
    engines = sorted({engine for found in (*grown.values(), positions) for engine, _ in found})
    counts = {}
    for engine in engines:
        values = {name: grown[name].get((engine, "")) for name in names}
        placed = {int(place): count for (owner, place), count in positions.items() if owner == engine}
        drafts, reason = values[DRAFTS], None
        flags: list[str] = []
        if dialect == "vllm-v0":
            drafts, flags, reason = _derived_drafts(values, longest)
        counts[engine] = SpecCounters(
            dialect=dialect,
            num_drafts=drafts,
            num_draft_tokens=values[DRAFT_TOKENS],
            num_accepted_tokens=values[ACCEPTED_TOKENS],
            accepted_per_position=tuple(placed.get(i, 0) for i in range(max(placed) + 1)) if placed else None,
            reason=reason,
            flags=tuple(flags),
        )
    return counts


def _grown(
    before: Scrape, after: Scrape, name: str, model: str | None
) -> Iterator[tuple[tuple[str, str], int]]:
    """((engine, position), growth) of a counter; labels beyond these are summed."""
    sums: dict[tuple[str, str], float] = {}
    for scrape, sign in ((after, 1), (before, -1)):
        for sample in scrape.find(name):
            if _is_of(sample, model):
                place = (sample.labels.get("engine", ""), sample.labels.get("position", ""))
                sums[place] = sums.get(place, 0.0) + sign * sample.value
    for place, value in sums.items():
        yield place, round(value)


def _derived_drafts(
    values: Mapping[str, int | None], longest: int | None
) -> tuple[int | None, list[str], str | None]:
    """Drafts of the old metric set, drafted / K; flags; and why there are none."""
    drafted, accepted, emitted = values[DRAFT_TOKENS], values[ACCEPTED_TOKENS], values[EMITTED_TOKENS]
    if longest is None:
        return None, [], f"{METRICS_MISSING}: this server counts no drafts, and K is unknown"
    if drafted is None or drafted % longest:
        return None, [], f"{METRICS_MISSING}: {drafted} draft tokens are no multiple of K = {longest}"
    drafts = drafted // longest
    flags = [f"derived: drafts = {drafted} draft tokens / {longest}"]
    if None not in (emitted, accepted) and emitted != (accepted or 0) + drafts:
        flags.append(f"emitted tokens {emitted} are not accepted {accepted} + drafts {drafts}")
    return drafts, flags, None


def _efficiency_check(
    after: Scrape, total: SpecCounters, longest: int | None, *, since_start: bool
) -> list[str]:
    """A flag if the server's efficiency gauge (accepted + drafts over drafts x (K + 1)) says otherwise."""
    gauge = after.total(f"vllm:{EFFICIENCY}")
    if gauge is None or longest is None or not since_start or total.mean_acceptance_length is None:
        return []
    expected = total.mean_acceptance_length / (longest + 1)
    if abs(gauge - expected) <= 0.005:
        return []
    return [f"{EFFICIENCY} is {gauge:.3f}, the counters give {expected:.3f}: K is not {longest}?"]


def _summed(engines: Sequence[SpecCounters], dialect: str) -> SpecCounters:
    """Totals over engines. Positions that one engine lacks count as 0, so that lost lines don't add up."""

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    placed = [engine.accepted_per_position for engine in engines if engine.accepted_per_position is not None]
    widest = max((len(positions) for positions in placed), default=0)
    return SpecCounters(
        dialect=dialect,
        num_drafts=total([engine.num_drafts for engine in engines]),
        num_draft_tokens=total([engine.num_draft_tokens for engine in engines]),
        num_accepted_tokens=total([engine.num_accepted_tokens for engine in engines]),
        accepted_per_position=tuple(
            sum(found[i] for found in placed if i < len(found)) for i in range(widest)
        )
        or None,
        reason=next((engine.reason for engine in engines if engine.reason), None),
        flags=tuple(dict.fromkeys(flag for engine in engines for flag in engine.flags)),
    )
