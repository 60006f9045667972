"""How much memory a model needs, read from its headers: config.json and the heads of safetensors files.

Loads no weights and no torch, so that a login node can answer for a plan. Where there are no
weights (a modelled plan), parameters are counted from the shapes that config.json implies, for
the dense decoders and DFlash drafters whose formulas are here; other architectures are None.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specnb.errors import SpecnbError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_STORED_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}
_LARGEST_HEADER_BYTES: Final = 100_000_000
# Configs with one of these describe experts or recurrent layers, which `parameters` has no formula for.
_OTHER_SHAPES: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "linear_num_value_heads",
    "kv_lora_rank",
    "ssm_state_size",
)


class UnreadableModel(SpecnbError):
    """A model directory that can't be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the headers of a model directory say.

    `num_parameters` is counted from the tensors, or from config.json where there are none
    (`has_weights` false); None where neither tells. `stored_bytes` is None without weights.
    """

    folder: Path
    config: dict[str, Any]
    num_parameters: int | None
    stored_bytes: int | None
    has_weights: bool = True

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json that describes the language model."""
        found = self.config.get("text_config")
        return found if isinstance(found, dict) else self.config

    def weight_bytes(self, dtype: str) -> int | None:
        """Bytes of the weights in a dtype; as stored for `auto` and for quantized weights; None: unknown."""
        size = DTYPE_BYTES.get(dtype)
        if self.stored_bytes is not None and (size is None or "quantization_config" in self.config):
            return self.stored_bytes
        return None if self.num_parameters is None else self.num_parameters * (size or 2)


def read_model(folder: Path, *, weights: bool = True) -> Model:
    """The headers of a model directory.

    Parameters
    ----------
    folder
        Holds config.json and safetensors files.
    weights
        Whether weights must be there; if not, config.json alone is enough.

    Raises
    ------
    UnreadableModel
        Something is missing, corrupt or truncated.
    """
    if not folder.is_dir():
        raise UnreadableModel(f"{folder}: no such model directory; mend the plan's path")
    config = _config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not weights:
        return Model(
            folder=folder,
            config=config,
            num_parameters=parameters(config),
            stored_bytes=None,
            has_weights=False,
        )
    if not files:
        raise UnreadableModel(
            f"{folder}: holds no .safetensors file; convert the weights (pickle is refused)"
        )
    absent = sorted(_listed_shards(folder) - {file.name for file in files})
    if absent:
        raise UnreadableModel(f"{folder}: {absent[0]} of its index is missing; fetch the model again")
    tensors = [tensor for file in files for tensor in _tensors(file)]
    return Model(
        folder=folder,
        config=config,
        num_parameters=sum(count for _, count in tensors),
        stored_bytes=sum(count * _STORED_BYTES.get(dtype, 1) for dtype, count in tensors),
    )


def parameters(config: dict[str, Any]) -> int | None:
    """Number of parameters that config.json implies; None for shapes without a formula here.

    Notes
    -----
    Dense decoders of the Llama and Qwen kind: query, key, value and output projections, a gated
    feed-forward, two norms a layer, Qwen3's norms of queries and keys, the embedding and, unless tied,
    the head. DFlash drafters have neither of the last two, but a projection of the tapped layers, and
    DFlash 2 the path selector and two convolutions a layer (shapes as in the released checkpoint of
    Qwen3.8-27B, 1,924,404,480 parameters).
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict) or any(text.get(key) for key in _OTHER_SHAPES):
        return None
    try:
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, width, vocabulary = (
            int(text["num_attention_heads"]),
            _head_width(text),
            int(text["vocab_size"]),
        )
        cached = int(text.get("num_key_value_heads") or heads)
        layer = 2 * hidden * width * (heads + cached) + 3 * hidden * int(text["intermediate_size"])
        layer += 2 * hidden + (2 * width if str(text.get("model_type", "")).startswith("qwen3") else 0)
        architecture = (config.get("architectures") or [""])[0]
        if not str(architecture).startswith("DFlash"):
            return (
                layers * layer + vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2) + hidden
            )
        block = config["dflash_config"]
        whole = len(block["target_layer_ids"]) * hidden * hidden + 2 * hidden
        if architecture == "DFlash2DraftModel":
            rank, taps = int(block["selector_rank"]), int(block["conv_kernel_size"])
            whole += 2 * vocabulary * rank + rank * hidden
            layer += 2 * (2 * taps * hidden + 2 * taps * (hidden // int(block["conv_group_size"])) * hidden)
        return whole + layers * layer
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def cache_bytes_per_token(config: dict[str, Any], *, size: float) -> int | None:
    """Bytes of keys and values that one token takes in all layers; None if config.json lacks the shapes.

    Parameters
    ----------
    config
        Content of config.json. Layers with linear attention keep no keys; windows count as whole.
    size
        Bytes of one element.
    """
    text = config.get("text_config", config)
    try:
        heads = int(text["num_attention_heads"])
        kinds = text.get("layer_types")
        if isinstance(kinds, list):
            layers = sum(
                str(kind).endswith("attention") and not str(kind).startswith("linear") for kind in kinds
            )
        else:
            layers = int(text["num_hidden_layers"]) // int(text.get("full_attention_interval") or 1)
        if text.get("kv_lora_rank"):
            return round(layers * (int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])) * size)
        return round(2 * layers * int(text.get("num_key_value_heads") or heads) * _head_width(text) * size)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def block_size(config: dict[str, Any]) -> int | None:
    """Width of a block drafter's query, the verified token included; None for other drafters."""
    found = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    return found if isinstance(found, int) else None


def _head_width(text: dict[str, Any]) -> int:
    return int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableModel(f"{file}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise UnreadableModel(f"{file}: not valid JSON; it is corrupt") from error
    if not isinstance(config, dict):
        raise UnreadableModel(f"{file}: not a JSON object; it is corrupt")
    return config


def _listed_shards(folder: Path) -> set[str]:
    """Files that the model's index names; none without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableModel(f"{index}: can't be read; fetch the model again") from error


def _tensors(file: Path) -> Iterator[tuple[str, int]]:
    """(dtype, number of elements) of each tensor: 8 bytes of length, then that much JSON, then data."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        found = [(str(entry["dtype"]), math.prod(entry["shape"])) for entry in entries]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        size = file.stat().st_size
    except OSError as error:
        raise UnreadableModel(f"{file}: can't be read ({error.strerror})") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UnreadableModel(f"{file}: not a safetensors file; fetch it again") from error
    if size < end:
        raise UnreadableModel(f"{file}: {size} bytes of {end}, so it is truncated; fetch it again")
    yield from found
