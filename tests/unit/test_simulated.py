"""The simulated engine keeps the laws that other tests rely on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats
from simulated_runs import simulated_plan

from specnb.checks import check_run
from specnb.config import plan_cells, plan_from_dict
from specnb.engines.base import CellContext, PlannedRequest, make_engine
from specnb.engines.simulated import SimulatedEngine
from specnb.equivalence import pit_values
from specnb.errors import PlanError
from specnb.records import Run
from specnb.workloads import Prompt

Runs = Callable[..., Run]


def drafted(run: Run) -> pl.DataFrame:
    return run.steps.filter(pl.col("num_draft_tokens") > 0)


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 3), (0.8, 4), (0.9, 7)])
def test_a_step_averages_the_closed_form(simulated_run: Runs, alpha: float, k: int) -> None:
    run = simulated_run(
        alpha=alpha,
        num_speculative_tokens=k,
        prompt_concentration=None,
        prompts_per_cell=40,
        lengths=["long"],
    )
    steps = drafted(run)
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    values = 1 + steps["num_accepted_tokens"].to_numpy()
    standard_error = values.std() / np.sqrt(len(values))
    # 4 standard errors: a false alarm about once in 16,000 seeds.
    assert abs(values.mean() - expected) < 4 * standard_error
    assert steps.height > 2000


def test_conditional_rates_hold_at_each_position(simulated_run: Runs) -> None:
    rates = (0.9, 0.6, 0.3)
    run = simulated_run(
        conditional_rates=rates,
        num_speculative_tokens=3,
        prompt_concentration=None,
        prompts_per_cell=40,
        lengths=["long"],
    )
    positions = run.table("positions").filter("reached")
    for position, rate in enumerate(rates):
        hits = positions.filter(pl.col("position") == position)["accepted"]
        assert stats.binomtest(hits.sum(), len(hits), rate).pvalue > 1e-4


def test_accepted_counts_follow_a_censored_geometric_law(simulated_run: Runs) -> None:
    alpha, k = 0.7, 4
    run = simulated_run(alpha=alpha, prompt_concentration=None, prompts_per_cell=40, lengths=["long"])
    counts = np.bincount(drafted(run)["num_accepted_tokens"].to_numpy(), minlength=k + 1)
    law = np.array([(1 - alpha) * alpha**i for i in range(k)] + [alpha**k])
    assert stats.chisquare(counts, law * counts.sum()).pvalue > 1e-4


def test_prompt_effect_keeps_the_mean_and_adds_variance_between_prompts(simulated_run: Runs) -> None:
    def spread(concentration: float | None) -> float:
        run = simulated_run(
            alpha=0.6,
            num_speculative_tokens=1,
            prompt_concentration=concentration,
            prompts_per_cell=40,
            lengths=["long"],
        )
        return float(
            drafted(run)
            .group_by("prompt_id")
            .agg(pl.col("num_accepted_tokens").mean())["num_accepted_tokens"]
            .std()
        )

    assert spread(5.0) > 2 * spread(None)


def test_ragged_drafts_are_shorter_than_k(simulated_run: Runs) -> None:
    run = simulated_run(ragged=0.5)
    sizes = run.steps.filter(pl.col("arm") == "draft")["num_draft_tokens"]
    assert sizes.max() == 4
    assert 0 < (sizes < 4).mean() < 1


def test_law_of_tokens_agrees_with_itself(simulated_run: Runs) -> None:
    tokens = simulated_run(sampling=["sampled"]).table("tokens")
    mass = (tokens["cdf_high"] - tokens["cdf_low"]).to_numpy()
    # cdf_low near 1 leaves little precision for a tiny mass.
    assert np.allclose(np.log(mass[mass > 1e-6]), tokens["logprob"].to_numpy()[mass > 1e-6], atol=1e-6)
    # Geometric law, top token's mass p: margin -log(1 - p), entropy -log p - (1 - p) / p log(1 - p).
    p = -np.expm1(-tokens["top1_top2_margin"].to_numpy())
    entropy = -np.log(p) - (1 - p) / p * np.log1p(-p)
    assert np.allclose(entropy, tokens["entropy_nats"].to_numpy())


def test_sampled_tokens_are_uniform_under_their_law(simulated_run: Runs, rng: np.random.Generator) -> None:
    for arm in ("baseline", "draft"):
        values = pit_values(simulated_run(sampling=["sampled"]), arm=arm, rng=rng)["pit"].to_numpy()
        assert stats.kstest(values, "uniform").pvalue > 1e-3
    wrong = pit_values(simulated_run(sampling=["sampled"], wrong_law=0.5), arm="draft", rng=rng)[
        "pit"
    ].to_numpy()
    assert stats.kstest(wrong, "uniform").pvalue < 1e-6


def test_greedy_answers_of_the_arms_are_equal_unless_made_to_differ(simulated_run: Runs) -> None:
    def texts(run: Run, arm: str) -> list[str]:
        frame = run.requests.filter(pl.col("arm") == arm).sort(
            "entropy_tier", "concurrency", "repeat", "prompt_id"
        )
        return frame["output_text"].to_list()

    clean = simulated_run()
    assert texts(clean, "draft") == texts(clean, "baseline")
    broken = simulated_run(diverge_rate=0.3)
    assert texts(broken, "draft") != texts(broken, "baseline")
    assert broken.table("splits")["margin_nats"].unique().to_list() == [2.4]


def test_an_arm_may_override_settings_without_changing_the_text(simulated_run: Runs) -> None:
    run = simulated_run(arms={"good": {"alpha": 0.9}, "bad": {"alpha": 0.2}})
    rates = dict(drafted(run).group_by("arm").agg(pl.col("num_accepted_tokens").mean()).iter_rows())
    assert rates["good"] > rates["bad"] + 1
    assert run.table("splits").is_empty()


def test_time_grows_with_the_batch_and_the_clock_is_its_own(simulated_run: Runs) -> None:
    run = simulated_run(speed_noise=0.0)
    steps = run.table("engine_steps").filter(pl.col("arm") == "draft")
    assert np.allclose(steps["verify_s"], 0.020 + 0.0005 * steps["num_query_tokens"])
    assert steps["draft_s"].unique().to_list() == [0.004]
    started = run.requests.group_by("cell_id").agg(pl.col("sent_s").min())
    assert sorted(started["sent_s"]) == [1000.0 * number for number in range(len(run.cells))]
    assert run.manifest["engine"]["simulated"] is True
    assert run.manifest["engine"]["label"] == "simulated engine"
    assert "not time of any machine" in run.manifest["engine"]["clock"]


def test_concurrency_is_never_exceeded(simulated_run: Runs) -> None:
    run = simulated_run()
    for (concurrency,), cell in run.requests.group_by("concurrency"):
        steps = run.table("engine_steps").join(cell.select("cell_id").unique(), on="cell_id", how="semi")
        assert steps["batch_size"].max() == concurrency


def test_equal_plans_give_equal_tables(tmp_path: Path) -> None:
    plan = simulated_plan(tmp_path, sampling=["sampled"], prompts_per_cell=3)
    cell = plan_cells(plan)[1]
    requests = [
        PlannedRequest(request_id=f"r{i}", prompt=Prompt(id=f"p{i}", text=f"Say {i}."), max_tokens=40, seed=i)
        for i in range(3)
    ]
    done: list[int] = []
    context = CellContext(run_id="x", clock=lambda: 0.0, on_request_done=lambda: done.append(1))
    first = SimulatedEngine(plan).run_cell(cell, requests, context)
    second = make_engine(plan).run_cell(cell, requests, context)
    assert len(done) == 6
    for name, frame in first.items():
        assert frame.equals(second[name]), name


def test_failed_requests_keep_a_row_without_numbers(simulated_run: Runs) -> None:
    run = simulated_run(error_rate=0.4)
    failed = run.requests.filter(pl.col("status") == "error")
    assert 0 < failed.height < run.requests.filter(pl.col("arm") == "draft").height
    assert failed["num_output_tokens"].null_count() == failed.height
    assert set(failed["arm"]) == {"draft"}
    assert run.steps.join(failed, on="request_id", how="semi").is_empty()


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sampling": ["greedy", "sampled"], "ragged": 0.3},
        {"error_rate": 0.2},
        {"truncate": 0.5},
        {"entropy_slope": 1.0, "max_tokens": 8},
        {"max_tokens": 1},
    ],
)
def test_every_run_keeps_the_invariants_of_a_run_directory(
    simulated_run: Runs, overrides: dict[str, object]
) -> None:
    failed = [finding.name for finding in check_run(simulated_run(**overrides).path) if not finding.ok]
    # An answer of one token comes from the prefill: there is no step to speculate in.
    assert failed == (["I7 drafts in the judged requests"] if overrides == {"max_tokens": 1} else [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"alpa": 0.5}, "engine.args (baseline): alpa: Extra inputs are not permitted; known: alpha, "),
        ({"alpha": 1.5}, "engine.args (baseline): alpha: Input should be less than or equal to 1"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, args: dict[str, float], message: str) -> None:
    plan = simulated_plan(tmp_path)
    content = plan.model_dump(mode="json")
    content["engine"]["args"] = args
    with pytest.raises(PlanError, match=message.replace("(", r"\(").replace(")", r"\)")):
        SimulatedEngine(plan_from_dict(content))


def test_ranks_of_the_answer_follow_their_settings_at_places_reached_or_not(simulated_run: Runs) -> None:
    run = simulated_run(
        alpha=0.7,
        selector_lift=0.3,
        outside_candidates=0.5,
        prompt_concentration=None,
        prompts_per_cell=40,
        lengths=["long"],
    )
    answered = run.table("positions").filter("in_answer")
    for reached in (True, False):
        ranks = answered.filter(pl.col("reached") == reached)["answer_rank"]
        # 0.7 right, of which 0.3 lifted; 0.5 of the 0.3 wrong ones outside the candidates.
        assert stats.binomtest((ranks == 0).sum(), len(ranks), 0.7 * 0.7).pvalue > 1e-4
        assert stats.binomtest(ranks.null_count(), len(ranks), 0.3 * 0.5).pvalue > 1e-3
    lengths = dict(run.requests.select("request_id", "num_output_tokens").iter_rows())
    steps = run.steps.with_columns(
        (1 + pl.col("num_emitted_tokens").cum_sum() - pl.col("num_emitted_tokens"))
        .over("request_id", order_by="step")
        .alias("start")
    )
    placed = run.table("positions").join(
        steps.select("request_id", "step", "start"), on=["request_id", "step"], how="left"
    )
    length = pl.col("request_id").replace_strict(lengths, return_dtype=pl.Int64)
    inside = pl.col("start") + pl.col("position") < length
    assert placed.filter(inside != pl.col("in_answer")).is_empty()
    assert (
        placed.filter(~pl.col("in_answer"))["answer_rank"].null_count() == placed.filter(~inside).height > 0
    )
