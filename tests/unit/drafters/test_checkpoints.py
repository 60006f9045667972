"""Checkpoints on disk: whole ones are read, every unfit one is refused with one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import drafter_tensors, save_tiny_drafter, save_tiny_target

from specnb.drafters.checkpoints import TargetShape, locate, open_checkpoint
from specnb.errors import EngineError

SHAPE = TargetShape(hidden_size=32, vocab_size=8, num_layers=2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tiny_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path: Path, target: Path) -> Path:
    return save_tiny_drafter(tmp_path / "drafter", target)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return open_checkpoint(folder).tensors(device=torch.device("cpu"), dtype=torch.float32)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_all_tensors_are_read_from_one_file_or_shards(tmp_path: Path, target: Path, num_shards: int) -> None:
    folder = save_tiny_drafter(tmp_path / "d", target, seed=4, num_shards=num_shards)
    checkpoint = open_checkpoint(folder)
    expected = drafter_tensors(checkpoint.config.raw, seed=4)
    found = load(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert checkpoint.num_parameters == sum(value.numel() for value in expected.values())
    assert checkpoint.num_bytes == 4 * checkpoint.num_parameters
    assert len(set(checkpoint.files.values())) == num_shards


def test_shapes_of_the_published_27b_drafter_add_up(tmp_path: Path) -> None:
    """1,924,404,480 parameters in 81 tensors, as its model card says; from the config alone."""
    config = {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": False, "is_causal": False,
        "hidden_act": "silu", "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
        "vocab_size": 248320, "num_target_layers": 64, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "dflash_config": {
            "block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61],
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    from specnb.drafters.checkpoints import read_config

    shapes = read_config(tmp_path).shapes()
    assert len(shapes) == 81
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_924_404_480
    assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == (1280, 5120)


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "DFlash 2"),
        ({"conv_kernel_size": None}, "DFlash 2 without convolution"),
        ({"conv_kernel_size": 0}, "DFlash 2 without convolution"),
        ({"selector_rank": None}, "DFlash 2 without path selector"),
        (
            {"selector_rank": 0, "conv_kernel_size": None, "selector_top_k": None},
            "DFlash 2 without convolution and path selector",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
    ],
)
def test_features_follow_the_config(
    tmp_path: Path, target: Path, changes: dict[str, Any], label: str
) -> None:
    folder = save_tiny_drafter(tmp_path / "d", target, **changes)
    assert open_checkpoint(folder).config.label == label
    load(folder)


def test_defaults_of_the_format(tmp_path: Path, target: Path) -> None:
    """Block of 16; taps spread from layer 1 to the fourth from the end, or the middle one."""
    folder = save_tiny_drafter(tmp_path / "d", target, block_size=None)
    assert open_checkpoint(folder).config.block_size == 16
    for layers, taps in ((3, (1, 13, 25)), (1, (14,))):
        folder = save_tiny_drafter(
            tmp_path / f"taps{layers}", target, num_hidden_layers=layers, target_layer_ids=list(range(layers))
        )
        change_config(
            folder,
            lambda config: (
                config["dflash_config"].pop("target_layer_ids"),
                config.update(num_target_layers=28),
            ),
        )
        assert open_checkpoint(folder).config.target_layer_ids == taps


CONFIG_REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another architecture": (
        lambda c: c.update(architectures=["LiLiCorrDraftModel"]),
        'config.json: architectures is ["LiLiCorrDraftModel"]; only DFlash2DraftModel and DFlashDraftModel '
        "can be loaded",
    ),
    "no architecture": (
        lambda c: c.pop("architectures"),
        "config.json: architectures is null; only DFlash2DraftModel and DFlashDraftModel can be loaded",
    ),
    "causal flag missing": (
        lambda c: c.pop("is_causal"),
        'config.json: is_causal is missing, which makes sliding layers causal; add "is_causal": false if the '
        "drafter was trained so",
    ),
    "causal": (
        lambda c: c.update(is_causal=True),
        "config.json: is_causal is true, but a DFlash block attends both ways; set it to false if the "
        "drafter was trained so",
    ),
    "key missing": (
        lambda c: c.pop("intermediate_size"),
        "config.json: intermediate_size is missing; add it",
    ),
    "mask token missing": (
        lambda c: c["dflash_config"].pop("mask_token_id"),
        "config.json: mask_token_id is missing; add it",
    ),
    "mask token outside": (
        lambda c: c["dflash_config"].update(mask_token_id=8),
        "mask_token_id 8 is outside the vocabulary of 8; correct config.json",
    ),
    "text for a number": (
        lambda c: c.update(num_attention_heads="4"),
        'config.json: num_attention_heads is "4"; it must be an integer of at least 1',
    ),
    "block of one": (
        lambda c: c["dflash_config"].update(block_size=1),
        "config.json: block_size is 1; it must be an integer of at least 2",
    ),
    "taps twice": (
        lambda c: c["dflash_config"].update(target_layer_ids=[0, 0]),
        "config.json: target_layer_ids is [0, 0]; it must list different layers from 0",
    ),
    "no window": (lambda c: c.pop("sliding_window"), "config.json: sliding_window is missing; add it"),
    "unknown layer type": (
        lambda c: c.update(layer_types=["sliding_attention", "linear_attention"]),
        'config.json: layer_types holds "linear_attention"; only full_attention and sliding_attention can be '
        "loaded",
    ),
    "convolution in a plain drafter": (
        lambda c: c.update(architectures=["DFlashDraftModel"]),
        'conv_kernel_size above 0 needs "architectures": ["DFlash2DraftModel"] in config.json',
    ),
    "groups that do not divide": (
        lambda c: c["dflash_config"].update(conv_group_size=5),
        "conv_group_size 5 does not divide hidden_size 32",
    ),
    "more candidates than tokens": (
        lambda c: c["dflash_config"].update(selector_top_k=16),
        "selector_top_k 16 is more than the vocabulary of 8 tokens",
    ),
    "attention sinks": (
        lambda c: c.update(attention_sink_bias=True),
        "config.json: attention_sink_bias is not supported; use a checkpoint without it",
    ),
    "convolution said to be absent": (
        lambda c: c["dflash_config"].update(conv_kernel_size=0),
        "config.json has no place for 'layers.0.attention_conv.base_kernel' and 7 more (DFlash2DraftModel, "
        "2 layers, conv_kernel_size 0, selector_rank 4); correct it or remove the tensor",
    ),
    "a layer more": (
        lambda c: c.update(num_hidden_layers=3, layer_types=["sliding_attention"] * 3),
        "holds no tensor 'layers.2.attention_conv.base_kernel' and 14 more; a shard is missing or "
        "config.json asks for more than the checkpoint has",
    ),
    "another rank": (
        lambda c: c["dflash_config"].update(selector_rank=5),
        "'candidate_selector.predecessor_codebook' has shape [8, 4] but config.json asks for [8, 5]; use the "
        "config.json that belongs to the weights",
    ),
}


@pytest.mark.parametrize("name", CONFIG_REFUSALS)
def test_unfit_configs_are_refused(drafter: Path, name: str) -> None:
    change, line = CONFIG_REFUSALS[name]
    change_config(drafter, change)
    with pytest.raises(EngineError) as refusal:
        open_checkpoint(drafter)
    assert str(refusal.value) == f"speculative.model: {drafter}: {line}"


TARGET_REFUSALS: dict[str, tuple[TargetShape, int, str]] = {
    "hidden size": (
        TargetShape(hidden_size=64, vocab_size=8, num_layers=2),
        7,
        "hidden_size is 32 but the target's is 64; use a drafter trained for this target",
    ),
    "vocabulary": (
        TargetShape(hidden_size=32, vocab_size=9, num_layers=2),
        7,
        "vocab_size is 8 but the target's is 9; use a drafter trained for this target",
    ),
    "tapped layer": (
        TargetShape(hidden_size=32, vocab_size=8, num_layers=1),
        7,
        "target_layer_ids holds 1 but the target has layers 0 to 0; use a drafter trained for this target",
    ),
    "depth": (
        TargetShape(hidden_size=32, vocab_size=8, num_layers=5),
        7,
        "num_target_layers is 2 but the target has 5 layers; use a drafter trained for this target",
    ),
    "block size": (SHAPE, 8, ""),
}


@pytest.mark.parametrize("name", TARGET_REFUSALS)
def test_drafters_of_another_target_are_refused(tmp_path: Path, target: Path, name: str) -> None:
    folder = save_tiny_drafter(tmp_path / "d", target, target_layer_ids=[0, 1])
    shape, drafts, line = TARGET_REFUSALS[name]
    checkpoint = open_checkpoint(folder)
    with pytest.raises(EngineError) as refusal:
        checkpoint.check_fit(shape, num_speculative_tokens=drafts)
    if name == "block size":
        assert str(refusal.value) == (
            f"speculative.num_speculative_tokens: 8 is more than a block of 8 drafts ({folder}); "
            "use at most 7"
        )
    else:
        assert str(refusal.value) == f"speculative.model: {folder}: {line}"
    checkpoint.check_fit(SHAPE, num_speculative_tokens=7)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _point(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


FILE_REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (_cut, r"model\.safetensors is cut off or damaged \(.*\); fetch it again"),
    "pickled": (
        _pickle,
        r"pytorch_model\.bin is pickled, which can run code; convert it to model\.safetensors",
    ),
    "LFS pointer": (
        _point,
        r"model\.safetensors is a Git LFS pointer, not the weights; run git lfs pull",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"holds no \.safetensors file; fetch the whole checkpoint",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"holds no config\.json; give the folder of a DFlash checkpoint",
    ),
    "config cut off": (
        lambda folder: (folder / "config.json").write_text('{"architectures": ['),
        r"config\.json can't be read \(.*\); fetch it again",
    ),
    "integers": (
        lambda folder: change_tensors(folder, lambda t: t.update({"norm.weight": torch.ones(32).int()})),
        r"'norm\.weight' is I32; convert the weights to bfloat16, float16 or float32",
    ),
    "missing tensor": (
        lambda folder: change_tensors(folder, lambda t: t.pop("norm.weight")),
        r"holds no tensor 'norm\.weight'; a shard is missing or .*",
    ),
    "unknown tensor": (
        lambda folder: change_tensors(folder, lambda t: t.update({"d2t": torch.ones(8)})),
        r"config\.json has no place for 'd2t' \(.*\); correct it or remove the tensor",
    ),
    "NaN": (
        lambda folder: change_tensors(folder, lambda t: t["fc.weight"].fill_(float("nan"))),
        r"'fc\.weight' holds NaN or infinity; export the checkpoint again",
    ),
}


@pytest.mark.parametrize("name", FILE_REFUSALS)
def test_damaged_files_are_refused(drafter: Path, name: str) -> None:
    spoil, line = FILE_REFUSALS[name]
    spoil(drafter)
    with pytest.raises(EngineError) as refusal:
        load(drafter)
    assert re.fullmatch(re.escape(f"speculative.model: {drafter}: ") + line, str(refusal.value))


def test_a_training_record_is_read_without_its_curves(drafter: Path) -> None:
    assert open_checkpoint(drafter).training() is None
    record = drafter / "training.json"
    record.write_text('{"seed": 1, "curves": []}')
    assert open_checkpoint(drafter).training() == {"seed": 1}
    record.write_text("[]")
    with pytest.raises(EngineError, match=r"training\.json is no JSON object; remove it"):
        open_checkpoint(drafter).training()


def test_damaged_shards_are_refused(tmp_path: Path, target: Path) -> None:
    folder = save_tiny_drafter(tmp_path / "d", target, num_shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match=r"model-00002-of-00003\.safetensors is cut off or damaged"):
        open_checkpoint(folder)
    shard.unlink()
    with pytest.raises(EngineError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(folder)
    shard.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(EngineError, match="has no weight_map of file names"):
        open_checkpoint(folder)


def test_places_that_hold_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"speculative\.model: \./nowhere: no such model directory"):
        locate("./nowhere")
    assert locate(str(tmp_path)) == tmp_path
