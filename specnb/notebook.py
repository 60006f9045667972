"""What notebooks call beside estimators: open a run, show its conditions, charts, tables and verdicts.

Everything displayed is an object with `_repr_mimebundle_`, so that the same call works in
JupyterLab (Vega-Lite in the version that JupyterLab bundles), in a stock HTML export (a
static SVG) and in `report` (SVG first, interactive after), offline each time. All text that
comes from a run is HTML-escaped, and paths lose their folders. Imports records, charts and
theme; estimators are called by notebooks themselves. Separate from `report` so that a
notebook needs no papermill.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from specnb import candidates, charts, cost, equivalence, latency, reconciliation, theme, verdicts
from specnb.config import Arm
from specnb.errors import RecordError
from specnb.provenance import git_sha
from specnb.records import Run, read_run
from specnb.stats import NO_INTERVAL
from specnb.verdicts import Claim

CHART_MIME: Final = "application/vnd.vegalite.v5+json"
CLAIMS_MIME: Final = "application/vnd.specnb.claims+json"
VERDICT_MIME: Final = "application/vnd.specnb.verdict+json"
END_MIME: Final = "application/vnd.specnb.end+json"
VEGALITE_VERSION: Final = "6.4"

MAX_TABLE_ROWS: Final = 60
MAX_OPEN_ROWS: Final = 12
CLAIM_PAGES: Final = {
    "suffix decay": "02_suffix_decay",
    "entropy": "03_hit_rate_by_entropy",
    "speedup": "04_speedup_by_concurrency",
    "equivalence": "05_output_equivalence",
    "drafters": "09_drafter_comparison",
}

_SCHEMA_V5: Final = "https://vega.github.io/schema/vega-lite/v5.json"
_EMBED_OPTIONS: Final = {
    "actions": {"export": True, "source": False, "compiled": False, "editor": False},
    "renderer": "svg",
}
# Enough for JupyterLab, whose page has no style sheet of ours; a report brings its own.
STYLE: Final = (
    "<style>.specnb-box{border:1px solid #d0d7de;border-radius:6px;padding:8px 14px;"
    "margin:6px 0;max-width:60em}"
    ".specnb-box dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:4px 0}"
    ".specnb-box dt{font-weight:600;float:none;width:auto;white-space:nowrap}"
    ".specnb-box dd{margin:0;width:auto;overflow-wrap:anywhere}"
    ".specnb-banner{border-left:5px solid #8a5a00;background:#fff6dd;color:#1f2328;"
    "padding:6px 12px;margin:6px 0}"
    ".specnb-badge{color:#fff;border-radius:4px;padding:1px 8px;font-weight:600}"
    ".specnb-good{background:#1b7f4d}.specnb-bad{background:#b3261e}.specnb-open{background:#8a5a00}"
    ".specnb-fact{background:#3d5a80}"
    ".specnb-scroll{overflow-x:auto}.specnb-num{text-align:right}</style>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Something to display: HTML (model output already escaped), its plain text, further MIME types."""

    html: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return STYLE + self.html

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> Any:
        return {"text/html": self._repr_html_(), "text/plain": self.text, **self.data}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView:
    """A chart as Vega-Lite for JupyterLab and as a static SVG for everything else.

    JupyterLab 4 renders Vega-Lite up to version 5; the charts use no feature that is newer, and a
    test renders each in both versions. There is no `_repr_html_`: JupyterLab would prefer it.
    """

    chart: charts.Chart

    def __repr__(self) -> str:
        return f"Chart({self.description!r})"

    @property
    def description(self) -> str:
        """What the chart shows, in words."""
        return str(self.chart.to_dict().get("description", "chart"))

    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification with data inside, labelled version 5, without links to an editor."""
        spec: dict[str, Any] = self.chart.to_dict()
        spec["$schema"] = _SCHEMA_V5
        spec["usermeta"] = {"embedOptions": _EMBED_OPTIONS}
        return spec

    def svg(self) -> str:
        """The chart as SVG, drawn in this process; nothing is fetched."""
        return chart_svg(self.spec())

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> Any:
        spec = self.spec()
        text = f"Chart({spec.get('description', 'chart')!r})"
        return {CHART_MIME: spec, "image/svg+xml": chart_svg(spec), "text/plain": text}


def chart_svg(spec: Mapping[str, Any]) -> str:
    """A Vega-Lite specification as SVG text."""
    import vl_convert

    text = json.dumps(spec, allow_nan=False)
    svg: str = vl_convert.vegalite_to_svg(text, vl_version=VEGALITE_VERSION)
    return svg


def open_run(run_dir: str, plan: str = "") -> Run:
    """The run that a notebook analyses.

    Parameters
    ----------
    run_dir
        A run directory; relative to the current directory, else to the repository, so that notebooks
        work from any directory.
    plan
        A plan file to measure first; its finished run is reused. Empty: `run_dir` is read. When given,
        `run_dir` is not looked at.

    Raises
    ------
    RecordError
        No such directory, or its content is broken.
    PlanError
        The plan is wrong.
    """
    if plan:
        from specnb.runner import DEFAULT_ROOT, Progress, measure_or_reuse

        root = _repository() / DEFAULT_ROOT
        hooks = Progress(on_message=_say, on_cell_done=lambda cell: _say(f"measured {cell.cell_id}"))
        return read_run(
            measure_or_reuse(
                _locate(plan), root=root if root.parent.is_dir() else DEFAULT_ROOT, progress=hooks
            )
        )
    found = _locate(run_dir)
    if not found.exists():
        raise RecordError(
            f"{run_dir}: no such run directory, neither in the current directory nor in the repository; "
            "give run_dir a folder that holds manifest.json"
        )
    return read_run(found)


def generator(run: Run) -> np.random.Generator:
    """A random generator seeded by the run's id: the same run gives the same intervals."""
    digest = hashlib.sha256(run.run_id.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def arm_names(run: Run) -> tuple[str, ...]:
    """Every arm of the plan in plan order, for `arms=` of charts."""
    return tuple(arm.name for arm in run.plan.arms)


def show(
    chart: charts.Chart, frame: pl.DataFrame | None = None, *, caption: str = "the numbers behind the chart"
) -> None:
    """Displays a chart and, folded below it, the table it was drawn from."""
    from IPython.display import display

    display(ChartView(chart=chart))  # type: ignore[no-untyped-call]
    if frame is not None:
        display(table(frame, caption=caption, folded=True))  # type: ignore[no-untyped-call]


def table(frame: pl.DataFrame, *, caption: str, folded: bool = False, max_rows: int = MAX_TABLE_ROWS) -> View:
    """A frame as a readable table: intervals in one column, constants in the caption, null as `n/a`.

    Parameters
    ----------
    frame
        Any frame; the columns of an estimate get names for people.
    caption
        What the rows are.
    folded
        Whether the table starts closed.
    max_rows
        Rows shown; the caption says how many there are.
    """
    shown = frame.head(max_rows)
    constants, names = _split_constants(frame)
    heads = "".join(_head(name, frame) for name in names)
    rows = "".join(
        "<tr>" + "".join(_cell(name, row) for name in names) + "</tr>" for row in shown.iter_rows(named=True)
    )
    note = f"; {frame.height} rows, the first {max_rows} shown" if frame.height > max_rows else ""
    said = caption.replace("-", " ")
    facts = "".join(f"; {_escape(fact)}" for fact in constants if fact not in said)
    body = (
        f'<div class="specnb-scroll" tabindex="0"><table><caption>{_escape(caption)}{facts}{note}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        if frame.height
        else f"<p>{_escape(caption)}: no rows.</p>"
    )
    if folded:
        body = f'<details class="specnb-table"><summary>Table: {_escape(caption)}</summary>{body}</details>'
    return View(html=body, text=f"{caption}\n{shown}")


def metric_table(frame: pl.DataFrame, *, caption: str, baseline: str | None = None) -> View:
    """A long frame of estimates with one column a metric: value, interval and n in one cell.

    Parameters
    ----------
    frame
        Group columns, then `metric`, `value`, `low`, `high`, `level`, `n`, `reason`.
    caption
        What the rows are.
    baseline
        The arm that does not speculate: what it can't have reads "not speculating", not as a fault.
    """
    first = frame.columns.index("metric")
    groups = frame.columns[:first]
    metrics = frame["metric"].unique(maintain_order=True).to_list()
    heads = "".join(_head(name, frame) for name in groups)
    heads += "".join(
        f'<th scope="col" class="specnb-num">{_escape(theme.column_title(name))}</th>' for name in metrics
    )
    rows = []
    for key, group in frame.group_by(groups, maintain_order=True):
        found = {row["metric"]: row for row in group.iter_rows(named=True)}
        cells = "".join(_cell(name, {name: value}) for name, value in zip(groups, key, strict=True))
        silent = baseline is not None and baseline in key
        cells += "".join(_estimate_cell(found.get(name), not_speculating=silent) for name in metrics)
        rows.append(f"<tr>{cells}</tr>")
    level = f"; {frame['level'][0] * 100:g} % intervals" if frame.height else ""
    return View(
        html=f'<div class="specnb-scroll" tabindex="0"><table><caption>{_escape(caption)}{level}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>",
        text=f"{caption}\n{frame}",
    )


def claims(found: Sequence[Claim]) -> View:
    """Verdicts as sentences with their evidence: one block a claim, bad news as visible as good news.

    Parameters
    ----------
    found
        From a function of `verdicts`.
    """
    entries = [{"arm": claim.arm, **claim.as_dict()} for claim in found]
    blocks = [_claim_html(entry) for entry in entries]
    blocks = blocks or ["<p>No arm to judge: the run holds no arm that speculates.</p>"]
    kept = ("arm", "claim", "question", "verdict", "sentence")
    return View(
        html=f'<div class="specnb-claims">{"".join(blocks)}</div>',
        text="\n".join(f"{entry['verdict']}: {entry['sentence']}" for entry in entries) or "no arm to judge",
        data={CLAIMS_MIME: {"claims": [{name: entry[name] for name in kept} for entry in entries]}},
    )


def final(verdict: Mapping[str, Any]) -> View:
    """The final verdict of every arm with its reasons, from `verdicts.verdict_json`.

    Carries the whole verdict as data, from which a report takes `verdict.json`.
    """
    arms = verdict["arms"]
    blocks = [_claim_html({**arm, "estimate": None, "threshold": None}) for arm in arms]
    blocks = blocks or ["<p>No arm to judge: the run holds no arm that speculates.</p>"]
    claims_made = [
        {
            "arm": arm["arm"],
            "claim": "verdict",
            "question": "Should this drafter go in front of this target?",
            "verdict": arm["verdict"],
            "sentence": scrub(arm["sentence"]),
        }
        for arm in arms
    ]
    return View(
        html=f'<div class="specnb-claims">{"".join(blocks)}</div>',
        text="\n".join(f"{arm['verdict']}: {arm['sentence']}" for arm in arms) or "no arm to judge",
        data={CLAIMS_MIME: {"claims": claims_made}, VERDICT_MIME: dict(verdict)},
    )


def overview_frame(verdict: Mapping[str, Any]) -> pl.DataFrame:
    """arm, claim and verdict of everything that `verdict_json` holds, for `verdict_overview_chart`."""
    rows = []
    for arm in verdict["arms"]:
        rows.append((arm["arm"], "verdict", arm["verdict"]))
        rows += [(arm["arm"], claim["claim"], claim["verdict"]) for claim in arm["claims"]]
    return pl.DataFrame(rows, schema=dict.fromkeys(("arm", "claim", "verdict"), pl.String), orient="row")


def claim_table(verdict: Mapping[str, Any]) -> View:
    """Every claim of every arm in a table: question, verdict, evidence, and a link to its notebook's page."""
    rows = []
    for arm in verdict["arms"]:
        for claim in arm["claims"]:
            page = CLAIM_PAGES.get(claim["claim"])
            link = f'<a href="{page}.html">{_escape(page)}</a>' if page else ""
            tone = theme.verdict_tone(claim["verdict"], claim.get("claim", ""))
            rows.append(
                f"<tr><td>{_escape(arm['arm'])}</td><td>{_escape(claim['question'])}</td>"
                f'<td><span class="specnb-badge specnb-{tone}">{_escape(claim["verdict"])}</span></td>'
                f"<td>{_escape(scrub(claim['sentence']))}</td><td>{link}</td></tr>"
            )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("arm", "question", "verdict", "evidence", "page")
    )
    body = "".join(rows) or '<tr><td colspan="5">No arm to judge.</td></tr>'
    return View(
        html='<div class="specnb-scroll" tabindex="0"><table><caption>every claim of this run</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>",
        text="\n".join(
            f"{arm['arm']}: {claim['verdict']}: {claim['sentence']}"
            for arm in verdict["arms"]
            for claim in arm["claims"]
        ),
    )


def not_measured(verdict: Mapping[str, Any]) -> View:
    """What the run does not hold though the six questions need it, arm by arm."""
    listed = "".join(
        f"<li>{_escape(arm['arm'])}: {_escape(scrub(missing))}</li>"
        for arm in verdict["arms"]
        for missing in arm["not_measured"]
    )
    return View(
        html=f"<ul>{listed or '<li>Nothing is missing.</li>'}</ul>",
        text="\n".join(
            f"{arm['arm']}: {missing}" for arm in verdict["arms"] for missing in arm["not_measured"]
        ),
    )


def every_arm(
    estimate: Callable[..., pl.DataFrame], run: Run, *, baseline: bool = False, **options: Any
) -> pl.DataFrame:
    """`estimate(run, arm=..., **options)` for every arm that speculates, stacked, with an `arm` column.

    Parameters
    ----------
    estimate
        A function that takes a run and the keyword `arm` and returns a frame.
    baseline
        Whether the baseline is asked too, as a control.
    """
    frames = [
        estimate(run, arm=arm.name, **options).with_columns(pl.lit(arm.name).alias("arm"))
        for arm in run.plan.arms
        if arm.speculative is not None or baseline
    ]
    if not frames:
        return (
            estimate(run, arm=run.plan.baseline.name, **options)
            .clear()
            .with_columns(pl.lit(None, pl.String).alias("arm"))
        )
    return pl.concat(frames, how="diagonal")


def acceptance_sources(run: Run) -> View:
    """Each source of each arm's acceptance, whether they agree, and which one is believed."""
    frame = reconciliation.acceptance_sources(run).rename({"reason": "note"})
    return table(frame, caption="sources of acceptance; the headline one is believed")


def timed_requests(run: Run) -> pl.DataFrame:
    """Requests whose times are the server's (`verdicts.fit_requests`); all of them if no load is left.

    The banner above the page says which of the two it is.
    """
    fit = verdicts.fit_requests(run)
    return run.requests if fit.filter(pl.col("arm") == run.plan.baseline.name).is_empty() else fit


def unfit_cells(run: Run) -> View:
    """Cells whose times measure something else than the server at their load, and why."""
    return table(verdicts.unfit_cells(run), caption="cells unfit for timing")


def published(run: Run, speedups: pl.DataFrame, parts: pl.DataFrame) -> View:
    """The plan's published figures beside this run's, at the same concurrency.

    Parameters
    ----------
    run
        The run.
    speedups
        `latency.speedup_table` by arm, sampling and concurrency.
    parts
        `latency.decomposition` of the run.
    """
    claims = run.plan.published
    if claims is None:
        text = "The plan names no published figures."
        return View(html=f"<p>{text}</p>", text=text)
    setting = run.plan.sampling[0].name
    kept = pl.col("sampling") == setting
    steps = run.labelled("steps").filter(kept, pl.col("num_draft_tokens") > 0)
    measured = steps.group_by("arm", "concurrency").agg(
        (1 + pl.col("num_accepted_tokens").sum() / pl.len()).alias("acceptance_length")
    )
    frame = latency.claims_table(speedups.filter(kept), parts.filter(kept), claims, acceptance=measured)
    lead = f"Published: {claims.conditions.rstrip('.')}. Source: {claims.source}"
    if claims.differences:
        lead += f". This run differs: {claims.differences.rstrip('.')}."
    shown = table(frame, caption=f"published and measured ({setting})")
    return View(html=f"<p>{_escape(lead)}</p>{shown._repr_html_()}", text=f"{lead}\n{shown!r}")


def candidates_known(run: Run) -> View:
    """Whether this run tells of a drafter's candidates, and if not, why the charts below are empty."""
    reason = candidates.missing_positions(run)
    text = f"No candidate is known: {reason}." if reason else _candidates_of(run)
    return View(html=f"<p>{_escape(text)}</p>", text=text)


def _candidates_of(run: Run) -> str:
    found = candidates.greedy_positions(run)
    known = found.group_by("arm").agg(
        pl.len().alias("places"),
        pl.col("in_answer").sum().alias("answered"),
        pl.col("keeps_candidates").any(),
    )
    facts = {row["arm"]: row for row in known.iter_rows(named=True)}
    parts = []
    for arm in run.plan.arms:
        if arm.speculative is None:
            continue
        row = facts.get(arm.name)
        if row is None:
            parts.append(f"{arm.name}: nothing was drafted")
        elif not row["keeps_candidates"]:
            parts.append(f"{arm.name}: the drafter keeps no candidates")
        else:
            parts.append(f"{arm.name}: {row['answered']:,} of {row['places']:,} places lie in the answer")
    return f"Greedy answers. {'; '.join(parts)}."


def drafters(frame: pl.DataFrame) -> View:
    """What each drafter is, one column a drafter, and below it what the run's record does not hold.

    Parameters
    ----------
    frame
        `cost.drafter_table`.
    """
    if frame.is_empty():
        text = "The run holds no arm that speculates."
        return View(html=f"<p>{text}</p>", text=text)
    currency = next((name for name in frame["currency"] if name), "")
    words = {
        "label": "drafter",
        "method": "method",
        "num_speculative_tokens": "drafts a step (K)",
        "selector": "path selector",
        "convolution": "convolution",
        "num_parameters": "parameters",
        "weight_bytes": "bytes of weights, as served",
        "kv_bytes_per_token": "bytes of keys and values a context token",
        "kv_cache_tokens": "tokens of room in the server's cache",
        "baseline_kv_cache_tokens": "the same without a drafter",
        "training_gpu_hours": "GPU hours of training",
        "training_tokens": "answer tokens trained on",
        "training_hardware": "trained on",
        "training_cost": f"cost of training ({currency or 'no price'})",
    }
    rows = list(frame.iter_rows(named=True))
    kept = [name for name in words if any(row[name] is not None for row in rows)]
    heads = '<th scope="col"></th>' + "".join(f'<th scope="col">{_escape(row["arm"])}</th>' for row in rows)
    body = "".join(
        f'<tr><th scope="row">{_escape(words[name])}</th>'
        + "".join(_cell(name, row) for row in rows)
        + "</tr>"
        for name in kept
    )
    notes = [f"{row['arm']}: not known: {row['reason']}" for row in rows if row["reason"]]
    listed = "".join(f"<li>{_escape(note)}</li>" for note in notes)
    return View(
        html='<div class="specnb-scroll" tabindex="0"><table><caption>drafters of this run</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f"<ul>{listed}</ul>" if notes else ""),
        text="\n".join([f"drafters of this run\n{frame}", *notes]),
    )


def mechanisms(run: Run, gains: pl.DataFrame) -> View:
    """What selector and convolution do, in sentences, or why the run can't tell.

    Parameters
    ----------
    run
        The run.
    gains
        `candidates.mechanism_gains` of its steps.
    """
    lines = list(candidates.mechanism_sentences(gains))
    if not lines:
        found = candidates.arm_mechanisms(run)
        known = found.filter(pl.col("selector").is_not_null(), pl.col("convolution").is_not_null())
        reason = (
            "the run's record tells of no arm whether it has a path selector or a convolution"
            if known.is_empty()
            else "no two arms differ in the path selector or the convolution alone"
        )
        lines = [f"The run can't tell what either part does: {reason}."]
    items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
    return View(html=f"<ul>{items}</ul>", text="\n".join(lines))


def released_pair() -> View:
    """The published figures of the released pair, marked as claims of its authors."""
    lead = (
        f"Published claims, not measured by specnb: {cost.RELEASED_CONDITIONS}. "
        f"Source: {cost.RELEASED_SOURCE}"
    )
    shown = table(cost.released_pair(), caption="published claims, not measured")
    return View(html=f"<p>{_escape(lead)}</p>{shown._repr_html_()}", text=f"{lead}\n{shown!r}")


def divergence_table(pairs: pl.DataFrame) -> View:
    """The pairs of `equivalence.greedy_pairs` that differ: where, by which tokens, and how close it was."""
    names = (
        "arm",
        "sampling",
        "concurrency",
        "repeat",
        "prompt_id",
        "entropy_tier",
        "index",
        "reference_token_id",
        "token_id",
        "split_class",
        "margin_nats",
        "margin_source",
    )
    differing = pairs.filter(~pl.col("identical")).select(names)
    caption = f"{differing.height} pairs of greedy answers that differ, and where they first do"
    return table(differing, caption=caption, folded=differing.height > MAX_OPEN_ROWS)


def banners(run: Run) -> list[str]:
    """Warnings that must stand above every headline of this run; empty for a complete, real, matched one."""
    found = []
    if _simulated(run):
        found.append(
            "SIMULATED: the numbers come from a simulated engine and say nothing about any model or machine."
        )
    if run.modelled:
        found.append(
            "MODELLED: weights or acceptance were synthetic; these are not the numbers of a real drafter."
        )
    if run.status != "finished":
        planned = len(run.manifest.get("cell_order", []))
        of = f" of {planned}" if planned else ""
        found.append(f"UNFINISHED RUN ({run.status}): {len(run.cells)}{of} cells are in this report.")
    unfit = verdicts.unfit_cells(run)
    if unfit.height:
        number = unfit["cell_id"].n_unique()
        kinds = _listed(sorted(set(unfit["kind"])))
        left = "they are left out of the speedups"
        if verdicts.fit_requests(run, unfit=unfit).filter(pl.col("arm") == run.plan.baseline.name).is_empty():
            left = "no load of the baseline is left, so the charts of speed show all of them"
        found.append(f"{number} OF {len(run.cells)} CELLS ARE UNFIT FOR TIMING ({kinds}): {left}.")
    differences = arm_differences(run)
    if differences:
        found.append("ARMS DIFFER IN MORE THAN SPECULATION: " + "; ".join(differences) + ".")
    return found


def watermark(run: Run) -> str | None:
    """The word printed across pages of a run that is not a real measurement; None for one that is."""
    if _simulated(run):
        return "SIMULATED"
    return "MODELLED" if run.modelled else None


def arm_differences(run: Run) -> list[str]:
    """What differs between the arms beside `speculative`: arguments, prompts, prompt tokens."""
    plan = run.plan
    found = []
    for arm in plan.arms:
        for key in sorted({*arm.args, *plan.baseline.args}):
            mine, theirs = arm.args.get(key), plan.baseline.args.get(key)
            if mine != theirs:
                found.append(f"{arm.name}: {key}={mine!r}, baseline {theirs!r}")
        found += [
            f"{arm.name}: {setting.name} {setting.value}, baseline {setting.baseline_value} (server's log)"
            for setting in equivalence.setting_differences(run, arm=arm.name)
            if arm.speculative and not setting.follows
        ]
    prompts = (
        run.requests.filter(pl.col("num_prompt_tokens").is_not_null())
        .group_by("prompt_id", "arm")
        .agg(pl.col("num_prompt_tokens").min().alias("low"), pl.col("num_prompt_tokens").max().alias("high"))
        .group_by("prompt_id")
        .agg((pl.col("low").min() != pl.col("high").max()).alias("differs"))
    )
    num_different = int(prompts["differs"].sum())
    if num_different:
        found.append(f"prompt token counts differ on {num_different} of {prompts.height} prompts")
    digests = run.requests.group_by("prompt_id").agg(pl.col("prompt_sha256").n_unique().alias("digests"))
    num_changed = digests.filter(pl.col("digests") > 1).height
    if num_changed:
        found.append(f"prompt text differs on {num_changed} of {digests.height} prompts")
    return found


def condition_rows(run: Run) -> list[tuple[str, str]]:
    """The facts without which a number of this run means nothing, as pairs of name and text."""
    plan = run.plan
    requests = run.requests
    engine = run.manifest.get("engine", {})
    rows = [
        ("hardware", _hardware(run)),
        ("engine", _engine(run)),
        ("target", _target(run)),
        *((f"drafter {arm.name}", _drafter(arm)) for arm in plan.arms if arm.speculative),
        ("sampling", "; ".join(_sampling(setting.model_dump()) for setting in plan.sampling)),
        ("concurrency", f"{_listed(sorted(set(requests['concurrency'])))} ({plan.load.mode} loop)"),
        ("dataset", _dataset(run)),
        (
            "prompts, requests",
            f"{requests['prompt_id'].n_unique()} distinct prompts, {requests.height} requests",
        ),
        ("repeats", _repeats(run)),
        (
            "intervals",
            "95 % unless a table says otherwise; prompts resampled as clusters, repeats as the outer level",
        ),
        ("acceptance length", "counts the bonus token; pooled over steps that carried a draft"),
        ("cached prompt tokens", _cached(requests)),
        ("failures", _failures(requests)),
        ("differences between arms", "; ".join(arm_differences(run)) or "none beside speculation"),
    ]
    followed = [
        f"{arm.name}: {setting.name} {setting.value}, baseline {setting.baseline_value}"
        for arm in plan.arms
        if arm.speculative
        for setting in equivalence.setting_differences(run, arm=arm.name)
        if setting.follows
    ]
    if followed:
        rows.append(("changed by the drafter", "; ".join(followed)))
    capacity = _kv_capacity(run)
    if capacity:
        rows.append(("KV cache capacity", capacity))
    if engine.get("clock"):
        rows.append(("clock", str(engine["clock"])))
    return [(name, scrub(text)) for name, text in rows]


def conditions(run: Run) -> View:
    """The conditions box: what a number of this run depends on, with banners above it."""
    rows = condition_rows(run)
    warnings = "".join(
        f'<p class="specnb-banner" role="note">{_escape(scrub(text))}</p>' for text in banners(run)
    )
    body = "".join(f"<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>" for name, text in rows)
    return View(
        html=f'{warnings}<section class="specnb-box specnb-conditions" aria-label="Conditions">'
        f"<strong>Conditions of every number on this page</strong><dl>{body}</dl></section>",
        text="\n".join([*banners(run), *(f"{name}: {text}" for name, text in rows)]),
    )


def limits(run: Run) -> list[str]:
    """What this run can't say, from what it holds."""
    found = []
    if _simulated(run) or run.modelled:
        found.append("Nothing here was measured on a real model pair.")
    if _num_repeats(run) < 2:
        found.append("One repeat: run-to-run variation is unknown, intervals cover prompts only.")
    if run.requests["concurrency"].n_unique() < 2:
        found.append("One concurrency: nothing is known about other loads.")
    num_prompts = run.requests["prompt_id"].n_unique()
    if num_prompts < 30:
        found.append(
            f"{num_prompts} distinct prompts: intervals over prompts are wide and rare failures are unseen."
        )
    if not run.has("tokens"):
        found.append("No token table: entropy and the law of sampled tokens were not measured.")
    if not run.has("engine_steps"):
        found.append(
            "No engine steps: step times come from the server's count of iterations and from the client."
            if run.has("scrapes")
            else "No engine steps: step times come from the client's side."
        )
    if not run.has("splits"):
        found.append("First divergences were not judged again by the target.")
    if all(setting.temperature > 0 for setting in run.plan.sampling):
        found.append("No greedy setting: answers can't be compared token by token.")
    if all(setting.temperature == 0 for setting in run.plan.sampling):
        found.append("No sampled setting: losslessness at a temperature above 0 was not tested.")
    if run.status != "finished":
        found.append("The run is not finished.")
    return found


def provenance(run: Run) -> View:
    """Where the run came from and what it can't say; the last cell of every notebook, which marks its end."""
    manifest = run.manifest
    versions = manifest.get("versions") or {}
    rows = [
        ("run", run.run_id),
        ("status", run.status),
        ("started", str(manifest.get("started_at"))),
        ("ended", str(manifest.get("ended_at") or "not yet")),
        ("measured by revision", str(manifest.get("git_sha") or "unknown")),
        ("analysed by revision", git_sha() or "unknown"),
        ("plan", f"{run.plan.name}, sha256 {manifest['plan_sha256']}"),
        ("record schema", str(manifest["schema_version"])),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "unknown",
        ),
        ("cells", f"{len(run.cells)} finished"),
        ("workload", _digest(manifest.get("workload"))),
    ]
    body = "".join(f"<dt>{_escape(name)}</dt><dd>{_escape(scrub(text))}</dd>" for name, text in rows)
    notes = limits(run)
    listed = (
        "".join(f"<li>{_escape(note)}</li>" for note in notes)
        or "<li>None known beside the conditions above.</li>"
    )
    return View(
        html=f'<section class="specnb-box" aria-label="Provenance"><dl>{body}</dl>'
        f"<strong>Limits</strong><ul>{listed}</ul></section>",
        text="\n".join([*(f"{name}: {scrub(text)}" for name, text in rows), *notes]),
        data={END_MIME: {"run_id": run.run_id}},
    )


def scrub(text: str) -> str:
    """Text without the reader's-eyes-only parts of paths: the home and the repository folder."""
    for folder, short in ((_repository(), "."), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), short)
    return text


# Shared parts


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _repository() -> Path:
    return Path(__file__).resolve().parents[1]


def _locate(path: str) -> Path:
    """`path` as given if it exists from here, else relative to the repository if it exists there."""
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given
    fallback = _repository() / given
    return fallback if fallback.exists() else given


def _simulated(run: Run) -> bool:
    return bool(run.manifest.get("engine", {}).get("simulated")) or run.plan.engine.kind == "simulated"


def _num_repeats(run: Run) -> int:
    return int(run.requests["repeat"].n_unique())


def _repeats(run: Run) -> str:
    number = _num_repeats(run)
    return str(number) if number >= 2 else "1; run-to-run interval n/a: single run"


def _hardware(run: Run) -> str:
    host = run.manifest.get("host") or {}
    engine = run.manifest.get("engine") or {}
    parts = []
    gpus = engine.get("gpu") or run.manifest.get("gpu") or engine.get("gpus")
    if gpus:
        parts.append("GPU " + (gpus if isinstance(gpus, str) else _listed(gpus)))
    elif engine.get("device"):
        parts.append(f"device {engine['device']}")
    if host.get("processor"):
        parts.append(f"CPU {host['processor']}, {host.get('num_cores')} cores")
    return ", ".join(parts) or "unknown"


def _engine(run: Run) -> str:
    engine = run.manifest.get("engine") or {}
    versions = run.manifest.get("versions") or {}
    label = str(engine.get("label") or run.plan.engine.kind)
    named = [
        f"{name} {versions[name]}"
        for name in ("vllm", "torch", "transformers", "specnb")
        if versions.get(name)
    ]
    return ", ".join([label, *named])


def _target(run: Run) -> str:
    target = (run.manifest.get("engine") or {}).get("target") or {}
    label = str(target.get("label") or _base_name(run.plan.target.model))
    parts = [label, str(target.get("dtype") or run.plan.target.dtype)]
    identity = target.get("revision") or target.get("sha256") or run.plan.target.revision
    if identity:
        parts.append(str(identity)[:12])
    return ", ".join(parts)


def _drafter(arm: Arm) -> str:
    settings = arm.speculative
    assert settings is not None
    model = f"{_base_name(settings.model)}, " if settings.model else ""
    extra = f", {settings.draft_sample_method} drafts" if settings.draft_sample_method else ""
    rule = f", {settings.rejection_sample_method} acceptance" if settings.rejection_sample_method else ""
    return f"{model}method {settings.method}, K = {settings.num_speculative_tokens}{extra}{rule}"


def _sampling(setting: Mapping[str, Any]) -> str:
    law = "greedy" if setting["temperature"] == 0 else f"temperature {setting['temperature']:g}"
    if setting["temperature"] and setting["top_p"] < 1:
        law += f", top-p {setting['top_p']:g}"
    if setting["temperature"] and setting["top_k"]:
        law += f", top-k {setting['top_k']}"
    eos = ", stop token ignored" if setting["ignore_eos"] else ""
    return f"{setting['name']} ({law}, at most {setting['max_tokens']} tokens{eos})"


def _dataset(run: Run) -> str:
    plan = run.plan.workload
    return (
        f"{_base_name(plan.set)}; entropy tiers {_listed(plan.tiers)}; "
        f"output lengths {_listed(plan.lengths)} (mixed inside a cell)"
    )


def _kv_capacity(run: Run) -> str:
    """Tokens that each arm's server has room for, from its log; empty where no server says."""
    found: dict[str, set[int]] = {}
    for cell in run.cells:
        tokens = (cell.get("server") or {}).get("kv_cache_tokens")
        if tokens:
            found.setdefault(cell["arm"], set()).add(int(tokens))
    return ", ".join(f"{arm} {' or '.join(f'{n:,}' for n in sorted(sizes))}" for arm, sizes in found.items())


def _cached(requests: pl.DataFrame) -> str:
    known = requests.filter(pl.col("num_cached_tokens").is_not_null(), pl.col("num_prompt_tokens") > 0)
    if known.is_empty():
        return "n/a: the engine does not say"
    by_arm = known.group_by("arm", maintain_order=True).agg(
        (pl.col("num_cached_tokens").sum() / pl.col("num_prompt_tokens").sum()).alias("share")
    )
    return ", ".join(f"{arm} {share:.1%}" for arm, share in by_arm.iter_rows())


def _failures(requests: pl.DataFrame) -> str:
    counted = (
        requests.filter(pl.col("status") != "ok")
        .group_by("arm", "status", maintain_order=True)
        .agg(pl.len().alias("count"))
    )
    if counted.is_empty():
        return f"0 of {requests.height} requests"
    parts = ", ".join(f"{arm} {count} {status}" for arm, status, count in counted.iter_rows())
    return f"{int(counted['count'].sum())} of {requests.height} requests ({parts})"


def _digest(workload: Any) -> str:
    if not isinstance(workload, Mapping):
        return "unknown"
    digest = workload.get("sha256")
    name = _base_name(str(workload.get("name") or workload.get("set") or "workload"))
    return f"{name}, sha256 {digest}" if digest else name


def _base_name(path: str) -> str:
    """A hub id as it is; of a local path only its last part."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("~", ".")) else path


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def _split_constants(frame: pl.DataFrame) -> tuple[list[str], list[str]]:
    """Facts that hold for every row (for the caption), and the columns that are left to show."""
    facts = []
    hidden = {"low", "high"} if {"value", "low", "high"} <= set(frame.columns) else set()
    for name in ("metric", "level", "method", "run_id"):
        if name in frame.columns and frame.height and frame[name].n_unique() == 1 and frame.columns != [name]:
            hidden.add(name)
            value = frame[name][0]
            if name == "level":
                facts.append(f"{value * 100:g} % intervals")
            elif name == "method":
                facts.append(f"interval: {value}")
            elif name == "metric":
                facts.append(theme.column_title(value).replace("-", " "))
    if "level" in frame.columns:
        hidden.add("level")
    names = [
        name
        for name in frame.columns
        if name not in hidden and (frame[name].null_count() < frame.height or name == "value")
    ]
    if "low" in hidden and "value" in names:
        names.insert(names.index("value") + 1, "interval")
    return facts, names


def _head(name: str, frame: pl.DataFrame) -> str:
    number = name == "interval" or frame.schema[name].is_numeric()
    kind = ' class="specnb-num"' if number else ""
    return f'<th scope="col"{kind}>{_escape(theme.column_title(name))}</th>'


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name == "interval":
        return f'<td class="specnb-num">{_interval(row)}</td>'
    value = row[name]
    if value is None:
        # A reason explains what is undefined; its absence is no undefined value.
        return "<td></td>" if name == "reason" else '<td class="specnb-num">n/a</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, (int, float)):
        text = str(value) if name.endswith("_id") else _number(value)
        return f'<td class="specnb-num">{text}</td>'
    if name in ("metric", "split_class"):
        value = theme.column_title(value)
    return f"<td>{_escape(scrub(str(value)))}</td>"


def _interval(row: Mapping[str, Any]) -> str:
    """Both ends of an interval; an end outside the measured loads as "above 8" or "below 1"."""
    low, high = (
        _open_end(row, side) if row[name] is None else _number(row[name])
        for name, side in (("low", "lower"), ("high", "upper"))
    )
    if low is None or high is None:
        return "n/a"
    return low if low == high and row["low"] is None else f"[{low}, {high}]"


def _open_end(row: Mapping[str, Any], side: str) -> str | None:
    """Where the null end of a break-even interval lies; None if nothing says so."""
    reason = row.get("reason") or ""
    if "min_concurrency" not in row or row["method"] == NO_INTERVAL:
        return None
    if found := re.search(rf"{side} end is ((?:above|below) \d+)", reason):
        return found[1]
    if side == "upper" and reason.startswith("not reached in range"):
        return f"above {row['max_concurrency']}"
    return f"below {row['min_concurrency']}" if side == "lower" and reason.startswith("below 1 ") else None


def _estimate_cell(row: Mapping[str, Any] | None, *, not_speculating: bool = False) -> str:
    if row is None:
        return '<td class="specnb-num"></td>'
    if row["value"] is None and not_speculating:
        return '<td class="specnb-num">n/a<br><small>not speculating</small></td>'
    if row["value"] is None:
        return f'<td class="specnb-num">n/a<br><small>{_escape(row["reason"])}</small></td>'
    if row.get("method") in (cost.FACT, cost.PUBLISHED):
        value = row["value"]
        text = _number(int(value) if value == int(value) else value)
        claimed = "<br><small>published, not measured</small>" if row["method"] == cost.PUBLISHED else ""
        return f'<td class="specnb-num">{text}{claimed}</td>'
    interval = (
        f"[{_number(row['low'])}, {_number(row['high'])}]"
        if row["low"] is not None
        else f"no interval: {_escape(row['reason'])}"
    )
    small = f"<small>{interval}<br>n {_number(row['n'])}</small>"
    return f'<td class="specnb-num">{_number(row["value"])}<br>{small}</td>'


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _claim_html(claim: Mapping[str, Any]) -> str:
    """One claim (`Claim.as_dict`, or an arm of `verdict_json`) as a block."""
    tone = theme.verdict_tone(claim["verdict"], claim.get("claim", ""))
    facts = []
    estimate = claim["estimate"]
    if estimate is not None and estimate["value"] is not None:
        interval = (
            f"{estimate['level'] * 100:g} % interval "
            f"[{_number(estimate['low'])}, {_number(estimate['high'])}], {estimate['method']}"
            if estimate["low"] is not None
            else f"no interval: {estimate['reason']}"
        )
        facts.append(("estimate", f"{_number(estimate['value'])} ({interval})"))
        facts.append(("n", f"{estimate['n']:,} over {estimate['n_clusters']:,} prompts"))
    elif estimate is not None:
        facts.append(("estimate", f"n/a: {estimate['reason']}"))
    if claim["threshold"] is not None:
        facts.append(("threshold", _number(claim["threshold"])))
    body = "".join(f"<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>" for name, text in facts)
    reasons = "".join(f"<li>{_escape(scrub(reason))}</li>" for reason in claim["reasons"])
    return (
        f'<section class="specnb-box specnb-claim specnb-claim-{tone}">'
        f'<p><span class="specnb-badge specnb-{tone}">{_escape(claim["verdict"])}</span> '
        f"{_escape(scrub(claim['sentence']))}</p>"
        + (f"<dl>{body}</dl>" if body else "")
        + _folded(reasons, len(claim["reasons"]))
        + "</section>"
    )


def _folded(items: str, number: int) -> str:
    """A list, folded if it is long."""
    if not items:
        return ""
    if number <= 3:
        return f"<ul>{items}</ul>"
    return f"<details><summary>The {number} facts behind it</summary><ul>{items}</ul></details>"
