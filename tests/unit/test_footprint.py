"""Footprints: parameters and cache sizes from config.json, against released models and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specnb.engines.footprint import (
    Model,
    UnreadableModel,
    block_size,
    cache_bytes_per_token,
    parameters,
    read_model,
)

MODELS = Path(__file__).parents[2] / "data" / "models" / "modelled-27b"
DRAFTER: dict[str, Any] = json.loads((MODELS / "drafter" / "config.json").read_text())
TARGET: dict[str, Any] = json.loads((MODELS / "target" / "config.json").read_text())
# huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: 134,515,008 parameters, embedding and head tied.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def test_parameters_of_released_models() -> None:
    """81 tensors of the DFlash 2 drafter for Qwen3.8-27B hold 1,924,404,480 elements."""
    assert parameters(DRAFTER) == 1_924_404_480
    assert parameters(SMOLLM2) == 134_515_008


def test_parameters_of_the_modelled_target() -> None:
    layer = 2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 17408 + 2 * 5120 + 2 * 128
    assert parameters(TARGET) == 64 * layer + 2 * 248320 * 5120 + 5120 == 25_696_031_744
    assert parameters({"text_config": TARGET}) == parameters(TARGET)


def test_a_first_generation_drafter_has_neither_selector_nor_convolutions() -> None:
    config = {**DRAFTER, "architectures": ["DFlashDraftModel"]}
    selector = 2 * 248320 * 256 + 256 * 5120
    convolutions = 5 * 2 * (2 * 2 * 5120 + 2 * 2 * 5120 // 16 * 5120)
    assert parameters(config) == 1_924_404_480 - selector - convolutions


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"text_config": None},
        {**TARGET, "num_experts": 64},
        {**TARGET, "linear_num_value_heads": 48},
        {**TARGET, "kv_lora_rank": 512},
        {key: value for key, value in TARGET.items() if key != "intermediate_size"},
        {**TARGET, "hidden_size": "wide"},
        {**SMOLLM2, "num_attention_heads": 0},
        {**DRAFTER, "dflash_config": {}},
    ],
)
def test_shapes_without_a_formula_are_none(config: dict[str, Any]) -> None:
    assert parameters(config) is None


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (TARGET, 2, 256 * 1024),
        (TARGET, 1, 128 * 1024),  # fp8
        (DRAFTER, 2, 20 * 1024),
        (SMOLLM2, 4, 2 * 30 * 3 * 64 * 4),
        ({"text_config": SMOLLM2}, 4, 2 * 30 * 3 * 64 * 4),
        ({**SMOLLM2, "num_key_value_heads": None}, 4, 2 * 30 * 9 * 64 * 4),
        # One layer in four has attention that keeps keys, said in either way.
        ({**TARGET, "full_attention_interval": 4}, 2, 64 * 1024),
        ({**TARGET, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}, 2, 64 * 1024),
        # Latent attention keeps one vector a layer.
        ({**SMOLLM2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2, 30 * 576 * 2),
        ({}, 2, None),
        ({"text_config": []}, 2, None),
    ],
)
def test_cache_of_a_token(config: dict[str, Any], size: float, expected: int | None) -> None:
    assert cache_bytes_per_token(config, size=size) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [(DRAFTER, 8), ({"block_size": 16}, 16), (TARGET, None), ({"block_size": "8"}, None), ({}, None)],
)
def test_block(config: dict[str, Any], expected: int | None) -> None:
    assert block_size(config) == expected


def model_of(stored: int | None, config: dict[str, Any], count: int | None = 1000) -> Model:
    return Model(folder=Path(), config=config, num_parameters=count, stored_bytes=stored)


def test_weights_by_dtype() -> None:
    assert model_of(2000, {}).weight_bytes("float32") == 4000
    assert model_of(2000, {}).weight_bytes("auto") == 2000
    assert model_of(None, {}).weight_bytes("auto") == 2000
    assert model_of(None, {}).weight_bytes("bfloat16") == 2000
    assert model_of(None, {}, None).weight_bytes("bfloat16") is None
    # Quantized weights stay as they are stored, whatever the plan's dtype.
    assert model_of(600, {"quantization_config": {"bits": 4}}).weight_bytes("bfloat16") == 600


def test_config_alone() -> None:
    model = read_model(MODELS / "target", weights=False)
    assert (model.has_weights, model.stored_bytes) == (False, None)
    assert model.num_parameters == 25_696_031_744
    with pytest.raises(UnreadableModel, match=r"holds no \.safetensors file"):
        read_model(MODELS / "target")
