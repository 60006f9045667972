"""The target as a teacher: loaded once, asked for answers, and tapped for its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from specnb.config import DEMO_TARGET
from specnb.engines.loading import quiet_transformers, resolve_device, stop_token_ids
from specnb.errors import EngineError, PlanError, UnsupportedModelError
from specnb.provenance import directory_sha256
from specnb.training.decode import register_attention, vocabulary_logits
from specnb.training.plan import TrainPlan

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENS_PER_FORWARD = 65_536
# Share of greedy answer tokens that the stored states must explain. bfloat16 near-ties cost some percent,
# a wrong norm or layer nearly all.
_LEAST_AGREEMENT = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """A loaded target and what training needs to know of it."""

    model: Any
    tokenizer: Any
    folder: Path
    label: str
    sha256: str
    device: torch.device
    stop_ids: tuple[int, ...]

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.model.config.get_text_config()

    @property
    def layers(self) -> Any:
        """The decoder layers in order."""
        return self.model.get_decoder().layers

    @property
    def head(self) -> torch.Tensor:
        """Vocabulary head, [vocabulary, hidden], in the target's type."""
        return self.model.get_output_embeddings().weight.detach()  # type: ignore[no-any-return]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of token ids."""
        return self.model.get_input_embeddings()(ids)  # type: ignore[no-any-return]

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of last hidden states."""
        return self.model.get_decoder().norm(states)  # type: ignore[no-any-return]


def load_target(plan: TrainPlan) -> TargetModel:
    """Loads the plan's target on its device, without gradients.

    Raises
    ------
    EngineError
        It is no directory of safetensors, can't be loaded, or has no chat template.
    UnsupportedModelError
        Its logits are not a final norm and a matrix (a softcap, a scale), or its layers are not dense.
    """
    device = resolve_device(plan.device, key="device")
    if plan.num_threads is not None:
        torch.set_num_threads(plan.num_threads)
    if plan.target.model == DEMO_TARGET:
        from specnb.demo import DEMO_TARGET_LABEL, ensure_demo_target

        folder, label = ensure_demo_target(), DEMO_TARGET_LABEL
    else:
        folder = Path(plan.located(plan.target.model))
        label = folder.name
    if not folder.is_dir() or not list(folder.glob("*.safetensors")):
        raise EngineError(
            f"target.model: {folder}: no directory with .safetensors files; download the model first"
        )
    dtype = _DTYPES.get(plan.target.dtype)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, attn_implementation=register_attention()
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            first = str(error).strip().splitlines()[0]
            raise EngineError(f"target.model: {folder.name} can't be loaded ({first})") from error
    if device.type == "cuda":
        # float32 products of bfloat16 values are exact in TF32, and fast.
        torch.set_float32_matmul_precision("high")
    model = loaded.to(device).eval().requires_grad_(False)
    _refuse_unplain(model, folder.name)
    if tokenizer.chat_template is None:
        raise EngineError(
            f"target.model: {folder.name} has no chat template; training needs an instruct model"
        )
    return TargetModel(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        label=label,
        sha256=directory_sha256(folder),
        device=device,
        stop_ids=tuple(sorted(stop_token_ids(model, tokenizer))),
    )


def _refuse_unplain(model: Any, name: str) -> None:
    config = model.config.get_text_config()
    for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(config, key, neutral)
        if value not in (None, neutral):
            raise UnsupportedModelError(
                f"target.model: {name} has {key} {value}; training reads logits as norm and head alone"
            )
    decoder = model.get_decoder()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"} or not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise UnsupportedModelError(
            f"target.model: {name} has layers other than full attention; training takes dense targets only"
        )
    if model.get_output_embeddings().bias is not None:
        raise UnsupportedModelError(f"target.model: {name} has a biased head; training takes none")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Five layers spread evenly from the second to the third last, fewer for shallow targets."""
    first, last = max(min(1, num_layers - 2), 0), max(num_layers - 3, 0)
    return tuple(sorted({int(value) for value in np.linspace(first, max(first, last), 5).round()}))


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises PlanError for layers that the target lacks, and for its last one.

    The last layer's output would be norm input in some engines and norm output in others.
    """
    if max(taps) > num_layers - 2:
        raise PlanError(
            f"drafters.target_layer_ids: {max(taps)} is out of range; the target has {num_layers} layers, "
            f"of which 0 to {num_layers - 2} can be tapped"
        )


@contextmanager
def _tapped(target: TargetModel, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Outputs of decoder layers during each forward, by 0-based layer, before the final norm."""
    found: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [target.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStates:
    """Hidden states of rows, end to end: `states` [tokens, taps + 1, hidden], the last one before the norm.

    `starts` [rows + 1] are the rows' borders, `prompt_lengths` [rows] where answers begin, `tokens` the ids.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    prompt_lengths: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Sequences held."""
        return len(self.prompt_lengths)


def bytes_per_token(target: TargetModel, taps: Sequence[int]) -> int:
    """Memory of one token's states."""
    return (len(taps) + 1) * int(target.config.hidden_size) * target.head.element_size()


@torch.no_grad()  # not inference mode: the states enter a graph that is differentiated
def teacher_states(
    target: TargetModel,
    taps: Sequence[int],
    rows: Sequence[np.ndarray[Any, Any]],
    prompt_lengths: Sequence[int],
    *,
    say: Callable[[str], None] = lambda line: None,
) -> TeacherStates:
    """One forward over the rows, longest first, right-padded (causal attention never looks there).

    Returns
    -------
    TeacherStates
        On the target's device, in the target's type.
    """
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    hidden = int(target.config.hidden_size)
    states = torch.empty(
        (int(starts[-1]), len(taps) + 1, hidden), dtype=target.head.dtype, device=target.device
    )
    order = np.argsort(-lengths, kind="stable")
    wanted = [*taps, len(target.layers) - 1]
    done = 0
    with _tapped(target, sorted(set(wanted))) as found:
        while done < len(order):
            longest = int(lengths[order[done]])
            batch = order[done : done + max(1, _TOKENS_PER_FORWARD // longest)]
            ids = np.zeros((len(batch), longest), dtype=np.int64)
            keep = np.zeros((len(batch), longest), dtype=bool)
            place = np.zeros((len(batch), longest), dtype=np.int64)
            for line, row in enumerate(batch):
                ids[line, : lengths[row]] = rows[row]
                keep[line, : lengths[row]] = True
                place[line, : lengths[row]] = np.arange(starts[row], starts[row + 1])
            target.model.get_decoder()(input_ids=_to(ids, target.device), use_cache=False)
            kept = _to(np.flatnonzero(keep), target.device)
            where = _to(place[keep], target.device)
            for slot, layer in enumerate(wanted):
                states[where, slot] = found[layer].flatten(0, 1)[kept]
            done += len(batch)
    say(f"Stored the target's states of {len(rows)} rows, {int(starts[-1])} tokens")
    return TeacherStates(
        states=states,
        tokens=_to(np.concatenate(rows).astype(np.int64), target.device),
        starts=_to(starts, target.device),
        prompt_lengths=_to(np.asarray(prompt_lengths, dtype=np.int64), target.device),
    )


@torch.inference_mode()
def greedy_agreement(target: TargetModel, teacher: TeacherStates, *, max_rows: int = 64) -> float:
    """Share of answer tokens that are the argmax of the state before them; near 1 for greedy answers."""
    right = total = 0
    for row in range(min(max_rows, teacher.num_rows)):
        start, stop = int(teacher.starts[row]), int(teacher.starts[row + 1])
        first = start + int(teacher.prompt_lengths[row])
        logits = vocabulary_logits(target.normed(teacher.states[first - 1 : stop - 1, -1]), target.head)
        right += int((logits.argmax(dim=-1) == teacher.tokens[first:stop]).sum())
        total += stop - first
    return right / max(total, 1)


def refuse_unexplained(agreement: float, name: str) -> None:
    """Raises where stored states do not give the target's own greedy tokens."""
    if agreement < _LEAST_AGREEMENT:
        raise UnsupportedModelError(
            f"target.model: {name}: norm and head give only {agreement:.1%} of its own greedy tokens "
            "from its last hidden states; training can't learn from them"
        )


def _to(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
