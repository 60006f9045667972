"""A drafter in training: speculators' layers, batched so that a block sees its own row's context only.

The library packs sequences into one long row and masks; here every row keeps its own batch
line, with several drafted blocks behind its context, so that attention, masks and memory
stay small and shapes fixed. Layers, selector and tensor names are the library's, so
a checkpoint is the published format without renaming. The loss is the library's too, in one
pass that never keeps the vocabulary's logits for the backward (tested to be equal to it).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from specnb.errors import EngineError, PlanError
from specnb.training.decode import vocabulary_logits
from specnb.training.plan import DrafterPlan
from specnb.training.target import TargetModel, TeacherStates

_SLOTS_PER_CHUNK = 4096
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Fixed-shape input of one step: rows R, context T, blocks A a row, block size B, hidden H.

    `features` [R, T, taps x H], `positions` of the anchors [R, A], `block_ids` [R, A, B] true tokens from the
    anchor on, `teacher` [R, A, B - 1, H] last hidden states that predict tokens 1 to B - 1 of each block,
    `valid` [R, A, B - 1] whether the answer has such a token.
    """

    features: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    teacher: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a step says of its drafted slots, each [R x A, B - 1].

    `rank` of the target's token among the unary candidates (top_k: none of them), `picked` whether the
    selector picks it given the true predecessor (unary argmax without a selector), `valid` as in the batch.
    """

    loss: torch.Tensor
    unary_loss: torch.Tensor
    selector_loss: torch.Tensor
    rank: torch.Tensor
    picked: torch.Tensor
    valid: torch.Tensor


def speculators_parts() -> Any:
    """The library's module of DFlash 2 layers, imported on first use and kept quiet.

    Raises
    ------
    EngineError
        speculators or a package that it needs is not installed.
    """
    logging.getLogger("speculators").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Its imports reach parts of torch that announce their own end.
            warnings.simplefilter("ignore")
            from speculators.models.dflash2 import model_definitions
    except ImportError as error:
        raise EngineError(f"training needs speculators ({error}); pip install 'specnb[train]'") from error
    return model_definitions


class TrainedDrafter(nn.Module):
    """Trainable tensors of a DFlash or DFlash 2 drafter, named as in a published checkpoint."""

    def __init__(self, plan: DrafterPlan, config: Mapping[str, Any]) -> None:
        super().__init__()
        parts = speculators_parts()
        own = config["dflash_config"]
        self.published_config = dict(config)
        self.block_size: int = own["block_size"]
        self.mask_token_id: int = own["mask_token_id"]
        self.top_k = plan.top_k
        self.taps = tuple(own["target_layer_ids"])
        plain = {key: value for key, value in config.items() if key not in ("architectures", "dflash_config")}
        plain.pop("is_causal")
        layer_config = Qwen3Config(**plain)
        layer_config._attn_implementation = "sdpa"
        hidden = layer_config.hidden_size
        if plan.conv_kernel_size:
            layers = [
                parts.Qwen3DFlash2DecoderLayer(
                    layer_config,
                    number,
                    block_size=self.block_size,
                    conv_kernel_size=plan.conv_kernel_size,
                    conv_group_size=plan.conv_group_size,
                )
                for number in range(plan.layers)
            ]
        else:
            layers = [parts.Qwen3DFlashDecoderLayer(layer_config, number) for number in range(plan.layers)]
        self.layers = nn.ModuleList(layers)
        convolved: list[Any] = layers if plan.conv_kernel_size else []
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=layer_config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(hidden, eps=layer_config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layer_config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
        for layer in convolved:
            # Identity: a fresh drafter equals one without convolution.
            layer.attention_conv.reset_parameters()
            layer.mlp_conv.reset_parameters()
        self.candidate_selector: Any = None
        if plan.selector_rank:
            self.candidate_selector = parts.CandidateSelector(
                vocab_size=config["vocab_size"],
                hidden_size=hidden,
                rank=plan.selector_rank,
                top_k=plan.top_k,
                initializer_range=_INIT_STD,
            )

    def forward(self, target: TargetModel, batch: Batch) -> torch.Tensor:
        """Normed hidden states of the drafted slots, [R, A, B - 1, H]."""
        rows, context = batch.features.shape[:2]
        blocks, size = batch.positions.shape[1], self.block_size
        device = batch.features.device
        ids = batch.block_ids.new_full((rows, blocks, size), self.mask_token_id)
        ids[:, :, 0] = batch.block_ids[:, :, 0]
        hidden = target.embed(ids.flatten(1))
        features = self.hidden_norm(self.fc(batch.features))
        places = batch.positions[:, :, None] + torch.arange(size, device=device)
        earlier = torch.arange(context, device=device)
        positions = torch.cat([earlier.expand(rows, context), places.flatten(1)], dim=1)
        rotary = self.rotary_emb(hidden, positions)
        mask = self._mask(batch.positions, context)
        for layer in self.layers:
            hidden = layer(
                hidden_states=hidden,
                target_hidden=features,
                attention_mask=mask,
                position_ids=positions,
                use_cache=False,
                position_embeddings=rotary,
            )
        out: torch.Tensor = self.norm(hidden)
        return out.view(rows, blocks, size, -1)[:, :, 1:]

    def _mask(self, anchors: torch.Tensor, context: int) -> torch.Tensor:
        """Visible keys, bool [R, 1, A x B, T + A x B]: earlier context in the window, and the own block."""
        rows, blocks = anchors.shape
        size, device = self.block_size, anchors.device
        window = self.published_config["sliding_window"]
        keys = torch.arange(context, device=device)
        seen = (keys < anchors[:, :, None]) & (keys >= anchors[:, :, None] - window)
        seen = seen[:, :, None].expand(rows, blocks, size, context).reshape(rows, blocks * size, context)
        block = torch.arange(blocks * size, device=device) // size
        own = (block[:, None] == block[None]).expand(rows, -1, -1)
        return torch.cat([seen, own], dim=2)[:, None]

    def score(self, target: TargetModel, batch: Batch, *, gamma: float, selector_weight: float) -> Scored:
        """Loss and ranks of one batch; the loss is a mean over valid slots, weighted by place."""
        hidden = self(target, batch).flatten(0, 2)
        slots = self.block_size - 1
        valid = batch.valid.flatten().float()
        weights = torch.exp(-torch.arange(slots, device=hidden.device) / gamma).repeat(
            batch.positions.numel()
        )
        weights = weights * valid / valid.sum().clamp(min=1e-5)
        head = target.head
        with torch.no_grad():
            teacher = target.normed(batch.teacher.flatten(0, 2))
        unary_loss, candidates, truth = _distil(hidden, teacher, weights, head, self.top_k)
        matches = candidates == truth[:, None]
        held = matches.any(dim=1)
        rank = torch.where(held, matches.int().argmax(dim=1), self.top_k)
        selector_loss = torch.zeros_like(unary_loss)
        picked = rank == 0
        if self.candidate_selector is not None:
            choices = candidates.clone()
            # A token outside the candidates takes the weakest one's place, so that there is a label.
            choices[:, -1] = torch.where(held, choices[:, -1], truth)
            label = torch.where(held, rank, self.top_k - 1)
            own_rows = (head[choices].float() * hidden.float()[:, None]).sum(dim=2)
            before = batch.block_ids[:, :, :-1].flatten()
            edges = self.candidate_selector.transition_scores(hidden, before, choices).float()
            scores = own_rows + edges
            losses = functional.cross_entropy(scores, label, reduction="none")
            selector_loss = (losses * weights).sum()
            picked = (scores.detach().argmax(dim=1) == label) & held
        return Scored(
            loss=unary_loss + selector_weight * selector_loss,
            unary_loss=unary_loss.detach(),
            selector_loss=selector_loss.detach(),
            rank=rank.view(-1, slots),
            picked=picked.view(-1, slots),
            valid=batch.valid.flatten(0, 1),
        )

    @torch.no_grad()
    def teacher_forced(self, target: TargetModel, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Token drafted in each slot if all before it in the block are the true ones, [R, A, B - 1]."""
        head = target.head
        flat = hidden.flatten(0, 2)
        unary, candidates = vocabulary_logits(flat, head).topk(self.top_k, dim=1)
        if self.candidate_selector is None:
            return candidates[:, 0].view(hidden.shape[:3])
        before = batch.block_ids[:, :, :-1].flatten()
        scores = unary + self.candidate_selector.transition_scores(flat, before, candidates).float()
        return candidates.gather(1, scores.argmax(dim=1, keepdim=True)).view(hidden.shape[:3])


class _Distil(torch.autograd.Function):
    """Weighted KL divergence from the teacher's law to the drafter's, its gradient made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        teacher: torch.Tensor,
        weights: torch.Tensor,
        head: torch.Tensor,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.empty(hidden.shape, dtype=head.dtype, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        candidates, truth = [], []
        for start in range(0, len(hidden), _SLOTS_PER_CHUNK):
            piece = slice(start, start + _SLOTS_PER_CHUNK)
            draft = vocabulary_logits(hidden[piece], head)
            wanted = vocabulary_logits(teacher[piece], head)
            weight = weights[piece]
            candidates.append(draft.topk(top_k, dim=1).indices)
            best = wanted.argmax(dim=1, keepdim=True)
            truth.append(best[:, 0])
            law = torch.softmax(wanted, dim=1)
            guess = torch.softmax(draft, dim=1)
            # Sum of p (log p - log q) without the logarithms' tables: both normalisers follow from the
            # logit and the probability of one token.
            log_sums = [
                logits.gather(1, best) - table.gather(1, best).log()
                for logits, table in ((draft, guess), (wanted, law))
            ]
            difference = wanted.sub_(draft)
            with torch.autocast(hidden.device.type, enabled=False):
                cross = torch.bmm(difference[:, None], law[:, :, None])[:, 0]
            loss += ((cross + log_sums[0] - log_sums[1])[:, 0] * weight).sum()
            gradient[piece] = (guess.sub_(law).to(head.dtype) @ head) * weight[:, None].to(head.dtype)
        ctx.save_for_backward(gradient)
        ctx.type = hidden.dtype
        found, best = torch.cat(candidates), torch.cat(truth)
        ctx.mark_non_differentiable(found, best)
        return loss, found, best

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * outputs[0]).to(ctx.type), None, None, None, None


def _distil(
    hidden: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, head: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted KL sum, unary candidates [N, top_k] by falling score, and the teacher's tokens [N]."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Distil.apply(  # type: ignore[no-untyped-call]
        hidden, teacher, weights, head, top_k
    )
    return found


def published_config(plan: DrafterPlan, target: TargetModel, taps: Sequence[int]) -> dict[str, Any]:
    """config.json of the drafter in the published format.

    Raises
    ------
    PlanError
        The plan's sizes do not fit the target.
    """
    config = target.config
    hidden = int(config.hidden_size)
    place = f"drafters.{plan.name}"
    if plan.conv_kernel_size and hidden % plan.conv_group_size:
        raise PlanError(
            f"{place}.conv_group_size: {plan.conv_group_size} does not divide the target's hidden size "
            f"({hidden}); choose a divisor"
        )
    if plan.top_k > config.vocab_size:
        raise PlanError(
            f"{place}.top_k: {plan.top_k} is above the vocabulary ({config.vocab_size}); lower it"
        )
    mask = plan.mask_token_id
    if mask is None:
        pad = getattr(config, "pad_token_id", None)
        mask = pad if pad is not None else (target.stop_ids[0] if target.stop_ids else 0)
    if mask >= config.vocab_size:
        raise PlanError(
            f"{place}.mask_token_id: {mask} is outside the vocabulary (0 to {config.vocab_size - 1})"
        )
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    own: dict[str, Any] = {
        "block_size": plan.block_size,
        "mask_token_id": int(mask),
        "target_layer_ids": list(taps),
    }
    if plan.conv_kernel_size:
        own |= {"conv_kernel_size": plan.conv_kernel_size, "conv_group_size": plan.conv_group_size}
    if plan.selector_rank:
        own |= {"selector_rank": plan.selector_rank, "selector_top_k": plan.top_k}
    second = bool(plan.conv_kernel_size or plan.selector_rank)
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": int(config.intermediate_size),
        "num_hidden_layers": plan.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.num_key_value_heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "attention_bias": False,
        "is_causal": False,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * plan.layers,
        "sliding_window": plan.sliding_window,
        "use_sliding_window": True,
        "max_window_layers": plan.layers,
        "vocab_size": int(config.vocab_size),
        "num_target_layers": int(config.num_hidden_layers),
        "max_position_embeddings": int(config.max_position_embeddings),
        "rms_norm_eps": float(config.rms_norm_eps),
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": float(rope.get("rope_theta", 10_000.0)), "rope_type": "default"},
        "dflash_config": own,
    }


class Batches:
    """Draws fixed-shape batches from stored teacher states; a batch follows from (seed, step) alone."""

    def __init__(self, teacher: TeacherStates, *, context: int, block_size: int) -> None:
        self._teacher = teacher
        self.context = context
        self._size = block_size
        self._lengths = teacher.starts.diff()

    def drawn(self, rows: torch.Tensor, anchors: torch.Tensor) -> Batch:
        """The batch of given rows [R] and anchor positions [R, A], which count from each row's start."""
        teacher = self._teacher
        device = teacher.tokens.device
        rows = rows.to(device)
        anchors = anchors.to(device)
        starts, lengths = teacher.starts[rows], self._lengths[rows]
        last = len(teacher.tokens) - 1
        window = torch.arange(self.context, device=device)
        # Positions past a row's end read its neighbour, and no block ever sees them.
        places = (starts[:, None] + window).clamp(max=last)
        block = anchors[:, :, None] + torch.arange(self._size, device=device)
        tokens = (starts[:, None, None] + block).clamp(max=last)
        return Batch(
            features=teacher.states[places, :-1].flatten(2),
            positions=anchors,
            block_ids=teacher.tokens[tokens],
            teacher=teacher.states[tokens[:, :, :-1], -1],
            valid=block[:, :, 1:] < lengths[:, None, None],
        )

    def anchors(self, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Anchors from uniform numbers [R, A]: answer positions that have a token after them."""
        device = self._teacher.tokens.device
        rows, uniform = rows.to(device), uniform.to(device)
        first = self._teacher.prompt_lengths[rows]
        room = (self._lengths[rows] - 1 - first).clamp(min=1)
        return first[:, None] + torch.minimum((uniform * room[:, None]).long(), room[:, None] - 1)


def context_length(longest: int) -> int:
    """Context tokens of a batch: the longest row, rounded up to 64 (the mask's kernels want aligned rows)."""
    return -(-longest // 64) * 64
