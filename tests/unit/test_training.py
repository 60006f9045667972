"""Training without a model: plans, loops, overlap, optimisers, and the loss against speculators' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from specnb.errors import PlanError
from specnb.training import read_train_plan
from specnb.training.corpus import _ngrams, loop_start
from specnb.training.evaluate import acceptance, walk
from specnb.training.loop import _schedule
from specnb.training.openings import OPENINGS, draw_opening
from specnb.training.optimizers import BatchedMuon, build_optimizers
from specnb.training.plan import train_plan_from_dict
from specnb.training.target import check_taps, default_taps

PLANS = Path(__file__).parents[2] / "data" / "plans"


def content(**changes: Any) -> dict[str, Any]:
    return {
        "name": "toy",
        "target": {"model": "demo"},
        "training": {"steps": 3},
        "drafters": [{"name": "a"}],
    } | changes


# -- plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PLANS.glob("train-*.yaml")), ids=lambda path: path.name)
def test_the_plans_in_the_checkout_are_valid(path: Path) -> None:
    assert read_train_plan(path).name == path.stem


def test_the_ablations_share_one_budget_and_differ_in_convolution_and_selector_alone() -> None:
    drafters = read_train_plan(PLANS / "train-demo-ablations.yaml").drafters
    features = {(bool(d.conv_kernel_size), bool(d.selector_rank)) for d in drafters}
    assert features == {(True, True), (False, True), (True, False), (False, False)}
    same = {json.dumps(d.model_dump(exclude={"name", "conv_kernel_size", "selector_rank"})) for d in drafters}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainning": {}}, "FILE:1: unknown key 'trainning'; did you mean 'training'?"),
        ({"training": {}}, "FILE:1: training.seconds: give one of seconds and steps"),
        ({"training": {"steps": 3, "seconds": 4}}, "FILE:1: training.seconds: give one of seconds and steps"),
        ({"training": {"steps": "3"}}, "FILE:1: training.steps: must be a whole number, got '3'; write 3"),
        (
            {"corpus": {"greedy_shar": 0.5}},
            "FILE:1: unknown key 'greedy_shar' in corpus; did you mean 'greedy_share'?",
        ),
        ({"drafters": []}, "FILE:1: drafters: is empty; give at least one"),
        (
            {"drafters": [{"name": "a"}, {"name": "a"}]},
            "FILE:1: drafters[1].name: 'a' is given twice; keep one",
        ),
        (
            {"drafters": [{"name": "a", "target_layer_ids": [3, 1]}]},
            "FILE:1: drafters[0].target_layer_ids: [3, 1] must rise and not be negative; sort them",
        ),
        (
            {"drafters": [{"name": "a", "conv_kernel_size": 4, "block_size": 3}]},
            "FILE:1: drafters[0].conv_kernel_size: 4 is above block_size (3); lower it",
        ),
        (
            {"drafters": [{"name": "a", "target_layer_ids": [1]}, {"name": "b", "target_layer_ids": [2]}]},
            "FILE:1: drafters[1].target_layer_ids: drafters of one plan share the target's stored states, "
            "so their layers must be the same",
        ),
        (
            {"corpus": {"task_share": 0.8, "follow_share": 0.3}},
            "FILE:1: corpus.follow_share: with task_share it is above 1; lower one",
        ),
        ({"training": {"steps": 3, "optimizer": "sgd"}}, "training.optimizer: must be 'muon' or 'adamw'"),
    ],
)
def test_a_faulty_plan_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content(**changes), default_flow_style=True, width=10_000))
    with pytest.raises(PlanError) as caught:
        read_train_plan(path)
    assert message.replace("FILE", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_budget_and_the_machine_are_no_part_of_a_trainings_identity() -> None:
    plan = train_plan_from_dict(content())
    same = train_plan_from_dict(content(training={"seconds": 9}, device="cpu", price={"gpu_hour": 2.0}))
    assert same.sha256 == plan.sha256
    assert train_plan_from_dict(content(seed=1)).sha256 != plan.sha256
    assert train_plan_from_dict(content(drafters=[{"name": "a", "layers": 2}])).sha256 != plan.sha256


def test_tapped_layers() -> None:
    assert default_taps(30) == (1, 8, 14, 20, 27)
    assert default_taps(4) == (1,)
    assert default_taps(2) == (0,)
    check_taps((1, 28), 30)
    with pytest.raises(PlanError, match="29 is out of range; the target has 30 layers, of which 0 to 28"):
        check_taps((1, 29), 30)


# -- corpus --------------------------------------------------------------------------------------------


def test_a_looping_answer_is_cut_after_eight_repeated_grams() -> None:
    assert loop_start(list(range(200))) is None
    ids = [*range(50), *range(20, 50), *range(20, 50)]
    # Ids 20 to 27 stand again at 50 to 57; the ninth repeated 8-gram ends at index 65.
    assert loop_start(ids) == 66
    assert loop_start([1] * 7) is None


def test_overlap_is_counted_in_words_whatever_case_and_punctuation() -> None:
    text = "One two three, four five six seven eight nine ten eleven twelve thirteen."
    assert _ngrams(text) == _ngrams(text.upper().replace(",", ";"))
    assert len(_ngrams(text)) == 1
    assert _ngrams("One two three") == set()


def test_openings_cover_all_tasks_and_fill_their_blanks() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_opening(rng) for _ in range(2000)]
    assert {opening.task for opening in drawn} == set(OPENINGS)
    assert not any("{" in opening.text or "}" in opening.text for opening in drawn)
    assert len({opening.text for opening in drawn}) > 1000


# -- optimisers and schedule ---------------------------------------------------------------------------


def test_batched_muon_takes_the_steps_of_torchs_muon() -> None:
    torch.manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 12), (6, 6)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(value.detach().clone()) for value in ours]
    lr = torch.tensor(0.0)
    mine = BatchedMuon(ours, lr)
    reference = torch.optim.Muon(
        theirs, lr=1.0, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        rate = 0.02 * (step + 1)
        lr.fill_(rate)
        reference.param_groups[0]["lr"] = rate
        for left, right in zip(ours, theirs, strict=True):
            gradient = torch.randn(left.shape)
            left.grad, right.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        # The iteration runs in bfloat16, and a batched product may sum in another order.
        torch.testing.assert_close(left, right, atol=2e-3, rtol=0)


def test_muon_takes_matrices_and_leaves_codebooks_to_adamw() -> None:
    module = nn.Module()
    module.fc = nn.Linear(4, 3, bias=True)
    module.predecessor_codebook = nn.Parameter(torch.zeros(9, 2))
    muon, adamw = build_optimizers(module, "muon", torch.tensor(0.1), weight_decay=0.0)
    assert isinstance(muon, BatchedMuon)
    assert sum(len(group) for group in muon._groups) == 1
    assert len(adamw.param_groups[0]["params"]) == 2
    assert len(build_optimizers(module, "adamw", torch.tensor(0.1), weight_decay=0.0)) == 1


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    assert 0 < _schedule(0.0, 0.1) < 0.02
    assert _schedule(0.1, 0.1) == pytest.approx(1.0)
    assert _schedule(0.55, 0.1) == pytest.approx(0.5)
    assert _schedule(1.0, 0.1) == 0.0
    assert _schedule(0.0, 0.0) == 1.0


# -- acceptance from stored answers --------------------------------------------------------------------


def test_the_walk_strides_over_accepted_drafts_and_the_bonus_token() -> None:
    assert walk(np.array([2, 9, 9, 0, 1, 0])).tolist() == [2, 0, 1]
    assert walk(np.array([], dtype=np.int64)).tolist() == []


def test_acceptance_pools_steps_and_is_null_without_any() -> None:
    found = acceptance([np.array([2, 0]), np.array([1])], num_drafts=2)
    assert found == {
        "mean_acceptance_length": 2.0,
        "survival": [0.6667, 0.3333],
        "steps": 3,
        "answers": 2,
    }
    assert acceptance([], num_drafts=2)["mean_acceptance_length"] is None
