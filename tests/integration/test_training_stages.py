"""Training a toy drafter through all stages, and its parts against transformers, speculators and dflash."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig

from specnb.drafters.checkpoints import open_checkpoint
from specnb.errors import PlanError
from specnb.training import TrainPlan, train
from specnb.training.corpus import KINDS, ChatFormat, build_corpus, rows_from
from specnb.training.decode import generate
from specnb.training.evaluate import matched_lengths, walk
from specnb.training.loop import CHECKPOINT, DrafterTraining, TeacherParts, _readings, _tally, read_metrics
from specnb.training.model import Batches, TrainedDrafter, published_config, speculators_parts
from specnb.training.plan import train_plan_from_dict
from specnb.training.target import TargetModel, load_target, teacher_states

VOCABULARY = 64


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return save_tiny_target(tmp_path_factory.mktemp("models") / "target", config, sharpness=6)


def toy_plan(target: Path, **changes: Any) -> TrainPlan:
    drafter = {"name": "dflash2", "layers": 2, "conv_group_size": 8, "selector_rank": 4, "mask_token_id": 63}
    return train_plan_from_dict(
        {
            "name": "toy",
            "target": {"model": str(target), "dtype": "float32"},
            "device": "cpu",
            "corpus": {
                "seconds": 60,
                "max_rows": 40,
                "rows_per_batch": 20,
                "prompt_tokens": 12,
                "answer_tokens": 24,
                "max_length": 96,
                "held_out": 8,
                "cut_loops": False,
            },
            "evaluation": {"max_prompts": 4, "max_tokens": 12},
            "training": {"steps": 12, "rows": 4, "anchors": 3, "log_steps": 3, "checkpoint_seconds": 1e-9},
            "drafters": [drafter],
        }
        | changes
    )


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return load_target(toy_plan(target_folder))


@pytest.fixture(scope="module")
def trained(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(toy_plan(target_folder), tmp_path_factory.mktemp("trained") / "out")


# -- decoding and hidden states ------------------------------------------------------------------------


def test_a_batch_without_any_turn_left_has_no_texts(target: TargetModel) -> None:
    chat = ChatFormat(target)
    assert chat.texts([]) == chat.before_answers([]) == []
    assert len(chat.texts([[5, 6], []])) == 2


def test_greedy_answers_are_those_of_transformers_generate(target: TargetModel, target_folder: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, size=size).tolist() for size in (3, 17, 1, 9, 30, 5, 5, 12)]
    answers = generate(target.model, prompts, [0.0] * 8, max_new_tokens=40, stop_ids=[0, 7, 9, 12])
    model: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=[0, 7, 9, 12],
            pad_token_id=0,
        )
        assert answer == plain[0, len(prompt) :].tolist()
    assert len({len(answer) for answer in answers}) > 1


def test_sampled_answers_follow_the_targets_law(target: TargetModel) -> None:
    prompt = [5, 9, 11]
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt])).logits[0, -1]
    law = torch.softmax(logits / 0.8, dim=0)
    num = 4000
    answers = generate(
        target.model, [prompt] * num, [0.8] * num, max_new_tokens=1, stop_ids=target.stop_ids, seed=3
    )
    counts = np.bincount([answer[0] for answer in answers], minlength=VOCABULARY)
    # Five standard errors of each count, and one for rounding: a false alarm in about 30 000 runs.
    spread = 5 * np.sqrt(num * law.numpy() * (1 - law.numpy())) + 1
    assert (np.abs(counts - num * law.numpy()) < spread).all()


def test_stored_states_are_those_of_a_plain_forward(target: TargetModel) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, VOCABULARY, size=size) for size in (5, 12, 8)]
    stored = teacher_states(target, (0, 2), rows, [2, 2, 2])
    with torch.no_grad():
        for number, row in enumerate(rows):
            out = target.model(torch.from_numpy(row)[None], output_hidden_states=True)
            held = stored.states[stored.starts[number] : stored.starts[number + 1]]
            torch.testing.assert_close(held[:, 0], out.hidden_states[1][0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(held[:, 1], out.hidden_states[3][0], atol=1e-5, rtol=1e-4)
            logits = target.normed(held[:, -1]) @ target.head.T
            torch.testing.assert_close(logits, out.logits[0], atol=1e-4, rtol=1e-4)


def test_the_chat_formats_borders_are_the_templates(target: TargetModel) -> None:
    chat = ChatFormat(target)
    history = [{"role": "user", "content": "t3 t4"}, {"role": "assistant", "content": "t5"}]
    assert chat.before_users([(history, "t6 "), ([], "")]) == [[3, 4, 5, 6], [0]]
    assert chat.before_answers([[*history, {"role": "user", "content": "t6 t7"}]]) == [[3, 4, 5, 6, 7]]


# -- the loss against speculators ----------------------------------------------------------------------


def spoiled(drafter: TrainedDrafter) -> TrainedDrafter:
    """Convolution and selector far from neutral, so that an error in them shows."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "conv" in name or "selector" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def test_loss_gradient_and_readings_equal_speculators(
    target: TargetModel, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculators_parts()
    from speculators.models.dflash import core
    from speculators.models.dflash2 import DFlash2DraftModel
    from speculators.train.cli import create_transformer_layer_config

    plan = toy_plan(target_folder).drafters[0]
    taps = (0, 1)
    ours = spoiled(TrainedDrafter(plan, published_config(plan, target, taps)))
    layer_config = create_transformer_layer_config(str(target_folder), 2, "qwen3", "silu", 2048, [])
    theirs = DFlash2DraftModel.from_training_args(
        layer_config,
        verifier_name_or_path=str(target_folder),
        target_layer_ids=[tap + 1 for tap in taps],
        draft_attn_impl="eager",
        block_size=8,
        draft_vocab_size=VOCABULARY,
        mask_token_id=63,
        selector_rank=4,
        conv_group_size=8,
    )
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert all("embed" in name or "head" in name or "verifier" in name for name in missing)

    row = np.random.default_rng(2).integers(1, VOCABULARY, size=40)
    stored = teacher_states(target, taps, [row], [10])
    # Anchors early, late (its block ends with the row) and in between.
    anchors = torch.tensor([10, 18, 27, 36])
    scored = ours.score(
        target,
        Batches(stored, context=64, block_size=8).drawn(torch.tensor([0]), anchors[None]),
        gamma=4.0,
        selector_weight=0.7,
    )
    scored.loss.backward()

    # Padding behind the row, as the library packs it.
    length = 64
    padded = torch.zeros(1, length, dtype=torch.long)
    padded[0, :40] = torch.from_numpy(row)
    features = torch.zeros(1, length, 64)
    features[0, :40] = stored.states[:, :-1].flatten(1)
    last = torch.zeros(1, length, 32)
    last[0, :40] = stored.states[:, -1]
    loss_mask = torch.zeros(1, length)
    loss_mask[0, 10:40] = 1
    documents = torch.full((1, length), -1)
    documents[0, :40] = 0
    monkeypatch.setattr(core, "select_anchors", lambda *args: (anchors, torch.ones(4, dtype=torch.bool)))
    options = DFlash2DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", max_anchors=4, selector_loss_alpha=0.7
    )[0]
    _, loss, metrics = theirs(
        features, padded, loss_mask, last, documents, torch.arange(length)[None], **options
    )
    loss.backward()

    torch.testing.assert_close(scored.loss, loss, atol=1e-5, rtol=1e-5)
    gradients = {name: value.grad for name, value in theirs.named_parameters() if value.requires_grad}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-3)
    readings = _readings(_tally(scored, 16), 7)
    for ours_name, theirs_name in (
        ("eal", "eal"),
        ("recall", "unary_candidate_recall_at_16"),
        ("oracle_al", "unary_top_16_oracle_accepted_length"),
        ("unary_loss", "unary_loss"),
        ("selector_loss", "selector_loss"),
    ):
        expected = float(metrics[f"{theirs_name}_sum"] / metrics[f"{theirs_name}_total"])
        assert readings[ours_name] == pytest.approx(expected, abs=1e-4), ours_name
    places = [metrics[f"position_{n}_acc_sum"] / metrics[f"position_{n}_acc_total"] for n in range(1, 8)]
    assert readings["position_top1"] == pytest.approx([float(value) for value in places], abs=1e-4)


# -- all stages ----------------------------------------------------------------------------------------


def test_every_stage_leaves_its_files(trained: Path) -> None:
    corpus = json.loads((trained / "corpus" / "corpus.json").read_text())
    assert corpus["rows"] == 40
    model = trained / "drafters" / "dflash2" / "model"
    facts = json.loads((model / "training.json").read_text())
    assert facts["label"] == "DFlash 2"
    assert facts["corpus"]["training_rows"] == 32
    assert facts["corpus"]["held_out_rows"] == 8
    assert facts["legs"][0]["steps"] == 12
    assert facts["gpu_hours"] is None
    assert set(facts["results"]) >= {"held out of the corpus"}
    card = (model / "README.md").read_text()
    assert "| 0 | 12 | " in card
    assert str(trained) not in card + json.dumps(facts)
    tensors = load_file(model / "model.safetensors")
    assert len(tensors) == 15 * 2 + 6
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    kinds = [line["kind"] for line in read_metrics(trained / "drafters" / "dflash2")]
    assert kinds == ["training"] * 4 + ["evaluation"]


def test_training_lowers_the_loss(trained: Path) -> None:
    lines = [line for line in read_metrics(trained / "drafters" / "dflash2") if line["kind"] == "training"]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_finished_training_is_not_repeated_and_another_budget_adds_a_leg(
    target_folder: Path, tmp_path: Path
) -> None:
    short = {"steps": 3, "rows": 2, "anchors": 2, "log_steps": 3}
    plan = toy_plan(target_folder, training=short)
    out = train(plan, tmp_path / "out")
    checkpoint = out / "drafters" / "dflash2" / CHECKPOINT
    before = checkpoint.read_bytes()
    train(plan, out, resume=True)
    assert checkpoint.read_bytes() == before
    train(toy_plan(target_folder, training=short | {"steps": 6}), out, resume=True)
    facts = json.loads((out / "drafters" / "dflash2" / "model" / "training.json").read_text())
    assert [leg["steps"] for leg in facts["legs"]] == [3, 6]


def test_an_interrupted_training_ends_with_the_weights_of_an_uninterrupted_one(
    trained: Path, target_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def interrupt(line: str) -> None:
        if "step 6," in line:
            raise KeyboardInterrupt

    # The same corpus for both: making one is bounded by time.
    changes = {"corpus": {"reuse": str(trained / "corpus"), "held_out": 8}}
    plan = toy_plan(target_folder, **changes)
    with pytest.raises(KeyboardInterrupt):
        train(plan, out, say=interrupt)
    assert not (out / "drafters" / "dflash2" / "model").exists()
    train(plan, out, resume=True)
    left, right = (
        load_file(folder / "drafters" / "dflash2" / "model" / "model.safetensors")
        for folder in (out, trained)
    )
    assert all(torch.equal(left[name], right[name]) for name in right)
    steps = [
        line["step"] for line in read_metrics(out / "drafters" / "dflash2") if line["kind"] == "training"
    ]
    assert steps == [3, 6, 9, 12]


def test_a_corpus_goes_on_where_it_stopped(target: TargetModel, target_folder: Path, tmp_path: Path) -> None:
    plan = toy_plan(target_folder)

    def interrupt(line: str) -> None:
        if line.startswith("Corpus:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus(plan, target, tmp_path, say=interrupt)
    first = (tmp_path / "rows-00000.npz").read_bytes()
    corpus = build_corpus(plan, target, tmp_path)
    assert (tmp_path / "rows-00000.npz").read_bytes() == first
    digests = np.concatenate([corpus.training.digests, corpus.held_out.digests])
    assert len(digests) == len(set(digests.tolist())) == 40
    assert set(corpus.training.digests.tolist()).isdisjoint(corpus.held_out.digests.tolist())


def test_a_corpus_too_large_for_memory_is_taken_in_parts(
    trained: Path, target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    training = {"steps": 20, "rows": 4, "anchors": 2, "log_steps": 20, "teacher_gib": 1e-4}
    plan = toy_plan(
        target_folder, training=training, corpus={"reuse": str(trained / "corpus"), "held_out": 8}
    )
    corpus = build_corpus(plan, target, tmp_path / "none")
    loaded: list[str] = []
    parts = TeacherParts(plan, target, corpus, (1,), loaded.append)
    assert parts.num_parts > 1
    config = published_config(plan.drafters[0], target, (1,))
    made = DrafterTraining(plan, plan.drafters[0], config, target, parts, tmp_path / "d", loaded.append)
    made.run()
    assert sum(line.startswith("Stored") for line in loaded) > parts.num_parts
    assert sum(parts.part_rows(part) for part in range(parts.num_parts)) == len(corpus.training)


def test_a_folder_of_another_plan_is_refused(trained: Path, target_folder: Path) -> None:
    with pytest.raises(PlanError, match="holds a training already; say --resume"):
        train(toy_plan(target_folder), trained)
    with pytest.raises(PlanError, match="was trained by another plan"):
        train(toy_plan(target_folder, seed=1), trained, resume=True)
    with pytest.raises(PlanError, match="holds no training to resume"):
        train(toy_plan(target_folder), trained / "nothing", resume=True)


# -- the published checkpoint --------------------------------------------------------------------------


@pytest.fixture
def reference_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    import dflash.model

    # Its timer synchronises a CUDA device.
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


@pytest.mark.usefixtures("reference_clock")
def test_the_reference_package_accepts_as_many_drafts_as_the_evaluation_says(
    trained: Path, target: TargetModel, target_folder: Path
) -> None:
    import dflash.model

    folder = trained / "drafters" / "dflash2" / "model"
    reference, info = dflash.model.DFlash2DraftModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    plan = toy_plan(target_folder)
    config = json.loads((folder / "config.json").read_text())
    drafter = TrainedDrafter(plan.drafters[0], config)
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    plain: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, VOCABULARY, size=size).tolist() for size in (6, 11, 20)]
    answers = generate(target.model, prompts, [0.0] * 3, max_new_tokens=24, stop_ids=[0])
    rows = rows_from(
        [
            (p, a, 0.0, n, KINDS.index("traffic"))
            for n, (p, a) in enumerate(zip(prompts, answers, strict=True))
        ],
        target,
    )
    stored = teacher_states(target, drafter.taps, rows.split(), rows.prompt_lengths.tolist())
    matched = matched_lengths(drafter, target, stored, nullcontext)
    for prompt, answer, row in zip(prompts, answers, matched, strict=True):
        found = dflash.model.dflash_generate(
            reference, plain, torch.tensor([prompt]), 24, [0], temperature=0.0, return_stats=True
        )
        assert found.output_ids[0, len(prompt) :].tolist() == answer
        # The last step may be cut by the answer's end on either side.
        steps = [length - 1 for length in found.acceptance_lengths]
        assert walk(row).tolist()[:-1] == steps[: len(walk(row)) - 1]


@pytest.mark.parametrize(("conv", "rank"), [(0, 4), (2, 0), (0, 0)])
def test_ablations_are_published_without_the_keys_of_what_they_lack(
    trained: Path, target_folder: Path, tmp_path: Path, conv: int, rank: int
) -> None:
    drafter = {
        "name": "ablation",
        "layers": 1,
        "conv_group_size": 8,
        "conv_kernel_size": conv,
        "selector_rank": rank,
        "mask_token_id": 63,
    }
    plan = toy_plan(
        target_folder,
        drafters=[drafter],
        training={"steps": 2, "rows": 2, "anchors": 2},
        corpus={"reuse": str(trained / "corpus"), "held_out": 8},
        shard_mib=0.01,
    )
    out = train(plan, tmp_path / "out")
    model = out / "drafters" / "ablation" / "model"
    config = json.loads((model / "config.json").read_text())
    own = config["dflash_config"]
    assert ("conv_kernel_size" in own) == bool(conv)
    assert ("selector_rank" in own) == bool(rank)
    assert config["architectures"] == ["DFlash2DraftModel" if conv or rank else "DFlashDraftModel"]
    opened = open_checkpoint(model)
    assert bool(opened.config.conv_kernel_size) == bool(conv)
    assert bool(opened.config.selector_rank) == bool(rank)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    assert any("conv" in name for name in names) == bool(conv)
    assert any("selector" in name for name in names) == bool(rank)
    assert {path.name for path in model.glob("*.safetensors")} == set(index["weight_map"].values())


def test_training_begins_from_a_published_checkpoint(
    trained: Path, target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    drafter = {
        "name": "dflash2",
        "layers": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "mask_token_id": 63,
        "init": str(trained / "drafters" / "dflash2" / "model"),
    }
    reuse = {"reuse": str(trained / "corpus"), "held_out": 8}
    short = {"steps": 2, "rows": 2, "anchors": 2}
    plan = toy_plan(target_folder, drafters=[drafter], corpus=reuse, training=short)
    continued = train(plan, tmp_path / "out") / "drafters" / "dflash2" / "model"
    facts = json.loads((continued / "training.json").read_text())
    assert [leg["steps"] for leg in facts["earlier"][0]["legs"]] == [12]
    assert "## Earlier training 0: toy, seed 0" in (continued / "README.md").read_text()
    corpus = build_corpus(plan, target, tmp_path / "none")
    parts = TeacherParts(plan, target, corpus, (1,), lambda line: None)
    config = published_config(plan.drafters[0], target, (1,))
    made = DrafterTraining(plan, plan.drafters[0], config, target, parts, tmp_path / "d", print)
    published = load_file(trained / "drafters" / "dflash2" / "model" / "model.safetensors")
    for name, value in made.model.named_parameters():
        assert torch.equal(value.detach(), published[name].float())


# -- on a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_trains_as_a_plain_one_does(
    trained: Path, target_folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    losses = []
    for graph in (False, True):
        plan = toy_plan(
            target_folder,
            device="cuda",
            training={"steps": 40, "rows": 4, "anchors": 3, "log_steps": 10, "graph": graph},
            corpus={"reuse": str(trained / "corpus"), "held_out": 8},
        )
        out = train(plan, tmp_path / str(graph), say=said.append)
        lines = read_metrics(out / "drafters" / "dflash2")
        losses.append([line["loss"] for line in lines if line["kind"] == "training"])
    assert not any("can't be recorded" in line for line in said)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
