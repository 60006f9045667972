"""What notebooks display: conditions, verdicts, tables; escaped, without home paths, from any directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from specnb import candidates, charts, cost, latency, notebook
from specnb.errors import RecordError
from specnb.stats import Estimate
from specnb.verdicts import Claim

SMALL = {"prompts_per_cell": 6, "concurrency": (1, 2), "sampling": ("greedy", "sampled"), "max_tokens": 32}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def run(simulated_run):
    return simulated_run(**SMALL)


def edited(run, tmp_path: Path, **manifest):
    """A copy of a run with other manifest entries."""
    target = tmp_path / "edited"
    shutil.copytree(run.path, target)
    content = {**run.manifest, **manifest}
    (target / "manifest.json").write_text(json.dumps(content))
    return notebook.open_run(str(target))


def claim(**changes):
    estimate = Estimate(value=1.5, low=1.2, high=1.8, level=0.95, n=40, n_clusters=20, method="bca")
    fields = {
        "arm": "draft",
        "question": "Is it faster?",
        "verdict": "supported",
        "sentence": "draft: faster.",
        "estimate": estimate,
        "threshold": 1.05,
        "n": 40,
        "chart": "speedup",
        "reasons": ("greedy at concurrency 1: 1.50",),
    }
    return Claim(**{**fields, **changes})


def rows(run):
    return dict(notebook.condition_rows(run))


# Opening


def test_a_run_is_found_from_any_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    assert notebook.open_run(run.path.name).run_id == run.run_id
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook, "_repository", lambda: run.path.parent)
    assert notebook.open_run(run.path.name).run_id == run.run_id


def test_a_missing_run_is_one_line_that_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=r"^nowhere/run: no such run directory, neither in the current"):
        notebook.open_run("nowhere/run")


def test_the_generator_is_the_same_for_the_same_run(run):
    assert notebook.generator(run).random() == notebook.generator(run).random()


# Conditions (E20)


def test_e20_conditions_hold_everything_a_number_depends_on(run):
    found = rows(run)
    assert found["prompts, requests"] == "12 distinct prompts, 192 requests"
    assert found["repeats"] == "2"
    assert found["concurrency"] == "1, 2 (closed loop)"
    assert found["drafter draft"] == "method draft_model, K = 4"
    assert found["failures"] == "0 of 192 requests"
    assert found["differences between arms"] == "none beside speculation"
    assert found["cached prompt tokens"] == "baseline 0.0%, draft 0.0%"
    assert found["acceptance length"] == "counts the bonus token; pooled over steps that carried a draft"
    assert "prompts resampled as clusters" in found["intervals"]
    assert (
        found["sampling"] == "greedy (greedy, at most 32 tokens); sampled (temperature 1, at most 32 tokens)"
    )
    assert found["dataset"].startswith(
        "workload.jsonl; entropy tiers low, high; output lengths short, medium"
    )
    assert found["target"] == "simulated target, float32"
    assert "hardware" in found
    assert "engine" in found


def test_e20_a_single_run_has_no_run_to_run_interval(simulated_run):
    run = simulated_run(**{**SMALL, "repeats": 1})
    assert rows(run)["repeats"] == "1; run-to-run interval n/a: single run"
    assert any(
        limit.startswith("One repeat: run-to-run variation is unknown") for limit in notebook.limits(run)
    )


def test_failures_are_counted_by_arm_and_status(simulated_run, monkeypatch):
    run = simulated_run(**SMALL)
    broken = run.requests.with_columns(
        pl.when(pl.int_range(pl.len()) < 3).then(pl.lit("timeout")).otherwise("status").alias("status")
    )
    assert notebook._failures(broken) == "3 of 192 requests (baseline 3 timeout)"


def test_banners_for_simulated_modelled_and_unfinished_runs(run, tmp_path):
    assert [text.split(":")[0] for text in notebook.banners(run)] == ["SIMULATED"]
    assert notebook.watermark(run) == "SIMULATED"
    other = edited(run, tmp_path, modelled=True, status="interrupted", engine={"simulated": False})
    found = " ".join(notebook.banners(other))
    assert "MODELLED" in found
    assert "UNFINISHED RUN (interrupted): 32 of 32 cells are in this report." in found


def test_differences_between_arms_make_a_banner(run, tmp_path):
    plan = json.loads(json.dumps(run.manifest["plan"]))
    plan["allow_differences"] = True
    plan["arms"][1]["args"] = {"max_num_seqs": 64}
    other = edited(run, tmp_path, plan=plan)
    assert notebook.arm_differences(other) == ["draft: max_num_seqs=64, baseline None"]
    assert notebook.banners(other)[-1].startswith(
        "ARMS DIFFER IN MORE THAN SPECULATION: draft: max_num_seqs=64"
    )


def test_different_prompt_token_counts_are_found(run, tmp_path):
    target = tmp_path / "tokens"
    shutil.copytree(run.path, target)
    for file in target.glob("cells/draft.*/requests.parquet"):
        frame = pl.read_parquet(file)
        frame.with_columns(pl.col("num_prompt_tokens") + 16).write_parquet(file)
    found = notebook.arm_differences(notebook.open_run(str(target)))
    assert found == ["prompt token counts differ on 12 of 12 prompts"]


# Displays


def test_all_text_of_a_run_is_escaped(run):
    frame = pl.DataFrame({"prompt_id": [EVIL], "value": [1.0]})
    shown = [
        notebook.table(frame, caption=EVIL).html,
        notebook.claims([claim(sentence=f"{EVIL}.", reasons=(EVIL,), verdict=EVIL)]).html,
    ]
    for text in shown:
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text


def test_home_and_repository_paths_are_cut():
    assert notebook.scrub(f"{Path.home()}/x") == "~/x"
    assert notebook.scrub(f"{notebook._repository()}/notebooks/02.ipynb") == "./notebooks/02.ipynb"


def test_a_local_model_path_shows_its_last_part_only():
    assert notebook._base_name("/data/private/someone/model-x") == "model-x"
    assert notebook._base_name("org/model") == "org/model"


def test_views_have_html_text_and_mimebundle(run):
    view = notebook.provenance(run)
    bundle = view._repr_mimebundle_()
    assert bundle[notebook.END_MIME] == {"run_id": run.run_id}
    assert run.run_id in bundle["text/plain"]
    assert run.manifest["plan_sha256"] in view._repr_html_()
    assert "Nothing here was measured on a real model pair." in view.html


def test_a_chart_view_carries_a_spec_for_jupyterlab_and_a_picture_for_the_rest():
    chart = charts.survival_by_position_chart(
        pl.DataFrame({"arm": ["a"], "position": [0], "value": [0.5], "low": [0.4], "high": [0.6], "n": [9]})
    )
    bundle = notebook.ChartView(chart=chart)._repr_mimebundle_()
    spec = bundle["application/vnd.vegalite.v5+json"]
    assert spec["$schema"].endswith("vega-lite/v5.json")
    assert spec["usermeta"]["embedOptions"]["actions"]["editor"] is False
    assert bundle["image/svg+xml"].startswith("<svg")
    assert bundle["text/plain"] == "Chart('Survival by draft position.')"
    assert "text/html" not in bundle


def test_a_table_joins_intervals_and_moves_constants_to_the_caption():
    frame = pl.DataFrame(
        {
            "arm": ["a", "b"],
            "metric": ["miss_rate"] * 2,
            "value": [0.25, None],
            "low": [0.2, None],
            "high": [0.3, None],
            "level": [0.95] * 2,
            "n": [1200, 0],
            "method": ["bca"] * 2,
            "reason": [None, "no drafts"],
        }
    )
    text = notebook.table(frame, caption="rates").html
    assert "<caption>rates; miss rate; 95 % intervals; interval: bca</caption>" in text
    assert '<td class="specnb-num">[0.2, 0.3]</td>' in text
    assert '<td class="specnb-num">1,200</td>' in text
    assert text.count("n/a") == 2
    assert "no drafts" in text
    assert "no rows" in notebook.table(frame.clear(), caption="rates").html


@pytest.mark.parametrize(
    ("curve", "shown"),
    [
        ([(1, 1.5, 1.2, 2.0), (4, 0.5, 0.2, 1.1)], "[1.32, above 4]"),
        ([(1, 1.2, 0.9, 1.5), (4, 0.8, 0.7, 0.5)], "[below 1, 2]"),
        ([(1, 2.0, 1.5, 2.1), (8, 1.5, 0.5, 1.6)], "[2.828, above 8]"),
        ([(1, 2.0, 1.9, 2.1), (8, 1.5, 1.4, 1.6)], "above 8"),
        ([(1, 0.9, 0.8, 1.5), (4, 0.5, 0.2, 0.5)], "[below 1, 2]"),
        ([(1, 0.9, 0.8, 0.95), (4, 0.5, 0.2, 0.7)], "below 1"),
        ([(1, 2.0, None, None), (8, 1.5, 1.4, 1.6)], "n/a"),
        ([(1, 2.0, 1.9, 2.1), (8, 0.5, 0.4, 0.6)], "[3.482, 4.595]"),
    ],
)
def test_an_open_end_of_the_break_even_says_where_it_lies(curve, shown):
    rows = [
        {
            "arm": "draft",
            "concurrency": concurrency,
            "metric": "throughput_speedup",
            "value": value,
            "low": low,
            "high": high,
            "level": 0.95,
            "n": 40,
            "n_clusters": 20,
            "method": "percentile",
            "reason": None,
        }
        for concurrency, value, low, high in curve
    ]
    found = latency.break_even_concurrency(pl.DataFrame(rows, infer_schema_length=None))
    assert f'<td class="specnb-num">{shown}</td>' in notebook.table(found, caption="break-even").html


def test_every_null_but_a_reason_is_shown():
    frame = pl.DataFrame(
        {"split": ["a", None], "p_value": [0.5, None], "reason": ["why", None]},
        schema={"split": pl.String, "p_value": pl.Float64, "reason": pl.String},
    )
    html = notebook.table(frame, caption="nulls").html
    assert html.count("n/a") == 2
    assert html.count("<td></td>") == 1


def test_a_long_table_says_how_many_rows_it_leaves_out():
    frame = pl.DataFrame({"x": list(range(100))})
    text = notebook.table(frame, caption="many", max_rows=10).html
    assert text.count("<tr>") == 11
    assert "100 rows, the first 10 shown" in text


def test_a_metric_table_has_one_column_a_metric():
    frame = pl.DataFrame(
        {
            "arm": ["a", "a"],
            "metric": ["miss_rate", "full_block_hit_rate"],
            "value": [0.25, None],
            "low": [0.2, None],
            "high": [0.3, None],
            "level": [0.95] * 2,
            "n": [12, 0],
            "reason": [None, "no drafts"],
        }
    )
    text = notebook.metric_table(frame, caption="acceptance").html
    assert text.count("<tr>") == 2
    assert "0.25<br><small>[0.2, 0.3]<br>n 12</small>" in text
    assert "n/a<br><small>no drafts</small>" in text


def test_claims_show_estimate_interval_n_and_threshold():
    view = notebook.claims([claim(), claim(verdict="not supported")])
    assert "1.5 (95 % interval [1.2, 1.8], bca)" in view.html
    assert "40 over 20 prompts" in view.html
    assert "1.05" in view.html
    assert "specnb-claim-good" in view.html
    assert "specnb-claim-bad" in view.html
    assert [found["verdict"] for found in view.data[notebook.CLAIMS_MIME]["claims"]] == [
        "supported",
        "not supported",
    ]
    assert "no arm that speculates" in notebook.claims([]).html


def test_the_final_view_carries_the_whole_verdict():
    verdict = {
        "arms": [
            {
                "arm": "draft",
                "verdict": "adopt",
                "sentence": "draft: adopt it.",
                "reasons": ["because"],
                "claims": [claim().as_dict()],
                "not_measured": ["memory"],
            }
        ]
    }
    view = notebook.final(verdict)
    assert view.data[notebook.VERDICT_MIME] == verdict
    assert "adopt" in view.html
    assert notebook.overview_frame(verdict).rows() == [
        ("draft", "verdict", "adopt"),
        ("draft", "speedup", "supported"),
    ]
    assert '<a href="04_speedup_by_concurrency.html">' in notebook.claim_table(verdict).html
    assert notebook.not_measured(verdict).html == "<ul><li>draft: memory</li></ul>"


def test_every_arm_stacks_what_a_function_says_of_each(simulated_run):
    run = simulated_run(**{**SMALL, "arms": {"one": {}, "two": {}}})

    def estimate(run, *, arm, offset=0):
        return pl.DataFrame({"length": [len(arm) + offset]})

    assert notebook.every_arm(estimate, run, offset=1).rows() == [(4, "one"), (4, "two")]
    with_control = notebook.every_arm(estimate, run, baseline=True)
    assert with_control["arm"].to_list() == ["baseline", "one", "two"]


# Drafters and their parts


@pytest.fixture(scope="module")
def parts(simulated_run):
    arms = {
        "full": {"selector": True, "convolution": True, "alpha": 0.8, "label": EVIL, "num_parameters": 1000},
        "flat": {"selector": True, "convolution": False, "alpha": 0.5},
        "lookup": {"method": "ngram", "alpha": 0.2},
    }
    return simulated_run(arms=arms, prompts_per_cell=12, concurrency=(1,), repeats=1)


def test_the_table_of_drafters_has_a_column_each_and_lists_what_is_unknown(parts):
    view = notebook.drafters(cost.drafter_table(parts))
    assert [f">{name}</th>" in view.html for name in ("full", "flat", "lookup")] == [True] * 3
    assert "<td>yes</td><td>no</td>" in view.html
    assert EVIL not in view.html
    assert "&lt;script&gt;" in view.html
    assert "flat: not known: num_parameters, weight_bytes, kv_bytes_per_token: the run" in view.text
    assert "server" not in view.html.split("<tbody>")[1].split("</tbody>")[0]
    assert (
        notebook.drafters(cost.drafter_table(parts).clear()).text == "The run holds no arm that speculates."
    )


def test_facts_stand_without_an_interval(parts):
    frame = pl.DataFrame(
        [
            {
                "arm": "full",
                "metric": "num_parameters",
                "value": 19e6,
                "n": 0,
                "level": 0.95,
                "method": cost.FACT,
            }
        ]
    ).with_columns(pl.lit(None, pl.Float64).alias("low"), pl.lit(None, pl.String).alias("reason"))
    page = notebook.metric_table(frame, caption="facts").html
    assert '<td class="specnb-num">19,000,000</td>' in page
    claimed = frame.with_columns(pl.lit(cost.PUBLISHED).alias("method"))
    page = notebook.metric_table(claimed, caption="claims").html
    assert "19,000,000<br><small>published, not measured</small>" in page


def test_which_arm_keeps_candidates_is_said(parts, run):
    text = notebook.candidates_known(parts).text
    assert "lookup: the drafter keeps no candidates" in text
    assert "places lie in the answer" in text
    assert "No candidate is known" not in text


def test_a_run_without_candidates_says_why(simulated_run):
    lone = simulated_run(
        arms={"lookup": {"method": "ngram"}}, prompts_per_cell=6, concurrency=(1,), max_tokens=16
    )
    assert notebook.candidates_known(lone).text == "No candidate is known: no arm's drafter keeps candidates."


def test_mechanisms_are_sentences_or_a_reason(parts, run, rng):
    def view(of):
        pairs = candidates.mechanism_pairs(candidates.arm_mechanisms(of))
        return notebook.mechanisms(of, candidates.mechanism_gains(of.labelled("steps"), pairs, rng=rng))

    assert "convolution (full against flat, greedy): the acceptance length is longer" in view(parts).text
    assert "tells of no arm whether it has a path selector or a convolution" in view(run).text


def test_published_figures_are_marked_as_claims():
    view = notebook.released_pair()
    assert view.text.startswith("Published claims, not measured by specnb")
    assert "published claims, not measured" in view.html
    assert cost.RELEASED_SOURCE in view.html
