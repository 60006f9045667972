"""What servers answered in one cell, as the tables of `schema`.

Knows answers and frames, and neither sockets nor servers. Whatever a server claims, the tables keep
their declared types and ranges: a figure that can't be true is left out (null), so that it fails a
check of the run and does not end the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from specnb import schema
from specnb.config import Cell, Plan
from specnb.engines.base import CellContext, PlannedRequest
from specnb.engines.responses import Acceptance, Answer
from specnb.workloads import grade

SOURCES: Final = ("one token a step", "response, each step", "response, histogram", "chunks")
"""Where steps can come from, the surest first. What was guessed from chunks is `chunks`."""

# Methods that may propose nothing, or less than K, in a step.
_RAGGED_METHODS: Final = ("ngram", "ngram_gpu", "suffix")

# Times the cap above which a token count is no count.
_IMPLAUSIBLE: Final = 10

Step = tuple[int, int, int]
"""(drafted, accepted, emitted) tokens of one step."""


class CellTables:
    """Turns the answers of one cell into its tables.

    Parameters
    ----------
    plan, cell
        The plan and the cell that was run.
    requests
        What was planned; every answer belongs to one of them.
    context
        Gives the run's id.

    Attributes
    ----------
    steps_source
        The least sure of `SOURCES` that a request's steps came from; None where no steps are known.
    """

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
        *,
        scrapes: Sequence[tuple[float, str]] = (),
        log_lines: Sequence[str] = (),
        telemetry: pl.DataFrame | None = None,
    ) -> dict[str, pl.DataFrame]:
        """Every table that has rows, and the required ones.

        Parameters
        ----------
        answers
            One a request, failed ones too.
        scrapes
            (time on the run's clock, body) of each scrape of /metrics, in order.
        log_lines
            Statistics lines of the server's log.
        telemetry
            `schema.TELEMETRY`; None where nothing was sampled.

        Returns
        -------
        dict
            requests, steps, and where there are any rows chunks, acceptance, log_lines, scrapes, telemetry.
        """
        answers = sorted(answers, key=lambda answer: answer.request_id)
        rows: dict[str, list[dict[str, Any]]] = {
            "requests": [self._request(answer) for answer in answers],
            "acceptance": [
                self._acceptance(answer, answer.acceptance) for answer in answers if answer.acceptance
            ],
            "log_lines": [{"line": number, "text": line} for number, line in enumerate(log_lines)],
            "scrapes": [
                {"scrape": number, "scraped_s": at, "body": body} for number, (at, body) in enumerate(scrapes)
            ],
        }
        found = {"steps": self._steps_frame(answers)}
        chunks = self._chunks_frame(answers)
        if chunks.height:
            found["chunks"] = chunks
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
        content = _storable(answer.output_text)
        text = content
        if answer.reasoning_text:
            text = f"<think>{_storable(answer.reasoning_text)}</think>{content or ''}"
        ok = answer.status == "ok"
        prompt_tokens, cached = answer.num_prompt_tokens, answer.num_cached_tokens
        num_tokens = self._num_tokens(answer)
        first, ids = answer.num_first_chunk_tokens, _ids(answer)
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
            "num_prompt_tokens": prompt_tokens,
            "num_cached_tokens": None if _above(cached, prompt_tokens) else cached,
            "num_output_tokens": num_tokens,
            "num_first_chunk_tokens": None if _above(first, num_tokens) else first,
            "num_chunks": len(answer.chunks) or None,
            # [DONE] alone ends an answer well, too.
            "finish_reason": _storable(answer.finish_reason) or ("unknown" if ok else None),
            "status": answer.status,
            "error_kind": answer.error_kind,
            "error": _storable(answer.error),
            "output_text": text,
            "output_token_ids": ids if ids is None or num_tokens in (None, len(ids)) else None,
            "grader_score": grade(prompt, content) if ok and not self._plan.modelled else None,
            "mean_token_entropy_nats": None,
        }

    def _num_tokens(self, answer: Answer) -> int | None:
        """The answer's tokens by usage; None for 0, and for a figure far beyond what was allowed.

        0 tokens is no count of an answer: what came of such a request is in its error. A server may
        overstep the cap (reasoning that it does not count against it), but not tenfold.
        """
        count = answer.num_output_tokens
        allowed = _IMPLAUSIBLE * self._requests[answer.request_id].max_tokens
        return count if count and count <= allowed else None

    def _acceptance(self, answer: Answer, found: Acceptance) -> dict[str, Any]:
        return {
            "request_id": answer.request_id,
            "prompt_id": self._requests[answer.request_id].prompt.id,
            "source": found.source,
            "num_drafts": found.num_drafts,
            "num_draft_tokens": found.num_draft_tokens,
            "num_accepted_tokens": found.num_accepted_tokens,
            "num_speculative_tokens": found.num_speculative_tokens or None,
            "acceptance_histogram": list(found.histogram) if found.histogram is not None else None,
        }

    def _chunks_frame(self, answers: Sequence[Answer]) -> pl.DataFrame:
        """One row a chunk; by columns, since there are as many rows as chunks came."""
        counts = [len(answer.chunks) for answer in answers]
        return self._frame(
            schema.CHUNKS,
            counts,
            {
                "request_id": [answer.request_id for answer in answers],
            },
            {
                "chunk": [number for count in counts for number in range(count)],
                "received_s": [at for answer in answers for at, _ in answer.chunks],
                "num_tokens": [tokens for answer in answers for _, tokens in answer.chunks],
            },
        )

    def _steps_frame(self, answers: Sequence[Answer]) -> pl.DataFrame:
        """One row a step of every finished answer whose steps are known."""
        steps = [self._steps(answer) for answer in answers]
        counts = [len(found) for found in steps]
        return self._frame(
            schema.STEPS,
            counts,
            {
                "request_id": [answer.request_id for answer in answers],
                "prompt_id": [self._requests[answer.request_id].prompt.id for answer in answers],
            },
            {
                "step": [number for count in counts for number in range(count)],
                "num_draft_tokens": [drafted for found in steps for drafted, _, _ in found],
                "num_accepted_tokens": [accepted for found in steps for _, accepted, _ in found],
                "num_emitted_tokens": [emitted for found in steps for _, _, emitted in found],
            },
        )

    def _frame(
        self,
        table: schema.Table,
        counts: Sequence[int],
        by_answer: Mapping[str, Sequence[str]],
        by_row: Mapping[str, Sequence[Any]],
    ) -> pl.DataFrame:
        """A frame of `counts` rows an answer; a column that is named nowhere is null."""
        answers = np.repeat(np.arange(len(counts)), counts)
        columns = {
            name: pl.Series(values, dtype=pl.String()).gather(answers) for name, values in by_answer.items()
        }
        types = table.polars_schema
        columns |= {name: pl.Series(values, dtype=types[name]) for name, values in by_row.items()}
        constant = [pl.lit(value).alias(name) for name, value in self._keys.items() if name in table.names]
        null = [
            pl.lit(None, dtype=types[name]).alias(name)
            for name in table.names
            if name not in columns and name not in self._keys
        ]
        return pl.DataFrame(columns).with_columns(*constant, *null).select(table.names)

    def _steps(self, answer: Answer) -> list[Step]:
        num_tokens = self._num_tokens(answer)
        if answer.status != "ok" or num_tokens is None:
            return []
        speculative = self._cell.arm.speculative
        source: str | None
        if speculative is None:
            source, steps = SOURCES[0], [(0, 0, 1)] * (num_tokens - 1)
        else:
            source, steps = steps_of_answer(
                answer,
                num_speculative_tokens=speculative.num_speculative_tokens,
                ragged=speculative.method in _RAGGED_METHODS
                or "num_speculative_tokens_per_batch_size" in (speculative.model_extra or {}),
            )
        known = [name for name in (self.steps_source, source) if name is not None]
        self.steps_source = max(known, key=SOURCES.index, default=None)
        return steps


def steps_of_answer(
    answer: Answer, *, num_speculative_tokens: int, ragged: bool
) -> tuple[str | None, list[Step]]:
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
    drafts = _each_step(answer.acceptance)
    if drafts is not None:
        placed = _placed(drafts, counts) if known else None
        return "response, each step", placed or _filled(drafts, wanted)
    drafts = _histogram_steps(answer.acceptance)
    if drafts is not None:
        placed = _placed_by_size(drafts, counts) if known else None
        return "response, histogram", placed or _filled(drafts, wanted)
    if known and not ragged and max(counts, default=0) <= num_speculative_tokens + 1:
        return "chunks", [(num_speculative_tokens, count - 1, count) for count in counts]
    return None, []


def _each_step(found: Acceptance | None) -> list[tuple[int, int]] | None:
    """(drafted, accepted) of each step as a response lists them; None without, or if they can't be true."""
    if found is None or found.per_step_accepted is None or found.per_step_drafted is None:
        return None
    if len(found.per_step_accepted) != len(found.per_step_drafted):
        return None
    drafts = list(zip(found.per_step_drafted, found.per_step_accepted, strict=True))
    return drafts if all(accepted <= drafted for drafted, accepted in drafts) else None


def _histogram_steps(found: Acceptance | None) -> list[tuple[int, int]] | None:
    """(drafted, accepted) of each step of a histogram, in no order; None unless every draft had K tokens."""
    if found is None or found.histogram is None or found.num_draft_tokens is None:
        return None
    longest = len(found.histogram) - 1
    if found.num_draft_tokens != longest * sum(found.histogram):
        return None
    return [(longest, accepted) for accepted, count in enumerate(found.histogram) for _ in range(count)]


def _placed(drafts: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[Step] | None:
    """Drafted steps laid over the chunks, one step each; None if they don't fit (merged chunks)."""
    steps: list[Step] = []
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


def _placed_by_size(drafts: Sequence[tuple[int, int]], counts: Sequence[int]) -> list[Step] | None:
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


def _filled(drafts: Sequence[tuple[int, int]], wanted: int) -> list[Step]:
    """Drafted steps in order, the last ones cut at the answer's end, steps without a draft after them."""
    steps = []
    left = wanted
    for drafted, accepted in drafts:
        emitted = min(accepted + 1, left)
        steps.append((drafted, accepted, emitted))
        left -= emitted
    return steps + [(0, 0, 1)] * left


def _ids(answer: Answer) -> list[int] | None:
    """The answer's token ids, if whole numbers are what the server called ids."""
    ids = answer.output_token_ids
    return ids if ids is None or all(type(token) is int for token in ids) else None


def _above(value: int | None, limit: int | None) -> bool:
    return value is not None and limit is not None and value > limit


def _storable(text: str | None) -> str | None:
    """The text without lone surrogates, which JSON can hold and UTF-8 can't: each becomes `?`."""
    return None if text is None else text.encode("utf-8", errors="replace").decode()
