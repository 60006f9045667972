"""Small run directories as a server's engine would write them, with numbers chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from specnb import schema
from specnb.config import Cell, Plan, plan_from_dict
from specnb.records import RunWriter


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """One request: what it returned, and what its response said about acceptance."""

    num_output_tokens: int | None = 10
    status: str = "ok"
    acceptance: Mapping[str, Any] | None = None
    chunks: Sequence[int | None] = ()
    num_prompt_tokens: int = 20
    duration_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ServerCell:
    """One cell: its labels, requests, scrapes, log lines and facts for cell.json."""

    arm: str = "draft"
    concurrency: int = 1
    sampling: str = "greedy"
    repeat: int = 0
    requests: Sequence[ServerRequest] = (ServerRequest(),)
    scrapes: Sequence[str] = ()
    log: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def vllm_acceptance(histogram: Sequence[int], *, drafted: int | None = None) -> dict[str, Any]:
    """Response figures of one request from its histogram (entry j: drafts with j accepted), full drafts."""
    longest = len(histogram) - 1
    return {
        "source": "vllm",
        "num_drafts": sum(histogram),
        "num_draft_tokens": longest * sum(histogram) if drafted is None else drafted,
        "num_accepted_tokens": sum(j * count for j, count in enumerate(histogram)),
        "num_speculative_tokens": longest,
        "acceptance_histogram": list(histogram),
    }


def scrape(
    drafts: int | None = None,
    accepted: int | None = None,
    *,
    k: int = 3,
    generated: int | None = None,
    more: str = "",
    start: float | None = 1000.0,
) -> str:
    """The text of a vLLM scrape with full drafts of K tokens."""
    lines = ['vllm:num_requests_running{engine="0",model_name="m"} 0']
    counters = {
        "spec_decode_num_drafts": drafts,
        "spec_decode_num_draft_tokens": None if drafts is None else k * drafts,
        "spec_decode_num_accepted_tokens": accepted,
        "generation_tokens": generated,
    }
    for name, value in counters.items():
        if value is not None:
            lines += [
                f"# TYPE vllm:{name}_total counter",
                f'vllm:{name}_total{{engine="0",model_name="m"}} {value}',
            ]
    if start is not None:
        lines.append(f"process_start_time_seconds {start}")
    return "\n".join(lines) + "\n" + more


def server_plan(
    *,
    k: int = 3,
    kind: str = "openai",
    concurrency: Sequence[int] = (1,),
    sampling: Sequence[str] = ("greedy",),
    repeats: int = 1,
    max_tokens: int = 5000,
    args: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan of a baseline and one drafting arm on a server."""
    url = {"url": "http://127.0.0.1:8000"} if kind == "openai" else {}
    return plan_from_dict(
        {
            "name": "served",
            "target": {"model": "m"},
            "engine": {"kind": kind, "args": dict(args or {})},
            "arms": [
                {"name": "baseline", **url},
                {"name": "draft", "speculative": {"method": "dflash", "num_speculative_tokens": k}, **url},
            ],
            "workload": {"set": "builtin-en", "tiers": ["low"], "prompts_per_cell": None},
            "sampling": [
                {"name": name, "temperature": 0.0, "max_tokens": max_tokens, "seed": 0} for name in sampling
            ],
            "load": {"concurrency": list(concurrency)},
            "repeats": repeats,
        }
    )


def write_server_run(root: Path, cells: Sequence[ServerCell], plan: Plan | None = None) -> Path:
    """Writes a finished run with these cells under `root` and returns its directory."""
    plan = plan or server_plan(
        concurrency=sorted({cell.concurrency for cell in cells}),
        sampling=list(dict.fromkeys(cell.sampling for cell in cells)),
        repeats=1 + max(cell.repeat for cell in cells),
    )
    arms = {arm.name: arm for arm in plan.arms}
    settings = {setting.name: setting for setting in plan.sampling}
    planned = [
        Cell(
            arm=arms[cell.arm],
            tier="low",
            concurrency=cell.concurrency,
            sampling=settings[cell.sampling],
            repeat=cell.repeat,
        )
        for cell in cells
    ]
    facts = {"cell_order": [cell.cell_id for cell in planned]}
    with RunWriter.create(root, plan, facts=facts) as writer:
        for cell, content in zip(planned, cells, strict=True):
            writer.write_cell(cell, _tables(writer.run_id, cell, content), summary=dict(content.facts))
        writer.finalise(status="finished")
        return writer.path


def _tables(run_id: str, cell: Cell, content: ServerCell) -> dict[str, pl.DataFrame]:
    where = {"run_id": run_id, "arm": content.arm, "cell_id": cell.cell_id}
    rows: dict[str, list[dict[str, Any]]] = {"requests": [], "chunks": [], "acceptance": []}
    for number, request in enumerate(content.requests):
        request_id = f"{cell.cell_id}.{number:04d}"
        ok = request.status == "ok"
        rows["requests"].append(
            {
                **where,
                "repeat": content.repeat,
                "sampling": content.sampling,
                "concurrency": content.concurrency,
                "request_id": request_id,
                "prompt_id": f"p{number:03d}",
                "prompt_sha256": f"{number:064d}",
                "task": "qa",
                "entropy_tier": "low",
                "length_tier": "short",
                "scheduled_s": float(number),
                "sent_s": float(number),
                "first_token_s": number + 0.5 if ok else None,
                "last_token_s": number + request.duration_s if ok else None,
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_output_tokens": request.num_output_tokens,
                "num_first_chunk_tokens": request.chunks[0] if request.chunks else None,
                "num_chunks": len(request.chunks) or None,
                "finish_reason": "stop" if ok else None,
                "status": request.status,
                "error_kind": None if ok else "disconnected",
                "error": None if ok else "the connection was closed",
                "output_text": "text" if ok else None,
            }
        )
        rows["chunks"] += [
            {
                "run_id": run_id,
                "request_id": request_id,
                "chunk": place,
                "received_s": number
                + 0.5
                + (request.duration_s - 0.5) * (place / max(1, len(request.chunks) - 1)),
                "num_tokens": tokens,
            }
            for place, tokens in enumerate(request.chunks)
        ]
        if request.acceptance is not None:
            rows["acceptance"].append(
                {**where, "request_id": request_id, "prompt_id": f"p{number:03d}", **request.acceptance}
            )
    rows["scrapes"] = [
        {**where, "scrape": number, "scraped_s": float(number), "body": body}
        for number, body in enumerate(content.scrapes)
    ]
    rows["log_lines"] = [{**where, "line": number, "text": text} for number, text in enumerate(content.log)]
    tables = {
        name: pl.DataFrame(found, schema=schema.TABLES[name].polars_schema)
        for name, found in rows.items()
        if found
    }
    return {"requests": schema.empty(schema.REQUESTS), "steps": schema.empty(schema.STEPS), **tables}
