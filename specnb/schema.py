"""The tables of a run directory: grain, columns, types, units and ranges.

The one place where a column is declared. Writers build frames from these
declarations, readers check against them (`records`). Imports polars and
nothing of specnb but errors, so that any layer may use the names.

Conventions: units end names (`_s` seconds on the run's monotonic clock, `_nats`,
`_tokens`, `_bytes`); counts are `num_*`; rates are in [0, 1]; undefined is null,
never 0, 1 or NaN. `position` counts from 0, the first draft after the verified token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

SCHEMA_VERSION: Final = 1

ENTROPY_TIERS: Final = ("low", "medium", "high", "unlabelled")
LENGTH_TIERS: Final = ("short", "medium", "long", "unlabelled")
STATUSES: Final = ("ok", "error", "cancelled", "timeout")
ORIGINS: Final = ("baseline", "accepted", "recovered", "bonus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: polars type, what it means, whether null is a legal value, and its closed set or range.

    `optional` columns may be absent from a file (runs of older versions); they are read as null.
    """

    name: str
    dtype: pl.DataType
    text: str
    nullable: bool = False
    optional: bool = False
    allowed: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a run directory.

    `grain` says what a row is, `key` which columns identify it, `required` whether
    every finished cell must hold the file (other tables exist where an engine can fill them).
    """

    name: str
    grain: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    required: bool = False

    @property
    def polars_schema(self) -> pl.Schema:
        """Column names to polars types, in file order."""
        return pl.Schema({column.name: column.dtype for column in self.columns})

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in file order."""
        return tuple(column.name for column in self.columns)


def _text(name: str, text: str, *, nullable: bool = False, allowed: tuple[str, ...] | None = None) -> Column:
    return Column(name=name, dtype=pl.String(), text=text, nullable=nullable, allowed=allowed)


def _count(name: str, text: str, *, nullable: bool = False, minimum: float = 0) -> Column:
    return Column(name=name, dtype=pl.Int64(), text=text, nullable=nullable, minimum=minimum)


def _real(
    name: str,
    text: str,
    *,
    nullable: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Column:
    return Column(
        name=name, dtype=pl.Float64(), text=text, nullable=nullable, minimum=minimum, maximum=maximum
    )


_RUN = _text("run_id", "run directory's id")
_ARM = _text("arm", "arm's name in the plan")
_CELL = _text("cell_id", "cell = arm x entropy tier x concurrency x sampling x repeat")
_REQUEST = _text("request_id", "unique in a run")
_PROMPT = _text("prompt_id", "prompt's id in the workload; the cluster of every interval")

REQUESTS: Final = Table(
    name="requests",
    grain="one row a request, failed ones too",
    key=("request_id",),
    required=True,
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _count("repeat", "0-based repeat of the cell"),
        _text("sampling", "sampling setting's name in the plan"),
        _count("concurrency", "requests kept in flight by the load (closed loop)", minimum=1),
        _REQUEST,
        _PROMPT,
        _text("prompt_sha256", "digest of the prompt's content"),
        _text("task", "task label of the workload"),
        _text("entropy_tier", "entropy tier by task label", allowed=ENTROPY_TIERS),
        _text("length_tier", "expected output length", allowed=LENGTH_TIERS),
        _real("scheduled_s", "when the load wanted to send it", minimum=0),
        _real("sent_s", "when it was sent; null if it never was", nullable=True, minimum=0),
        _real("first_token_s", "first token in any channel", nullable=True, minimum=0),
        _real("first_answer_s", "first token after a reasoning channel", nullable=True, minimum=0),
        _real("last_token_s", "last token", nullable=True, minimum=0),
        _count("num_prompt_tokens", "prompt tokens as the engine counts them", nullable=True),
        _count("num_cached_tokens", "prompt tokens served from a prefix cache", nullable=True),
        _count("num_output_tokens", "emitted tokens, stop token included, from the engine", nullable=True),
        _count("num_first_chunk_tokens", "tokens of the first chunk", nullable=True),
        _count("num_chunks", "chunks that carried tokens", nullable=True),
        _text("finish_reason", "stop or length as the engine said; null if it did not finish", nullable=True),
        _text("status", "ok, error, cancelled or timeout", allowed=STATUSES),
        _text("error_kind", "closed set of the engine; null when status is ok", nullable=True),
        _text("error", "one line; null when status is ok", nullable=True),
        _text("output_text", "decoded answer", nullable=True),
        Column(
            name="output_token_ids",
            dtype=pl.List(pl.Int64()),
            text="ids where the engine returns them",
            nullable=True,
        ),
        _real("grader_score", "in [0, 1]; null without a grader", nullable=True, minimum=0, maximum=1),
        _real(
            "mean_token_entropy_nats",
            "mean entropy of the target's law (temperature 1, no truncation) over the answer's tokens",
            nullable=True,
            minimum=0,
        ),
    ),
)

CHUNKS: Final = Table(
    name="chunks",
    grain="one row a streamed chunk that carried tokens",
    key=("request_id", "chunk"),
    columns=(
        _RUN,
        _REQUEST,
        _count("chunk", "0-based"),
        _real("received_s", "arrival of the chunk's last byte", minimum=0),
        _count("num_tokens", "tokens in the chunk", nullable=True, minimum=1),
    ),
)

STEPS: Final = Table(
    name="steps",
    grain="one row a target forward of one request after prefill, baseline too",
    key=("request_id", "step"),
    required=True,
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _REQUEST,
        _PROMPT,
        _count("step", "0-based within the request"),
        _count("num_draft_tokens", "drafted tokens verified in this step; 0 if none"),
        _count("num_accepted_tokens", "drafts the verifier accepted, before any truncation"),
        _count("num_emitted_tokens", "tokens the user got: accepted + 1, less what a stop or limit cut off"),
        _count("engine_step", "engine step that ran it; null where the engine does not say", nullable=True),
    ),
)

ENGINE_STEPS: Final = Table(
    name="engine_steps",
    grain="one row an engine step (one batched target forward after prefill); times live here once",
    key=("cell_id", "engine_step"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _count("engine_step", "0-based within the cell"),
        _count("batch_size", "requests that took part", minimum=1),
        _count("num_query_tokens", "target positions computed, padding included", minimum=1),
        _real("prefill_s", "prefill of newly admitted requests just before this step", minimum=0),
        _real("draft_s", "proposing drafts", minimum=0),
        _real("verify_s", "target forward and acceptance", minimum=0),
        _real("end_s", "end of the step on the run's clock", minimum=0),
    ),
)

POSITIONS: Final = Table(
    name="positions",
    grain="one row a drafted token (in-process engine; elsewhere derived from steps)",
    key=("request_id", "step", "position"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _REQUEST,
        _PROMPT,
        _count("step", "0-based within the request"),
        _count("position", "0-based; 0 is the first draft"),
        Column(name="reached", dtype=pl.Boolean(), text="all drafts before it were accepted"),
        Column(name="accepted", dtype=pl.Boolean(), text="reached and accepted"),
        _count(
            "target_rank",
            "0-based rank of the target's most likely token (its pick, when T = 0) among the drafter's "
            "candidates; null if it is not a candidate or the position was not reached",
            nullable=True,
        ),
        _real(
            "draft_prob",
            "proposal probability of the drafted token",
            nullable=True,
            minimum=0,
            maximum=1.000001,
        ),
        _real(
            "target_prob",
            "probability of the drafted token under the law the target samples from; null if not reached",
            nullable=True,
            minimum=0,
            maximum=1.000001,
        ),
        Column(
            name="in_answer",
            dtype=pl.Boolean(),
            text="whether the answer holds a token at this place; null if the run did not record it",
            nullable=True,
            optional=True,
        ),
        Column(
            name="answer_rank",
            dtype=pl.Int64(),
            text="0-based rank, by the drafter's own scores before any path selection, of the token that the "
            "answer holds at this place, reached or not; null if it is not a candidate, or not in the answer",
            nullable=True,
            optional=True,
            minimum=0,
        ),
    ),
)

TOKENS: Final = Table(
    name="tokens",
    grain="one row an emitted token, where the target's law is available",
    key=("request_id", "index"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _REQUEST,
        _PROMPT,
        _count("index", "0-based within the answer"),
        _count("token_id", "target vocabulary"),
        _text("origin", "baseline, accepted, recovered or bonus", allowed=ORIGINS),
        _real(
            "logprob", "log probability under the target's law at temperature 1, no truncation", maximum=1e-6
        ),
        _real("entropy_nats", "entropy of that law", minimum=0),
        _real("top1_top2_margin", "log probability gap of the two most likely tokens, nats", minimum=0),
        _real(
            "cdf_low",
            "mass of the tokens before it under the law sampled from (temperature, top-k, top-p), sorted "
            "by falling probability, then id; null when greedy: that law has one point",
            nullable=True,
            minimum=0,
            maximum=1.000001,
        ),
        _real(
            "cdf_high",
            "cdf_low plus its own mass; null when greedy",
            nullable=True,
            minimum=0,
            maximum=1.000001,
        ),
    ),
)

SPLITS: Final = Table(
    name="splits",
    grain="one row a first divergence of two greedy answers to one prompt, judged by the target again "
    "(in-process engine, written when the run ends)",
    key=("sampling", "concurrency", "prompt_id", "arm", "repeat", "reference_arm", "reference_repeat"),
    columns=(
        _RUN,
        _text("sampling", "sampling setting's name in the plan"),
        _count("concurrency", "of both answers", minimum=1),
        _PROMPT,
        _ARM,
        _count("repeat", "of the arm's answer"),
        _text("reference_arm", "the baseline, or the arm itself in a control"),
        _count("reference_repeat", "of the reference answer"),
        _count("index", "first answer index at which the tokens differ"),
        _count("token_id", "the arm's token", nullable=True),
        _count("reference_token_id", "the reference's token", nullable=True),
        _real(
            "margin_nats",
            "reference token's log probability minus the arm token's, in the run's dtype",
            nullable=True,
        ),
        _real("margin_fp64_nats", "the same in double precision; null if it was not computed", nullable=True),
    ),
)

ACCEPTANCE: Final = Table(
    name="acceptance",
    grain="one row a request whose response carried acceptance figures",
    key=("request_id",),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _REQUEST,
        _PROMPT,
        _text(
            "source",
            "whose response fields these are: vllm (metrics.speculative_decoding), sglang (meta_info), "
            "llamacpp (timings)",
            allowed=("vllm", "sglang", "llamacpp"),
        ),
        _count("num_drafts", "verification steps that carried a draft", nullable=True),
        _count("num_draft_tokens", "drafted tokens", nullable=True),
        _count(
            "num_accepted_tokens", "accepted drafts, before any truncation, bonus excluded", nullable=True
        ),
        _count("num_speculative_tokens", "longest draft, K", nullable=True, minimum=1),
        Column(
            name="acceptance_histogram",
            dtype=pl.List(pl.Int64()),
            text="entry j: drafts with exactly j accepted tokens, K + 1 entries",
            nullable=True,
        ),
    ),
)

LOG_LINES: Final = Table(
    name="log_lines",
    grain="one row a statistics line that a server logged while the cell ran",
    key=("cell_id", "line"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _count("line", "0-based within the cell"),
        _text("text", "raw line"),
    ),
)

SCRAPES: Final = Table(
    name="scrapes",
    grain="one row a scrape of a server's /metrics; 0 and 1 idle, before the first measured request "
    "and after the warm-up, the last two idle after the last",
    key=("cell_id", "scrape"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _count("scrape", "0-based within the cell"),
        _real("scraped_s", "on the run's clock", minimum=0),
        _text("body", "raw text"),
    ),
)

TELEMETRY: Final = Table(
    name="telemetry",
    grain="one row a sample of host and device",
    key=("cell_id", "sampled_s", "device"),
    columns=(
        _RUN,
        _ARM,
        _CELL,
        _real("sampled_s", "on the run's clock", minimum=0),
        _text("device", "host, or the GPU's index"),
        _count("memory_used_bytes", "resident set (host) or memory in use (GPU)", nullable=True),
        _real("utilisation", "in [0, 1]", nullable=True, minimum=0, maximum=1),
        _real("power_watts", "board power", nullable=True, minimum=0),
    ),
)

TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        REQUESTS,
        CHUNKS,
        STEPS,
        ENGINE_STEPS,
        POSITIONS,
        TOKENS,
        SPLITS,
        ACCEPTANCE,
        LOG_LINES,
        SCRAPES,
        TELEMETRY,
    )
}
CELL_TABLES: Final = tuple(name for name in TABLES if name != "splits")


def empty(table: Table) -> pl.DataFrame:
    """A frame of `table` with no rows and the declared types."""
    return pl.DataFrame(schema=table.polars_schema)
