"""DFlash drafters in the in-process engine: equality, exact laws, slots, diagnostics, switches."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    ARCHITECTURES,
    TEXTS,
    dflash_plan,
    planned,
    run_arm,
    save_tiny_drafter,
    save_tiny_target,
    triple_law_p_value,
)
from transformers import AutoModelForCausalLM

from specnb import schema
from specnb.config import Speculative
from specnb.drafters import Draft, Features, TargetShape, check_drafter, make_drafter
from specnb.drafters.checkpoints import open_checkpoint
from specnb.drafters.dflash2 import DFlash2, Target, walk
from specnb.engines.transformers import TransformersEngine, _decoder_layers
from specnb.engines.verification import SamplingLaw, draw, judge
from specnb.errors import EngineError, PlanError, SpecnbError
from specnb.workloads import Prompt

PLAIN = {"architectures": ["DFlashDraftModel"]}


def naive_walk(
    scores: Any, temperature: float, uniforms: list[float] | None
) -> tuple[list[int], list[list[float]]]:
    """One request's walk in plain Python."""
    chosen, laws, before = [], [], 0
    for slot in range(len(scores)):
        own = [float(value) for value in scores[slot][before]]
        if uniforms is None:
            before = own.index(max(own))
        else:
            weights = [math.exp((value - max(own)) / temperature) for value in own]
            law = [weight / sum(weights) for weight in weights]
            mass, before = 0.0, len(law) - 1
            for place, prob in enumerate(law):
                mass += prob
                if uniforms[slot] < mass:
                    before = place
                    break
            laws.append(law)
        chosen.append(before)
    return chosen, laws


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0]), st.booleans())
def test_walk_equals_the_definition(seed: int, temperature: float, drawn: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=3, size=(3, 4, 5, 5)).astype(np.float32)
    scores[:, 0] = scores[:, 0, :1]
    uniforms = rng.random((3, 4)) if drawn else None
    places, laws = walk(scores, temperature=temperature, uniforms=uniforms)
    for row in range(3):
        chosen, expected = naive_walk(
            scores[row], temperature, None if uniforms is None else uniforms[row].tolist()
        )
        assert places[row].tolist() == chosen
        if laws is not None:
            assert laws[row] == pytest.approx(np.array(expected), abs=1e-12)


def test_walk_never_draws_an_impossible_candidate() -> None:
    scores = np.array([-4000.0, 0.0, -4000.0], dtype=np.float32) * np.ones((1, 1, 3, 1), dtype=np.float32)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        places, laws = walk(scores, temperature=1.0, uniforms=np.array([[uniform]]))
        assert places.tolist() == [[1]]
        assert laws is not None
        assert laws.tolist() == [[[0.0, 1.0, 0.0]]]


# -- greedy: the drafter never changes an answer ---------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3, sliding", "gemma3", "gpt2"])
def test_greedy_answers_equal_the_baseline(tmp_path: Path, name: str) -> None:
    """Whatever is drafted, with ragged rows and refilled slots."""
    folder = save_tiny_target(tmp_path / "t", ARCHITECTURES[name](), sharpness=4.0)
    drafter = save_tiny_drafter(tmp_path / "d", folder)
    engine = TransformersEngine(dflash_plan(folder, {"model": str(drafter)}))
    baseline, drafted = (
        run_arm(engine, arm, planned(TEXTS))["requests"]["output_token_ids"].to_list() for arm in (0, 1)
    )
    assert drafted == baseline


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of eight tokens, 4 layers."""
    config = ARCHITECTURES["llama"]()
    config.vocab_size = 8
    return save_tiny_target(tmp_path_factory.mktemp("small") / "target", config, sharpness=8.0)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as trained": ({}, {}),
    "shortened block": ({}, {"num_speculative_tokens": 3}),
    "one draft": ({}, {"num_speculative_tokens": 1}),
    "selector off": ({}, {"selector": False}),
    "without convolution": ({"conv_kernel_size": None}, {}),
    "without selector": ({"selector_rank": None}, {}),
    "plain": (PLAIN, {}),
    "narrow window": ({"sliding_window": 3}, {}),
    "stored in bfloat16": ({"dtype": "bfloat16"}, {}),
}


def test_every_variant_keeps_the_answers_and_fills_the_tables(tmp_path: Path, small: Path) -> None:
    arms = [
        {"model": str(save_tiny_drafter(tmp_path / name, small, seed=7, **changes)), **keys}
        for name, (changes, keys) in VARIANTS.items()
    ]
    engine = TransformersEngine(dflash_plan(small, *arms, ignore_eos=True))
    requests = planned(TEXTS[:4])
    baseline = run_arm(engine, 0, requests)["requests"]["output_token_ids"].to_list()
    accepted = 0
    for number, arm in enumerate(arms, 1):
        tables = run_arm(engine, number, requests)
        assert tables["requests"]["output_token_ids"].to_list() == baseline
        for name, frame in tables.items():
            assert frame.schema == schema.TABLES[name].polars_schema, name
        k = arm.get("num_speculative_tokens", 7)
        assert set(tables["steps"]["num_draft_tokens"]) == {k}
        assert tables["positions"]["draft_prob"].unique().to_list() == [1.0]
        accepted += tables["steps"]["num_accepted_tokens"].sum()
    assert accepted > 20


def test_low_precision_runs(tmp_path: Path, small: Path) -> None:
    """bfloat16 on both sides: equal answers are not promised, but drafts and laws are whole."""
    drafter = save_tiny_drafter(tmp_path / "d", small, seed=7, dtype="bfloat16")
    arm = {"model": str(drafter), "draft_sample_method": "probabilistic"}
    engine = TransformersEngine(dflash_plan(small, arm, dtype="bfloat16", temperature=0.7))
    assert engine.describe_arm(engine.plan.arms[1])["speculative"]["dtype"] == "bfloat16"
    tables = run_arm(engine, 1, planned(TEXTS))
    assert tables["positions"]["draft_prob"].is_between(0, 1).all()
    assert tables["steps"]["num_accepted_tokens"].sum() > 0


# -- sampled: the law is the target's --------------------------------------------------------------

NUM_ROWS, NUM_BATCHES, DEPTH = 100, 40, 3
LAW_ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "selector": ({}, {}),
    "selector, 4 of 8 tokens": ({"selector_top_k": 4}, {}),
    "independent": ({}, {"use_selector": False}),
    "one-hot": ({}, {"draft_sample_method": "greedy"}),
    "plain": (PLAIN, {}),
}


def made_up_logits() -> torch.Tensor:
    """Logits of a target of eight tokens after each prefix of up to two.  # shape: [9, 9, 8]; 8: none"""
    return torch.randn(9, 9, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 1.5


@torch.inference_mode()
def law_p_value(tmp_path: Path, small: Path, name: str, *, temperature: float = 0.8) -> float:
    """Chi-square p-value of three tokens from draft and verification against the enumerated law.

    All rows share one context; where a step gives less than three tokens, the rest is drawn plainly.
    """
    changes, keys = LAW_ARMS[name]
    keys = {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic", **keys}
    drafter = load(save_tiny_drafter(tmp_path / "d", small, seed=3, **changes), small, **keys)
    drafter.begin(num_slots=NUM_ROWS, capacity=16)
    generator = torch.Generator().manual_seed(9)
    states = tuple(torch.randn(1, 5, 32, generator=generator) for _ in drafter.taps)
    for slot in range(NUM_ROWS):
        drafter.admit(slot, [1, 2, 3, 4, 5, 6], Features(states=states, row=0))
    logits, law = made_up_logits(), SamplingLaw(temperature=temperature)
    rngs = [np.random.default_rng((17, row)) for row in range(NUM_ROWS)]
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_BATCHES):
        drafts = drafter.propose(range(NUM_ROWS), temperature=temperature, rngs=rngs)
        first, second = torch.tensor([draft.token_ids for draft in drafts]).T
        none = torch.full_like(first, 8)
        rows = torch.stack([logits[none, none], logits[first, none], logits[first, second]], 1)
        found = [verdict.tokens for verdict in judge(rows, drafts, law, rngs)]
        for tokens, rng in zip(found, rngs, strict=True):
            while len(tokens) < DEPTH:
                before = [*tokens, 8, 8]
                tokens += draw(law.probabilities(logits[before[0], before[1]][None]), [rng.random()])
            counts[tuple(tokens)] += 1
    # The made-up target is asked at the temperature of 0.8, whatever was sampled.
    laws = (logits / 0.8).softmax(-1)
    observed, expected = [0.0], [0.0]
    for sequence in itertools.product(range(8), repeat=3):
        one, two, three = sequence
        mass = float(laws[8, 8, one] * laws[one, 8, two] * laws[one, two, three]) * counts.total()
        if mass >= 5:
            observed.append(counts[sequence])
            expected.append(mass)
        else:
            observed[0] += counts[sequence]
            expected[0] += mass
    return float(scipy.stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("name", LAW_ARMS)
def test_sampled_tokens_follow_the_enumerated_law(tmp_path: Path, small: Path, name: str) -> None:
    """False alarm 1e-3 for a fresh seed; the seed is fixed."""
    assert law_p_value(tmp_path, small, name) > 1e-3


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("subtract_from", lambda self, law, position: None),
        ("prob_of", lambda self, position: 1.0),
        ("prob_of", lambda self, position: 1 / 8),
    ],
    ids=["draws from p after a rejection", "accepts with p", "accepts as if drawn evenly"],
)
def test_the_law_test_catches_a_wrong_rule(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Any
) -> None:
    monkeypatch.setattr(Draft, method, fault)
    assert law_p_value(tmp_path, small, "selector") < 1e-6


def test_the_law_test_catches_a_wrong_temperature(tmp_path: Path, small: Path) -> None:
    assert law_p_value(tmp_path, small, "selector", temperature=0.9) < 1e-6


def test_sampled_answers_of_the_engine_follow_the_exact_law(tmp_path: Path) -> None:
    """The whole way, prefill to answer. False alarm 1e-3 for a fresh seed; the seed is fixed."""
    folder = save_tiny_target(tmp_path / "target", vocab_size=8, sharpness=12.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", folder, seed=3)
    arm = {
        "model": str(drafter),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    plan = dflash_plan(folder, arm, concurrency=100, temperature=0.8, ignore_eos=True, max_tokens=3)
    engine = TransformersEngine(plan)
    text = "t1 t2 t3 t4 t5"
    tables = run_arm(engine, 1, planned([text] * 1200, max_tokens=3, arm="law"))
    answers = tables["requests"]["output_token_ids"].to_list()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = engine.encode(Prompt(id="x", text=text))
    assert tables["steps"]["num_accepted_tokens"].sum() > 100
    assert triple_law_p_value(model, prompt, answers, temperature=0.8) > 1e-3
    assert triple_law_p_value(model, prompt, answers, temperature=1.2) < 1e-6


def test_an_answer_does_not_depend_on_its_neighbours(tmp_path: Path, small: Path) -> None:
    """Alone or in a ragged batch whose slots are refilled and moved: the same sampled tokens and steps."""
    arm = {
        "model": str(save_tiny_drafter(tmp_path / "d", small, seed=7)),
        "draft_sample_method": "probabilistic",
    }
    engine = TransformersEngine(dflash_plan(small, arm, temperature=0.7))
    requests = planned(TEXTS, arm="x")
    together = run_arm(engine, 1, requests)
    for number, request in enumerate(requests):
        alone = run_arm(engine, 1, [request])
        assert (
            alone["requests"]["output_token_ids"][0].to_list()
            == together["requests"]["output_token_ids"][number].to_list()
        )
        columns = ["step", "position", "accepted", "answer_rank", "in_answer"]
        own = together["positions"].filter(request_id=request.request_id).select(columns)
        assert alone["positions"].select(columns).equals(own)


# -- slots -----------------------------------------------------------------------------------------


def load(folder: Path, target_folder: Path, **keys: Any) -> DFlash2:
    model: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    config = model.config
    target = Target(
        shape=TargetShape(
            hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_layers=config.num_hidden_layers
        ),
        embedding=model.get_input_embeddings().weight.detach(),
        head=model.get_output_embeddings(),
    )
    return DFlash2(open_checkpoint(folder), target, **{"num_speculative_tokens": 7, **keys})


def fill(drafter: DFlash2, *, slots: int) -> list[tuple[torch.Tensor, ...]]:
    """Requests of 5, 8, 11 ... tokens with random states."""
    generator = torch.Generator().manual_seed(9)
    drafter.begin(num_slots=max(slots, 4), capacity=64)
    states = []
    for slot in range(slots):
        own = tuple(torch.randn(1, 4 + 3 * slot, 32, generator=generator) for _ in drafter.taps)
        drafter.admit(slot, [slot] * (5 + 3 * slot), Features(states=own, row=0))
        states.append(own)
    return states


@torch.inference_mode()
def test_moving_a_slot_changes_nothing_and_reads_no_states(tmp_path: Path, small: Path) -> None:
    """Also with states observed but not stored yet, and into a slot that another request has used."""
    drafter = load(save_tiny_drafter(tmp_path / "d", small), small)
    rngs = [np.random.default_rng(0)] * 2
    generator = torch.Generator().manual_seed(1)
    more = tuple(torch.randn(3, 4, 32, generator=generator) for _ in drafter.taps)
    found = []
    for moved in (False, True):
        fill(drafter, slots=3)
        for slot in range(3):
            drafter.observe(slot, [slot, 1, 2], Features(states=more, row=slot))
        if moved:
            drafter.release(0)
            drafter.move(2, 0)
        slots = [0, 1] if moved else [2, 1]
        found.append(drafter.propose(slots, temperature=0.0, rngs=rngs))
        alone = [drafter.propose([slot], temperature=0.0, rngs=rngs[:1])[0] for slot in slots]
        assert [draft.token_ids for draft in alone] == [draft.token_ids for draft in found[-1]]
    for before, after in zip(*found, strict=True):
        assert before.token_ids == after.token_ids
        assert before.candidate_ids is not None
        assert after.candidate_ids is not None
        assert before.candidate_ids.tolist() == after.candidate_ids.tolist()


@torch.inference_mode()
def test_states_stored_late_or_at_once_draft_the_same(tmp_path: Path, small: Path) -> None:
    drafter = load(save_tiny_drafter(tmp_path / "d", small), small)
    generator = torch.Generator().manual_seed(2)
    parts = [tuple(torch.randn(1, 2, 32, generator=generator) for _ in drafter.taps) for _ in range(2)]
    rng = [np.random.default_rng(0)]
    drafts = []
    for between in (False, True):
        fill(drafter, slots=1)
        for part in parts:
            drafter.observe(0, [3, 4], Features(states=part, row=0))
            if between:
                drafter.propose([0], temperature=0.0, rngs=rng)
        drafts.append(drafter.propose([0], temperature=0.0, rngs=rng)[0].token_ids)
    assert drafts[0] == drafts[1]


def test_only_arms_that_tap_pay_for_it(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hook outside the cells of a tapping arm; prompt lookup and baseline never have one."""
    lookup = {"method": "ngram", "num_speculative_tokens": 4}
    engine = TransformersEngine(
        dflash_plan(small, lookup, {"model": str(save_tiny_drafter(tmp_path / "d", small))})
    )
    layers = _decoder_layers(engine._model, 4)
    seen: set[tuple[int, ...]] = set()
    forward = TransformersEngine.forward

    def spy(self: TransformersEngine, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.add(tuple(len(layer._forward_hooks) for layer in layers))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "forward", spy)
    for arm in (0, 1):
        run_arm(engine, arm, planned(TEXTS[:2]))
    assert seen == {(0, 0, 0, 0)}
    seen.clear()
    run_arm(engine, 2, planned(TEXTS[:2]))
    assert seen == {(1, 1, 1, 0)}
    assert not any(layer._forward_hooks for layer in layers)


# -- diagnostics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answer_ranks_are_what_the_finished_answer_says(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Every drafted place, reached or not, against candidates noted while they were proposed."""
    noted: list[tuple[tuple[int, ...], Draft]] = []
    propose = DFlash2.propose

    def spy(self: DFlash2, slots: Any, **keys: Any) -> list[Draft]:
        drafts = propose(self, slots, **keys)
        noted.extend((tuple(slots), draft) for draft in drafts)
        return drafts

    monkeypatch.setattr(DFlash2, "propose", spy)
    arm = {
        "model": str(save_tiny_drafter(tmp_path / "d", small, seed=7, selector_top_k=5)),
        "draft_sample_method": "probabilistic",
    }
    engine = TransformersEngine(dflash_plan(small, arm, temperature=temperature))
    counts = {True: 0, False: 0}
    for request in planned(TEXTS, arm="x"):
        noted.clear()
        tables = run_arm(engine, 1, [request])
        answer = tables["requests"]["output_token_ids"][0].to_list()
        starts = itertools.accumulate(tables["steps"]["num_emitted_tokens"].to_list(), initial=1)
        expected_rank, expected_in = [], []
        for (_, draft), start in zip(noted, starts, strict=False):
            assert draft.candidate_ids is not None
            for place in range(7):
                token = answer[start + place] if start + place < len(answer) else None
                row = draft.candidate_ids[place].tolist()
                expected_in.append(token is not None)
                expected_rank.append(row.index(token) if token in row else None)
        positions = tables["positions"]
        assert positions["in_answer"].to_list() == expected_in
        assert positions["answer_rank"].to_list() == expected_rank
        kept = positions.filter(pl.col("accepted") & pl.col("in_answer"))
        assert kept["answer_rank"].null_count() == 0
        if temperature == 0:
            both = positions.filter(pl.col("reached") & pl.col("in_answer"))
            assert both["answer_rank"].to_list() == both["target_rank"].to_list()
        for value in (True, False):
            counts[value] += sum(inside is value for inside in expected_in)
    assert min(counts.values()) > 10


def test_prompt_lookup_knows_the_answer_but_no_ranks(small: Path) -> None:
    engine = TransformersEngine(
        dflash_plan(small, {"method": "ngram", "num_speculative_tokens": 4}, ignore_eos=True)
    )
    positions = run_arm(engine, 1, planned(TEXTS))["positions"]
    assert positions["answer_rank"].null_count() == positions.height > 0
    assert positions.filter("accepted", pl.col("in_answer")).height > 0
    assert set(positions["in_answer"].unique()) == {True, False}


def test_candidates_come_best_first_and_the_independent_draft_takes_the_first(
    tmp_path: Path, small: Path
) -> None:
    folder = save_tiny_drafter(tmp_path / "d", small)
    drafts = []
    with torch.inference_mode():
        for selector in (True, False):
            drafter = load(folder, small, use_selector=selector)
            fill(drafter, slots=2)
            drafts.append(drafter.propose([0, 1], temperature=0.0, rngs=[np.random.default_rng(0)] * 2))
    for chosen, independent in zip(*drafts, strict=True):
        assert chosen.candidate_ids is not None
        assert independent.candidate_ids is not None
        assert chosen.candidate_ids.tolist() == independent.candidate_ids.tolist()
        assert list(independent.token_ids) == independent.candidate_ids[:, 0].tolist()
    assert any(chosen.token_ids != independent.token_ids for chosen, independent in zip(*drafts, strict=True))


# -- facts and refusals ----------------------------------------------------------------------------


def test_describe_states_what_drafts(tmp_path: Path, small: Path) -> None:
    folder = save_tiny_drafter(tmp_path / "d", small, dtype="bfloat16")
    (folder / "training.json").write_text('{"gpu_hours": 0.5, "curves": [1, 2]}')
    engine = TransformersEngine(
        dflash_plan(
            small,
            {"model": str(folder), "num_speculative_tokens": 5, "selector": False},
            {"model": str(folder), "draft_sample_method": "probabilistic"},
        )
    )
    first, second = (engine.describe_arm(arm)["speculative"] for arm in engine.plan.arms[1:])
    assert first.pop("sha256") == second["sha256"]
    parameters = open_checkpoint(folder).num_parameters
    assert first == {
        "method": "dflash",
        "label": "DFlash 2",
        "architecture": "DFlash2DraftModel",
        "num_speculative_tokens": 5,
        "block_size": 8,
        "num_layers": 2,
        "num_parameters": parameters,
        "weight_bytes": 4 * parameters,
        "stored_bytes": 2 * parameters,
        "kv_bytes_per_token": 2 * 2 * 2 * 8 * 4,
        "target_layer_ids": [0, 1, 2],
        "convolution": True,
        "selector": False,
        "selector_rank": 4,
        "num_candidates": 8,
        "draft_sample_method": "greedy",
        "proposal": "one-hot",
        "dtype": "float32",
        "stored_dtype": "bfloat16",
        "training": {"gpu_hours": 0.5},
    }
    assert second["selector"] is True
    assert second["proposal"] == "one-hot at temperature 0, else over 8 candidates"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"model": None}, "speculative.model: method dflash needs the folder or hub id of a drafter; add it"),
        ({"selector": "no"}, "speculative.selector: must be true or false"),
        (
            {"attention_backend": "FLASH_ATTN"},
            "speculative: method dflash takes no key 'attention_backend' in the in-process engine",
        ),
        (
            {"prompt_lookup_max": 3},
            "speculative: method dflash takes no key 'prompt_lookup_max' in the in-process engine",
        ),
        (
            {"rejection_sample_method": "synthetic"},
            "speculative: method dflash takes no key 'rejection_sample_method' in the in-process engine",
        ),
        (
            {"method": "eagle3"},
            "speculative.method: 'eagle3' is not available in the in-process engine (it has ngram, dflash); "
            "use engine.kind: vllm",
        ),
    ],
)
def test_unknown_keys_are_refused(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    speculative = Speculative.model_validate(
        {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 7, **keys}
    )
    shape = TargetShape(hidden_size=32, vocab_size=8, num_layers=2)
    for call in (lambda: check_drafter(speculative, shape), lambda: make_drafter(speculative)):
        with pytest.raises(PlanError) as refusal:
            call()
        assert str(refusal.value) == line


def test_an_unfit_drafter_is_refused_before_the_target_is_loaded(tmp_path: Path, small: Path) -> None:
    other = save_tiny_target(tmp_path / "other", vocab_size=8)
    drafter = save_tiny_drafter(tmp_path / "d", other, num_target_layers=9)
    (other / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(EngineError) as refusal:
        TransformersEngine(dflash_plan(other, {"model": str(drafter)}))
    assert str(refusal.value) == (
        f"arms.arm1.speculative.model: {drafter}: num_target_layers is 9 but the target has 2 layers; use a "
        "drafter trained for this target"
    )


def test_a_rotary_embedding_that_can_not_be_made_is_refused(tmp_path: Path, small: Path) -> None:
    folder = save_tiny_drafter(
        tmp_path / "d", small, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}
    )
    with pytest.raises(SpecnbError, match=r"config\.json: no rotary embedding can be made of it"):
        load(folder, small)
