"""The in-process engine on tiny random models: equality, exact law, logging, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import scipy.stats
import torch
import transformers
from tiny_models import ARCHITECTURES, SMALL, TEXTS, planned, run_arm, save_tiny_target, tiny_plan
from transformers import AutoModelForCausalLM

from specnb import schema
from specnb.drafters import Draft
from specnb.engines.transformers import TransformersEngine
from specnb.errors import EngineError, UnsupportedModelError
from specnb.workloads import Prompt


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_speculation_equals_baseline_and_generate(tmp_path: Path, name: str) -> None:
    """Ragged rows, replaced requests and rejected drafts must not change one token."""
    folder = save_tiny_target(tmp_path, ARCHITECTURES[name](), sharpness=4.0)
    engine = TransformersEngine(tiny_plan(folder))
    tables = [run_arm(engine, arm, planned(TEXTS, arm=str(arm))) for arm in (0, 1)]
    answers = [table["requests"]["output_token_ids"].to_list() for table in tables]
    assert answers[0] == answers[1]
    assert tables[1]["steps"]["num_accepted_tokens"].sum() > 0
    assert tables[1]["steps"]["num_draft_tokens"].sum() > tables[1]["steps"]["num_accepted_tokens"].sum()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, answer in zip(TEXTS, answers[0], strict=True):
        ids = torch.tensor([engine.encode(Prompt(id="x", text=text))])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        assert answer == expected


def test_sampled_answers_follow_the_exact_law_over_two_tokens(tmp_path: Path) -> None:
    """Two drafted tokens after the first, against every pair's probability by enumeration.

    False alarm 1e-3 for a fresh seed; the seed is fixed. The same data must reject the law of a
    slightly different temperature, or the test would prove nothing.
    """
    pair_counts = _pair_counts(tmp_path)
    assert pair_counts["accepted"] > 300
    assert _pair_p_value(pair_counts, temperature=0.8) > 1e-3
    assert _pair_p_value(pair_counts, temperature=0.9) < 1e-6


def test_the_exact_law_test_catches_a_wrong_acceptance_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing from the target's law after a rejection, not from the residual, favours drafted tokens."""
    monkeypatch.setattr(Draft, "subtract_from", lambda self, law, position: None)
    assert _pair_p_value(_pair_counts(tmp_path), temperature=0.8) < 1e-6


PROMPT = "t1 t2 t3 t4 t5 t6 t7 t1 t3 t5 t7 t2 t4 t6 t1"
RUNS = 4000


def _pair_counts(folder: Path) -> dict[str, Any]:
    """Counts of the second and third token after each first one, from the speculative arm."""
    save_tiny_target(folder, vocab_size=8, sharpness=12.0)
    plan = tiny_plan(folder, concurrency=100, temperature=0.8, ignore_eos=True, max_tokens=3)
    engine = TransformersEngine(plan)
    tables = run_arm(engine, 1, planned([PROMPT] * RUNS, max_tokens=3, arm="law"))
    counts: dict[tuple[int, ...], int] = {}
    for ids in tables["requests"]["output_token_ids"].to_list():
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {
        "counts": counts,
        "accepted": tables["steps"]["num_accepted_tokens"].sum(),
        "prompt": engine.encode(Prompt(id="x", text=PROMPT)),
        "model": model,
    }


@torch.inference_mode()
def _pair_p_value(data: dict[str, Any], *, temperature: float) -> float:
    """Chi-square over (first, second, third), given each first token as often as it was seen."""
    firsts: dict[int, int] = {}
    for (first, _, _), count in data["counts"].items():
        firsts[first] = firsts.get(first, 0) + count
    observed, expected = [0.0], [0.0]
    cells = 0
    for first, seen in firsts.items():
        prompt = [*data["prompt"], first]
        batch = torch.tensor([[*prompt, second] for second in range(8)])
        logits = data["model"](input_ids=batch).logits.double()
        law = (logits[0, -2] / temperature).softmax(-1).tolist()
        after = (logits[:, -1] / temperature).softmax(-1).tolist()
        for second, third in itertools.product(range(8), repeat=2):
            mass = seen * law[second] * after[second][third]
            count = data["counts"].get((first, second, third), 0)
            if mass >= 5:
                observed.append(count)
                expected.append(mass)
                cells += 1
            else:
                observed[0] += count
                expected[0] += mass
    # Each first token's total is given, so it costs one degree of freedom.
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    return float(scipy.stats.chi2.sf(statistic, cells + (expected[0] > 0) - len(firsts)))


@pytest.fixture
def engine(tmp_path: Path) -> TransformersEngine:
    return TransformersEngine(
        tiny_plan(save_tiny_target(tmp_path, vocab_size=16, sharpness=4.0), temperature=0.7)
    )


def test_tables_agree_with_each_other(engine: TransformersEngine) -> None:
    """Truncation identity, positions against steps, tokens against answers, chunks against times."""
    for arm in (0, 1):
        tables = run_arm(engine, arm, planned(TEXTS, arm=str(arm)))
        assert set(tables) == {"requests", "chunks", "steps", "engine_steps", "positions", "tokens"}
        for name, frame in tables.items():
            assert frame.schema == schema.TABLES[name].polars_schema, name
        requests, steps, tokens = tables["requests"], tables["steps"], tables["tokens"]
        emitted = steps.group_by("request_id").agg(pl.col("num_emitted_tokens").sum())
        joined = requests.join(emitted, on="request_id", how="left").fill_null(0)
        assert (joined["num_output_tokens"] == 1 + joined["num_emitted_tokens"]).all()
        by_request = tokens.group_by("request_id", maintain_order=True).agg("token_id", "index")
        joined = requests.join(by_request, on="request_id")
        assert joined["output_token_ids"].to_list() == joined["token_id"].to_list()
        assert all(index == list(range(len(index))) for index in joined["index"].to_list())
        accepted = tables["positions"].group_by("request_id", "step").agg(pl.col("accepted").sum(), pl.len())
        joined = steps.filter(pl.col("num_draft_tokens") > 0).join(
            accepted, on=["request_id", "step"], how="left"
        )
        assert (joined["accepted"] == joined["num_accepted_tokens"]).all()
        assert (joined["len"] == joined["num_draft_tokens"]).all()
        chunks = (
            tables["chunks"]
            .group_by("request_id")
            .agg(pl.col("num_tokens").sum(), pl.col("received_s").max())
        )
        joined = requests.join(chunks, on="request_id")
        assert (joined["num_tokens"] == joined["num_output_tokens"]).all()
        assert (joined["received_s"] == joined["last_token_s"]).all()
        batch = steps.group_by("engine_step").len().sort("engine_step")
        assert batch["len"].to_list() == tables["engine_steps"]["batch_size"].to_list()
        origins = set(tokens["origin"].unique())
        if arm == 0:
            assert origins == {"baseline"}
        else:
            assert {"baseline", "accepted", "recovered"} <= origins


def test_an_answer_does_not_depend_on_its_neighbours(engine: TransformersEngine) -> None:
    """Each request has its own random numbers: alone or in a batch, the same sampled tokens."""
    together = run_arm(engine, 1, planned(TEXTS, arm="x"))["requests"]
    for number, request in enumerate(planned(TEXTS, arm="x")):
        alone = run_arm(engine, 1, [request])["requests"]
        assert alone["output_token_ids"][0].to_list() == together["output_token_ids"][number].to_list()


def test_a_prompt_that_does_not_fit_keeps_its_row(engine: TransformersEngine) -> None:
    long = "t1 " * 500
    frame = run_arm(engine, 1, planned([TEXTS[0], long, TEXTS[1]]))["requests"]
    assert frame["status"].to_list() == ["ok", "error", "ok"]
    row = frame.row(1, named=True)
    assert row["error_kind"] == "prompt_too_long"
    assert row["error"] == "500 prompt tokens and 24 new ones exceed the model's 512 positions"
    assert row["sent_s"] is None


def test_full_blocks_earn_a_bonus_token(tmp_path: Path) -> None:
    """Greedy answers of a small model loop, so whole drafts are accepted: five tokens a step at K = 4."""
    engine = TransformersEngine(tiny_plan(save_tiny_target(tmp_path, sharpness=12.0), ignore_eos=True))
    tables = run_arm(engine, 1, planned(TEXTS, max_tokens=64))
    full = tables["steps"].filter(pl.col("num_accepted_tokens") == 4)
    assert full.height > 10
    assert full["num_emitted_tokens"].max() == 5
    assert tables["tokens"]["origin"].value_counts().filter(origin="bonus")[
        "count"
    ].item() >= full.height - len(TEXTS)


def test_limits_and_stop_tokens_cut_the_last_step(engine: TransformersEngine) -> None:
    tables = run_arm(engine, 1, planned(TEXTS, arm="cut"))
    for row in tables["requests"].iter_rows(named=True):
        ids = row["output_token_ids"]
        assert 0 not in ids[:-1]
        if row["finish_reason"] == "stop":
            assert ids[-1] == 0
        else:
            assert len(ids) == 24


@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "gemma3"])
def test_splits_are_judged_by_the_target(tmp_path: Path, name: str) -> None:
    """By a fresh engine, as after a resume; the prefix is longer than the sliding windows (6 tokens)."""
    folder = save_tiny_target(tmp_path, ARCHITECTURES[name](), sharpness=4.0)
    plan = tiny_plan(folder, ignore_eos=True)
    requests = run_arm(TransformersEngine(plan), 0, planned(TEXTS[:1]))["requests"]
    answer = requests["output_token_ids"][0].to_list()
    other = (answer[5] + 1) % 16
    split = {
        "run_id": "r", "sampling": "s", "concurrency": 3, "prompt_id": "p0", "arm": "lookup", "repeat": 0,
        "reference_arm": "baseline", "reference_repeat": 0, "index": 5, "token_id": other,
        "reference_token_id": answer[5], "margin_nats": None, "margin_fp64_nats": None,
    }  # fmt: skip
    prompt = Prompt(id="p0", text=TEXTS[0])
    engine = TransformersEngine(plan)
    frame = pl.DataFrame([split], schema=schema.SPLITS.polars_schema)
    judged = engine.judge_splits(frame, requests, {"p0": prompt}).row(0, named=True)
    ids = torch.tensor([engine.encode(prompt) + answer[:5]])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(input_ids=ids).logits[
            0, -1
        ]
    expected = float(logits[answer[5]] - logits[other])
    assert expected > 0
    assert judged["margin_fp64_nats"] == pytest.approx(expected, abs=1e-6)
    assert judged["margin_nats"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            transformers.Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 4}, head_dim=16),
            "linear_attention",
        ),
        (transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    ],
    ids=["hybrid", "recurrent"],
)
def test_models_without_rollback_are_refused_before_their_weights_are_read(
    tmp_path: Path, config: Any, found: str
) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError) as refusal:
        TransformersEngine(tiny_plan(tmp_path))
    assert str(refusal.value) == (
        f"target.model: {tmp_path} has layers whose state can't be rolled back ({found}); "
        "the in-process engine needs dense attention: use engine.kind: vllm"
    )


def test_missing_pickled_and_broken_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such model directory"):
        TransformersEngine(tiny_plan(tmp_path / "nowhere"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        EngineError, match=r"holds no \.safetensors file; convert the weights \(pickle is refused\)"
    ):
        TransformersEngine(tiny_plan(tmp_path))
    broken = save_tiny_target(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(EngineError, match="can't be loaded"):
        TransformersEngine(tiny_plan(broken))


def test_chat_messages_need_a_template(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path)
    (folder / "chat_template.jinja").unlink()
    engine = TransformersEngine(tiny_plan(folder))
    from specnb.workloads import Message

    prompt = Prompt(id="x", messages=(Message(role="user", content="t1"),))
    with pytest.raises(EngineError, match="the tokenizer has no chat template"):
        engine.encode(prompt)
