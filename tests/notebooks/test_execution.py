"""The notebooks through `report.py` on a simulated run: all finish and say their verdict."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from specnb import notebook, report, verdicts

NAMES = [path.stem for path in report.find_notebooks()]
CDN = re.compile(r"cdn\.jsdelivr|cdnjs|unpkg|googleapis", re.IGNORECASE)


def page(result, name):
    return (result.out_dir / f"{name}.html").read_text(encoding="utf-8")


def without_scripts(text):
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_every_notebook_runs_to_its_end(small_report):
    assert small_report.failed == ()
    assert [path.name for path in small_report.pages] == [*(f"{name}.html" for name in NAMES), "index.html"]
    files = {path.name for path in small_report.out_dir.iterdir()}
    assert files == {*(f"{name}.html" for name in NAMES), "index.html", "verdict.json"}


@pytest.mark.parametrize(
    ("name", "judge"),
    [
        ("02_suffix_decay", verdicts.suffix_decay_verdict),
        ("03_hit_rate_by_entropy", verdicts.entropy_verdict),
        ("04_speedup_by_concurrency", verdicts.speedup_verdict),
        ("05_output_equivalence", verdicts.equivalence_verdict),
        ("09_drafter_comparison", verdicts.drafter_verdict),
        ("00_verdict", verdicts.final_verdict),
    ],
)
def test_the_page_says_the_computed_verdict_first_and_last(small_report, small_run, name, judge):
    text = html.unescape(without_scripts(page(small_report, name)))
    index = html.unescape(page(small_report, "index"))
    claims = judge(small_run)
    assert len(claims) == 2
    for claim in claims:
        assert text.count(claim.sentence) >= 2
        assert f">{claim.verdict}</span>" in text
        assert text.index(claim.sentence) < text.index("Conditions of every number")
        assert claim.sentence in index


def test_verdict_json_is_that_of_the_run(small_report, small_run):
    text = (small_report.out_dir / "verdict.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == verdicts.verdict_json(small_run)


@pytest.mark.parametrize("name", [*NAMES, "index"])
def test_pages_are_whole_offline_and_small(small_report, small_run, name):
    text = page(small_report, name)
    assert len(text.encode()) < report.MAX_PAGE_BYTES
    assert CDN.search(text) is None
    assert text.startswith("<!DOCTYPE html>")
    assert '<html lang="en">' in text
    assert small_run.run_id in text
    assert "Conditions of every number" in text
    assert "SIMULATED" in text
    assert text.count("<h1>") == 1
    for other in NAMES:
        assert f'href="{other}.html"' in text
    assert "Traceback" not in without_scripts(text)
    assert str(Path(report.__file__).resolve().parents[1]) not in text
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp)/", without_scripts(text))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "00_verdict"])
def test_no_chart_is_empty(small_report, name):
    text = page(small_report, name)
    specs = [
        json.loads(found) for found in re.findall(r'application/json">(.*?)</script>', text, flags=re.DOTALL)
    ]
    assert len(specs) >= 3
    for spec in specs:
        assert "Nothing to draw" not in spec["description"]
        (rows,) = spec["datasets"].values()
        assert rows


def test_code_is_hidden(small_report):
    for name in NAMES:
        assert "notebook.open_run" not in page(small_report, name)


def test_sources_are_untouched(small_report):
    changed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import nbformat, sys\nfor p in sys.argv[1:]: assert all(not c.get('outputs') "
            "for c in nbformat.read(p, as_version=4).cells), p",
            *map(str, report.find_notebooks()),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert changed.returncode == 0, changed.stderr


def test_a_run_without_drafts_says_so_on_every_page(simulated_run, tmp_path):
    """The claims turn: nothing was drafted, so nothing is supported and no chart is silently blank."""
    run = simulated_run(prompts_per_cell=6, concurrency=(1,), max_tokens=16, no_drafts=True)
    result = report.build_report(run.path, notebooks=["02", "03", "05", "09"], out_dir=tmp_path / "out")
    assert result.failed == ()
    for name in ("02_suffix_decay", "03_hit_rate_by_entropy"):
        text = page(result, name)
        assert ">inconclusive</span>" in text
        assert "Nothing to draw" in text
    assert ">inconclusive</span>" in page(result, "09_drafter_comparison")
    assert ">vacuous</span>" in page(result, "05_output_equivalence")


def test_a_run_from_before_the_ranks_says_so(simulated_copy, tmp_path):
    path = simulated_copy(prompts_per_cell=6, concurrency=(1,), max_tokens=16)
    for file in path.glob("cells/*/positions.parquet"):
        pl.read_parquet(file).drop("in_answer", "answer_rank").write_parquet(file)
    result = report.build_report(path, notebooks=["02"], out_dir=tmp_path / "out")
    assert result.failed == ()
    text = html.unescape(page(result, "02_suffix_decay"))
    assert "No candidate is known: the run was recorded before the answer's ranks were" in text
    assert "The run can't tell what either part does" in text
    assert "Nothing to draw: no two arms differ in a mechanism alone" in text


GOOD = {
    "arms": {"draft": {}, "lookup": {"method": "ngram", "conditional_rates": (0.3,)}},
    "conditional_rates": (0.95, 0.85, 0.7, 0.55),
    "entropy_slope": 1.5,
    "step_token_s": 0.0001,
    "score": 0.9,
}
AGAINST = {
    "arms": {"draft": {}, "lookup": {"method": "ngram", "conditional_rates": (0.9,)}},
    "conditional_rates": (0.3, 0.5, 0.7, 0.9),
    "entropy_slope": -1.5,
    "speed_factor": 0.3,
    "diverge_rate": 0.3,
}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (GOOD, ("adopt", "supported", "supported", "supported", "equivalent", "supported")),
        (
            AGAINST,
            (
                *("do not adopt", "not supported", "not supported", "not supported", "not equivalent"),
                "not supported",
            ),
        ),
    ],
    ids=["built for the claims", "built against the claims"],
)
def test_every_notebook_s_verdict_follows_the_data(simulated_run, tmp_path, overrides, said):
    run = simulated_run(prompts_per_cell=30, concurrency=(1,), **overrides)
    result = report.build_report(run.path, out_dir=tmp_path / "out")
    assert result.failed == ()
    for name, verdict in zip(NAMES, said, strict=True):
        first = re.search(r'class="specnb-badge[^"]*">([^<]+)</span>', page(result, name))
        assert first is not None, name
        assert first[1] == verdict, name


def test_one_repeat_prints_single_run(simulated_run, tmp_path):
    run = simulated_run(prompts_per_cell=6, concurrency=(1,), max_tokens=16, repeats=1)
    result = report.build_report(run.path, notebooks=["04"], out_dir=tmp_path / "out")
    assert result.failed == ()
    text = page(result, "04_speedup_by_concurrency")
    assert "1; run-to-run interval n/a: single run" in text
    assert "single run" in without_scripts(text)


def test_papermill_alone_runs_a_notebook_from_any_directory(small_run, tmp_path):
    path = next(path for path in report.find_notebooks() if path.stem == "02_suffix_decay")
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(path),
        "out.ipynb",
        "-p",
        "run_dir",
        str(small_run.path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    node = report.read_notebook(tmp_path / "out.ipynb")
    assert any(notebook.END_MIME in output.get("data", {}) for output in node.cells[-1].outputs)
