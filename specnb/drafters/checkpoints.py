"""Published DFlash checkpoints on disk: what they hold, whether they are whole, whether they fit a target.

A checkpoint is a folder with `config.json` and safetensors, in one file or in shards with an
index. Two architectures are known: `DFlash2DraftModel` and the plain `DFlashDraftModel`. The
convolution is present if `conv_kernel_size` is above 0, the path selector if `selector_rank` is;
a DFlash 2 checkpoint may lack either. Embedding and head are the target's.

Everything here is read from headers, so a checkpoint that does not fit is refused before any
weights are loaded. Knows nothing of how the drafter computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from specnb.errors import EngineError

if TYPE_CHECKING:
    import torch

PLACE: Final = "speculative.model"
SECOND: Final = "DFlash2DraftModel"
PLAIN: Final = "DFlashDraftModel"
NUM_CANDIDATES: Final = 16
DEFAULT_BLOCK_SIZE: Final = 16
RECORD: Final = "training.json"
_INDEX = "model.safetensors.index.json"
FLOATS: Final = {"F32": 4, "BF16": 2, "F16": 2}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_POINTER = b"version https://git-lfs"
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """The target's sizes that a drafter must share; `num_layers` counts decoder layers."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A checkpoint's config.json, checked.

    `sliding_windows` has one entry a layer, None for full attention. `target_layer_ids` are the
    0-based target layers whose output (before the final norm) the drafter reads. `conv_kernel_size`
    is 0 without convolution, `selector_rank` 0 without path selector. `num_target_layers` is None if
    the file does not say. `raw` is the file's content.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    num_candidates: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float
    raw: dict[str, Any]

    @property
    def label(self) -> str:
        """Name of the method for people, with what the checkpoint lacks of it."""
        if self.architecture == PLAIN:
            return "DFlash"
        lacks = [
            name
            for name, size in (("convolution", self.conv_kernel_size), ("path selector", self.selector_rank))
            if not size
        ]
        return f"DFlash 2 without {' and '.join(lacks)}" if lacks else "DFlash 2"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the checkpoint must hold, by its published name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        if self.selector_rank:
            found["candidate_selector.predecessor_codebook"] = (self.vocab_size, self.selector_rank)
            found["candidate_selector.successor_codebook"] = (self.vocab_size, self.selector_rank)
            found["candidate_selector.hidden_projection.weight"] = (self.selector_rank, hidden)
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.attention_bias:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                layer[f"self_attn.{name}.bias"] = layer[f"self_attn.{name}.weight"][:1]
        if self.conv_kernel_size:
            taps = self.conv_kernel_size
            for name in ("attention_conv", "mlp_conv"):
                layer[f"{name}.base_kernel"] = (2, taps, hidden)
                layer[f"{name}.kernel_projection.weight"] = (
                    2 * taps * (hidden // self.conv_group_size),
                    hidden,
                )
        for number in range(self.num_layers):
            found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are whole: its folder, config, and the file that holds each tensor."""

    folder: Path
    config: DrafterConfig
    files: dict[str, Path]
    dtypes: dict[str, str]

    @property
    def num_parameters(self) -> int:
        """Number of weights; the target's embedding and head, which the drafter uses, are not in it."""
        return sum(math.prod(shape) for shape in self.config.shapes().values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as stored."""
        shapes = self.config.shapes()
        return sum(math.prod(shapes[name]) * FLOATS[kind] for name, kind in self.dtypes.items())

    def training(self) -> dict[str, Any] | None:
        """What the checkpoint's own record tells of its training, without the curves; None without record.

        Raises
        ------
        EngineError
            The record can't be read.
        """
        if not (self.folder / RECORD).is_file():
            return None
        found = _json(self.folder, RECORD)
        if not isinstance(found, dict):
            raise _refusal(self.folder, f"{RECORD} is no JSON object; remove it")
        return {key: value for key, value in found.items() if key != "curves"}

    def check_fit(self, target: TargetShape, *, num_speculative_tokens: int) -> None:
        """Raises if the drafter can't serve this target with so many drafted tokens.

        Raises
        ------
        EngineError
            Another hidden size, vocabulary or number of layers, a tapped layer out of range, or more
            drafts than a block holds.
        """
        config = self.config
        pairs = (
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
        )
        for name, own, wanted in pairs:
            if own != wanted:
                raise _refusal(
                    self.folder,
                    f"{name} is {own} but the target's is {wanted}; use a drafter trained for this target",
                )
        outside = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
        if outside:
            raise _refusal(
                self.folder,
                f"target_layer_ids holds {outside[0]} but the target has layers 0 to "
                f"{target.num_layers - 1}; use a drafter trained for this target",
            )
        if config.num_target_layers not in (None, target.num_layers):
            raise _refusal(
                self.folder,
                f"num_target_layers is {config.num_target_layers} but the target has {target.num_layers} "
                "layers; use a drafter trained for this target",
            )
        if num_speculative_tokens > config.block_size - 1:
            raise EngineError(
                f"speculative.num_speculative_tokens: {num_speculative_tokens} is more than a block of "
                f"{config.block_size} drafts ({self.folder}); use at most {config.block_size - 1}"
            )

    def tensors(self, *, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights by their published names.

        Raises
        ------
        EngineError
            A weight is NaN or infinite, or its file can't be read to the end.
        """
        found = {}
        for file in sorted(set(self.files.values())):
            try:
                with safe_open(file, framework="pt", device=str(device)) as opened:
                    for name, place in self.files.items():
                        if place == file:
                            found[name] = opened.get_tensor(name).to(dtype)
            except (SafetensorError, OSError) as error:
                raise _broken(self.folder, file, error) from error
        bad = next((name for name, value in found.items() if not bool(value.isfinite().all())), None)
        if bad is not None:
            raise _refusal(self.folder, f"'{bad}' holds NaN or infinity; export the checkpoint again")
        return found


def locate(name: str, *, revision: str | None = None) -> Path:
    """Folder of a checkpoint: a local one as it is, a hub id fetched into the hub's cache.

    Raises
    ------
    EngineError
        There is no such folder, or the hub does not give it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")):
        raise EngineError(f"{PLACE}: {name}: no such model directory")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EngineError(f"{PLACE}: {name} can't be fetched ({line}); give a local directory") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, with config and headers checked and no weights read.

    Raises
    ------
    EngineError
        The config or a tensor is missing, unknown or of a wrong shape or type, a file is cut off, or the
        weights are pickled.
    """
    config = read_config(folder)
    files, shapes, dtypes = _headers(folder)
    expected = config.shapes()
    missing = sorted(expected.keys() - files.keys())
    if missing:
        raise _refusal(
            folder,
            f"holds no tensor '{missing[0]}'{_and_others(missing)}; a shard is missing or config.json asks "
            "for more than the checkpoint has",
        )
    unknown = sorted(files.keys() - expected.keys())
    if unknown:
        raise _refusal(
            folder,
            f"config.json has no place for '{unknown[0]}'{_and_others(unknown)} ({_features(config)}); "
            "correct it or remove the tensor",
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise _refusal(
                folder,
                f"'{name}' has shape {list(shapes[name])} but config.json asks for {list(shape)}; use the "
                "config.json that belongs to the weights",
            )
        if dtypes[name] not in FLOATS:
            raise _refusal(
                folder, f"'{name}' is {dtypes[name]}; convert the weights to bfloat16, float16 or float32"
            )
    return Checkpoint(folder=folder, config=config, files=files, dtypes=dtypes)


def read_config(folder: Path) -> DrafterConfig:
    """The checked content of a checkpoint's config.json.

    Raises
    ------
    EngineError
        A key is missing, of a wrong type or out of range, or asks for what is not supported.
    """
    raw = _json(folder, "config.json")
    if not isinstance(raw, dict):
        raise _refusal(folder, "config.json is no JSON object; use the published one")
    own = raw.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise _refusal(folder, "config.json: dflash_config is no JSON object; use the published one")
    reader = _Reader(folder=folder, raw=raw, own=own)
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else None
    if architecture not in (SECOND, PLAIN):
        raise _refusal(
            folder,
            f"config.json: architectures is {json.dumps(names)}; only {SECOND} and {PLAIN} can be loaded",
        )
    for key in _REQUIRED:
        reader.integer(key, minimum=1)
    layers, heads = reader.integer("num_hidden_layers"), reader.integer("num_attention_heads")
    hidden, vocabulary = reader.integer("hidden_size"), reader.integer("vocab_size")
    block = reader.integer("block_size", minimum=2, default=DEFAULT_BLOCK_SIZE)
    mask = reader.integer("mask_token_id")
    if mask >= vocabulary:
        raise _refusal(
            folder, f"mask_token_id {mask} is outside the vocabulary of {vocabulary}; correct config.json"
        )
    kernel = reader.integer("conv_kernel_size", default=0)
    rank = reader.integer("selector_rank", default=0)
    group = reader.integer("conv_group_size", minimum=1, default=1 if not kernel else None)
    if kernel and hidden % group:
        raise _refusal(folder, f"conv_group_size {group} does not divide hidden_size {hidden}")
    if architecture == PLAIN and (kernel or rank):
        key = "conv_kernel_size" if kernel else "selector_rank"
        raise _refusal(folder, f'{key} above 0 needs "architectures": ["{SECOND}"] in config.json')
    candidates = reader.integer(
        "selector_top_k", minimum=1, default=None if rank else min(NUM_CANDIDATES, vocabulary)
    )
    if candidates > vocabulary:
        raise _refusal(
            folder, f"selector_top_k {candidates} is more than the vocabulary of {vocabulary} tokens"
        )
    if heads % reader.integer("num_key_value_heads"):
        raise _refusal(folder, "num_key_value_heads does not divide num_attention_heads; correct config.json")
    head_dim = reader.integer("head_dim", minimum=2, default=max(hidden // heads, 2))
    num_target_layers = reader.integer("num_target_layers", minimum=1, default=0) or None
    config = DrafterConfig(
        architecture=str(architecture),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=vocabulary,
        attention_bias=bool(raw.get("attention_bias", False)),
        rms_norm_eps=reader.real("rms_norm_eps", 1e-6),
        sliding_windows=_windows(reader, layers),
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=_taps(reader, layers, num_target_layers),
        num_target_layers=num_target_layers,
        conv_kernel_size=kernel,
        conv_group_size=group,
        selector_rank=rank,
        num_candidates=candidates,
        input_embedding_scale=reader.real("input_embedding_scale", 1.0),
        output_multiplier=reader.real("output_multiplier", 1.0),
        final_logit_softcapping=reader.real("final_logit_softcapping", 0.0),
        raw=raw,
    )
    _refuse_unsupported(folder, config)
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Typed values of config.json: the drafter's own block first, then the top level."""

    folder: Path
    raw: dict[str, Any]
    own: dict[str, Any]

    def value(self, key: str) -> Any:
        found = self.own.get(key)
        return self.raw.get(key) if found is None else found

    def integer(self, key: str, *, minimum: int = 0, default: int | None = None) -> int:
        found = self.value(key)
        if found is None:
            if default is None:
                raise _refusal(self.folder, f"config.json: {key} is missing; add it")
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise _refusal(
                self.folder,
                f"config.json: {key} is {json.dumps(found)}; it must be an integer of at least {minimum}",
            )
        return found

    def real(self, key: str, default: float) -> float:
        found = self.value(key)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise _refusal(self.folder, f"config.json: {key} is {json.dumps(found)}; it must be a number")
        return float(found)


def _windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    """Window of each layer; refuses attention that would be causal inside the block."""
    kinds = reader.raw.get("layer_types") or ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise _refusal(reader.folder, f"config.json: layer_types must name each of the {layers} layers")
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise _refusal(
            reader.folder,
            f"config.json: layer_types holds {json.dumps(other[0])}; only full_attention and "
            "sliding_attention can be loaded",
        )
    causal = reader.raw.get("is_causal")
    if causal is None and "sliding_attention" in kinds:
        raise _refusal(
            reader.folder,
            "config.json: is_causal is missing, which makes sliding layers causal; add "
            '"is_causal": false if the drafter was trained so',
        )
    if causal:
        raise _refusal(
            reader.folder,
            "config.json: is_causal is true, but a DFlash block attends both ways; set it to false if the "
            "drafter was trained so",
        )
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = reader.integer("sliding_window", minimum=1)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _taps(reader: _Reader, layers: int, num_target_layers: int | None) -> tuple[int, ...]:
    """Tapped target layers; without the key spread evenly over the target, as the format defines."""
    taps = reader.value("target_layer_ids")
    if taps is None:
        depth = num_target_layers or reader.integer("num_target_layers", minimum=1)
        if layers == 1:
            return (depth // 2,)
        return tuple(round(1 + number * (depth - 4) / (layers - 1)) for number in range(layers))
    good = isinstance(taps, list) and all(type(tap) is int and tap >= 0 for tap in taps)
    if not good or not taps or len(set(taps)) != len(taps):
        raise _refusal(
            reader.folder,
            f"config.json: target_layer_ids is {json.dumps(taps)}; it must list different layers from 0",
        )
    return tuple(taps)


def _refuse_unsupported(folder: Path, config: DrafterConfig) -> None:
    raw, reader = (
        config.raw,
        _Reader(folder=folder, raw=config.raw, own=config.raw.get("dflash_config") or {}),
    )
    wide = reader.value("target_hidden_size")
    if wide not in (None, config.hidden_size):
        raise _refusal(
            folder, f"target_hidden_size {wide} differs from hidden_size; such drafters are not supported"
        )
    for key in ("attention_sink_bias", "sample_from_anchor", "quantization_config"):
        if reader.value(key):
            raise _refusal(folder, f"config.json: {key} is not supported; use a checkpoint without it")
    if raw.get("hidden_act", "silu") != "silu":
        raise _refusal(folder, f"config.json: hidden_act is {json.dumps(raw['hidden_act'])}, not silu")
    if (folder / "mask_embedding.pt").exists():
        raise _refusal(folder, "mask_embedding.pt is not supported; use a checkpoint without it")


def _headers(folder: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]], dict[str, str]]:
    """File, shape and type of each tensor, from the headers of all files."""
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in _files(folder):
        if not file.is_file():
            raise _refusal(folder, f"{file.name} is missing; fetch the whole checkpoint")
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # no mapping, only a method of this name
                    if name in places:
                        raise _refusal(
                            folder,
                            f"'{name}' is in {places[name].name} and in {file.name}; remove stale shards",
                        )
                    part = opened.get_slice(name)
                    places[name], dtypes[name] = file, str(part.get_dtype())
                    shapes[name] = tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise _broken(folder, file, error) from error
    return places, shapes, dtypes


def _files(folder: Path) -> Iterator[Path]:
    if (folder / _INDEX).is_file():
        index = _json(folder, _INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in places.values()
        ):
            raise _refusal(folder, f"{_INDEX} has no weight_map of file names; use the published one")
        yield from (folder / file for file in sorted(set(places.values())))
        return
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickled = sorted(file for pattern in _PICKLES for file in folder.glob(pattern))
        if pickled:
            raise _refusal(
                folder, f"{pickled[0].name} is pickled, which can run code; convert it to model.safetensors"
            )
        raise _refusal(folder, "holds no .safetensors file; fetch the whole checkpoint")
    yield from found


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _refusal(folder, f"holds no {name}; give the folder of a DFlash checkpoint") from None
    except (OSError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise _refusal(folder, f"{name} can't be read ({line}); fetch it again") from error


def _broken(folder: Path, file: Path, error: Exception) -> EngineError:
    try:
        with file.open("rb") as stream:
            pointer = stream.read(len(_POINTER)) == _POINTER
    except OSError:
        pointer = False
    if pointer:
        return _refusal(folder, f"{file.name} is a Git LFS pointer, not the weights; run git lfs pull")
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _refusal(folder, f"{file.name} is cut off or damaged ({line}); fetch it again")


def _features(config: DrafterConfig) -> str:
    return (
        f"{config.architecture}, {config.num_layers} layers, conv_kernel_size {config.conv_kernel_size}, "
        f"selector_rank {config.selector_rank}"
    )


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _refusal(folder: Path, problem: str) -> EngineError:
    return EngineError(f"{PLACE}: {folder}: {problem}")
