"""DFlash 2 and plain DFlash: a whole block drafted in one forward, from the target's hidden states.

One draft step feeds each request's last token and K mask tokens; slot j predicts the token at its
own position. Keys and values of everything before come from tapped target layers, of accepted
positions only, so no draft forward ever runs over the context. Inside the block attention goes
both ways. DFlash 2 adds a short causal convolution around attention and MLP, whose coefficients
depend on the input, and a path selector: each slot's top candidates by the target's head are
rescored by the candidate chosen before them.

The proposal is the law over the candidates that the walk really drew from, in float64, so
verification stays lossless. A drafter without selector draws each slot from its own candidates;
this holds for plain DFlash, too, whose proposal is thereby cut to the top candidates.

Knows nothing of verification or records. References: Chen et al., DFlash, arXiv 2602.06036;
the published checkpoints and the authors' package `dflash` 0.1.0 define format and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specnb.drafters.base import Draft, Features
from specnb.drafters.checkpoints import PLACE, Checkpoint, DrafterConfig, TargetShape
from specnb.errors import EngineError
from specnb.provenance import directory_sha256

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_DTYPE_NAMES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a drafter takes from the target: sizes, input embeddings and output head.

    `embedding` is the table as stored (# shape: [vocabulary, hidden]); `head` maps hidden states to logits.
    """

    shape: TargetShape
    embedding: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]

    @property
    def device(self) -> torch.device:
        """Where the drafter runs."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """What the drafter computes in."""
        return self.embedding.dtype


class DFlash2:
    """The block drafter of one checkpoint, DFlash 2 or plain DFlash.

    Parameters
    ----------
    checkpoint, target
        Weights, and the model that verifies; the drafter runs on its device in its dtype.
    num_speculative_tokens
        K. Less than the block holds shortens the block itself: the other slots are not computed.
    draft_sample_method
        `probabilistic` draws from the proposal at temperature > 0, `greedy` takes its best token there,
        too, as a one-hot proposal.
    use_selector
        False leaves the path selector out, where the checkpoint has one.

    Raises
    ------
    EngineError
        The checkpoint does not fit the target, or its weights can't be read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        *,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        use_selector: bool = True,
    ) -> None:
        checkpoint.check_fit(target.shape, num_speculative_tokens=num_speculative_tokens)
        self._checkpoint = checkpoint
        self._num_speculative_tokens = num_speculative_tokens
        self._draft_sample_method = draft_sample_method
        self._use_selector = use_selector and checkpoint.config.selector_rank > 0
        self._training = checkpoint.training()
        self._sha256 = directory_sha256(checkpoint.folder)
        self._model = BlockModel(checkpoint, target)
        self._cache: _ContextCache | None = None
        self._lengths: dict[int, int] = {}
        self._anchors: dict[int, int] = {}
        self._pending: dict[int, tuple[Features, int]] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Longest chain it proposes (K)."""
        return self._num_speculative_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based target layers whose outputs it reads."""
        return self._checkpoint.config.target_layer_ids

    def describe(self) -> dict[str, Any]:
        """Resolved settings and facts of the checkpoint for the manifest.

        `convolution` and `selector` say what drafts in this arm; `weight_bytes` counts the weights as loaded
        (`stored_bytes`: in the files), `kv_bytes_per_token` the drafter's own keys and values of one context
        position. `training` is the checkpoint's own record, null without one.
        """
        config, checkpoint = self._checkpoint.config, self._checkpoint
        stored = sorted(set(checkpoint.dtypes.values()))
        weights = self._model
        return {
            "method": "dflash",
            "label": config.label,
            "architecture": config.architecture,
            "num_speculative_tokens": self._num_speculative_tokens,
            "block_size": config.block_size,
            "num_layers": config.num_layers,
            "num_parameters": checkpoint.num_parameters,
            "weight_bytes": checkpoint.num_parameters * weights.dtype.itemsize,
            "stored_bytes": checkpoint.num_bytes,
            "kv_bytes_per_token": weights.kv_bytes_per_token,
            "target_layer_ids": list(config.target_layer_ids),
            "convolution": config.conv_kernel_size > 0,
            "selector": self._use_selector,
            "selector_rank": config.selector_rank,
            "num_candidates": config.num_candidates,
            "draft_sample_method": self._draft_sample_method,
            "proposal": "one-hot"
            if self._draft_sample_method == "greedy"
            else f"one-hot at temperature 0, else over {config.num_candidates} candidates",
            "dtype": str(weights.dtype).removeprefix("torch."),
            "stored_dtype": ", ".join(_DTYPE_NAMES[name] for name in stored),
            "sha256": self._sha256,
            "training": self._training,
        }

    @torch.inference_mode()
    def begin(self, *, num_slots: int, capacity: int) -> None:
        """Makes room for keys and values, and forgets earlier requests."""
        self._cache = self._model.new_cache(num_rows=num_slots, capacity=capacity)
        self._lengths, self._anchors, self._pending = {}, {}, {}

    @torch.inference_mode()
    def admit(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """Stores keys and values of the prompt, from the target's prefill."""
        self._lengths[slot] = 0
        self._anchors[slot] = token_ids[-1]
        self._remember(slot, features, len(token_ids) - 1)
        self._flush([slot])

    @torch.inference_mode()
    def observe(self, slot: int, token_ids: Sequence[int], features: Features | None = None) -> None:
        """Remembers the states of newly verified positions; `propose` stores them for the whole batch."""
        self._remember(slot, features, len(token_ids))
        self._anchors[slot] = token_ids[-1]

    @torch.inference_mode()
    def propose(
        self, slots: Sequence[int], *, temperature: float, rngs: Sequence[np.random.Generator]
    ) -> list[Draft]:
        """K tokens a slot, with their candidates; drawn if temperature > 0 and the method says so."""
        self._flush(slots)
        count = self._num_speculative_tokens
        anchors = [self._anchors[slot] for slot in slots]
        hidden = self._model.block(
            self._room, slots, anchors, [self._lengths[slot] for slot in slots], num_masks=count
        )
        ids, unary = self._model.candidates(hidden)
        if self._use_selector:
            scores = self._model.edges(hidden, ids, unary, anchors).cpu().numpy()
        else:
            scores = unary.cpu().numpy()[:, :, None, :].repeat(unary.shape[-1], 2)
        uniforms = None
        if temperature > 0 and self._draft_sample_method == "probabilistic":
            uniforms = np.stack([rng.random(count) for rng in rngs])
        places, laws = walk(scores, temperature=temperature, uniforms=uniforms)
        candidates: Ints = ids.cpu().numpy()
        tokens = np.take_along_axis(candidates, places[:, :, None], 2)[:, :, 0].tolist()
        return [
            Draft(
                token_ids=tuple(tokens[row]),
                candidate_ids=candidates[row],
                candidate_probs=None if laws is None else laws[row],
            )
            for row in range(len(slots))
        ]

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copies the row of keys and values; nothing is computed again."""
        self._lengths[target] = self._lengths.pop(source)
        self._anchors[target] = self._anchors.pop(source)
        self._room.copy_row(source, target, self._lengths[target])
        if source in self._pending:
            self._pending[target] = self._pending.pop(source)

    def release(self, slot: int) -> None:
        """Forgets the request; its row is overwritten by the next one."""
        del self._lengths[slot], self._anchors[slot]
        self._pending.pop(slot, None)

    @property
    def _room(self) -> _ContextCache:
        if self._cache is None:
            raise RuntimeError("begin comes before admit")
        return self._cache

    def _remember(self, slot: int, features: Features | None, count: int) -> None:
        if features is None:
            raise RuntimeError("a DFlash drafter needs the target's hidden states")
        if slot in self._pending:
            self._flush([slot])
        self._pending[slot] = (features, count)

    def _flush(self, slots: Sequence[int]) -> None:
        """Stores keys and values of remembered positions, all slots of one target forward at once."""
        forwards: dict[int, list[int]] = {}
        for slot in slots:
            if slot in self._pending:
                forwards.setdefault(id(self._pending[slot][0].states[0]), []).append(slot)
        for group in forwards.values():
            states = self._pending[group[0]][0].states
            width = states[0].shape[1]
            source: list[int] = []
            rows: list[int] = []
            positions: list[int] = []
            for slot in group:
                features, count = self._pending.pop(slot)
                start = self._lengths[slot]
                source += range(features.row * width, features.row * width + count)
                rows += [slot] * count
                positions += range(start, start + count)
                self._lengths[slot] = start + count
            picked = torch.tensor(source, device=states[0].device)
            flat = torch.cat([state.flatten(0, 1)[picked] for state in states], dim=-1)
            self._model.store_context(self._room, flat, rows, positions)


def walk(
    scores: np.ndarray[Any, np.dtype[np.float32]], *, temperature: float, uniforms: Floats | None
) -> tuple[Ints, Floats | None]:
    """Chooses one candidate a slot, each given the one chosen before it.

    Parameters
    ----------
    scores
        Score of each candidate after each candidate of the slot before; at slot 0, where the token
        before is known, all predecessors' rows are equal.  # shape: [rows, slots, predecessors, candidates]
    temperature
        Of the drawing; not used without `uniforms`.
    uniforms
        Numbers in [0, 1) to draw with; None takes the best candidate.  # shape: [rows, slots]

    Returns
    -------
    tuple
        Chosen places among the candidates [rows, slots], and the laws they were drawn from [rows, slots,
        candidates] (None if nothing was drawn).
    """
    num_rows, num_slots, _, num_candidates = scores.shape
    rows = np.arange(num_rows)
    before = np.zeros(num_rows, dtype=np.int64)
    places = np.empty((num_rows, num_slots), dtype=np.int64)
    laws = None if uniforms is None else np.empty((num_rows, num_slots, num_candidates))
    for slot in range(num_slots):
        own = scores[rows, slot, before]
        if laws is None or uniforms is None:
            before = own.argmax(-1)
        else:
            scaled = own.astype(np.float64) / temperature
            weights = np.exp(scaled - scaled.max(-1, keepdims=True))
            law = weights / weights.sum(-1, keepdims=True)
            mass = law.cumsum(-1)
            # A candidate of weight 0 is never drawn: the first place whose cumulative mass is above u.
            before = (mass <= uniforms[:, slot, None] * mass[:, -1:]).sum(-1)
            last = num_candidates - 1 - (law > 0)[:, ::-1].argmax(-1)
            before = np.minimum(before, last)
            laws[:, slot] = law
        places[:, slot] = before
    return places, laws


class BlockModel:
    """The arithmetic of a block drafter: context keys, the block's forward, candidates and their edges."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = target.dtype
        self._target = target
        self._device = target.device
        tensors = checkpoint.tensors(device=self._device, dtype=self.dtype)
        self._fc = tensors["fc.weight"]
        self._hidden_norm, self._norm = tensors["hidden_norm.weight"], tensors["norm.weight"]
        self._layers = [_Layer(config, tensors, number) for number in range(config.num_layers)]
        # One product gives every layer's context keys and values.
        self._context_weight = torch.cat([layer.kv_weight for layer in self._layers])
        self._context_bias = None
        if config.attention_bias:
            self._context_bias = torch.cat(
                [layer.kv_bias for layer in self._layers if layer.kv_bias is not None]
            )
        self._selector = None
        if config.selector_rank:
            self._selector = tuple(
                tensors[f"candidate_selector.{name}"]
                for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
            )
        try:
            self._rotary: Any = Qwen3RotaryEmbedding(Qwen3Config.from_dict(config.raw)).to(self._device)
        except (KeyError, TypeError, ValueError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EngineError(
                f"{PLACE}: {checkpoint.folder}: config.json: no rotary embedding can be made of it ({line})"
            ) from error

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the drafter's own keys and values for one context position, all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_cache(self, *, num_rows: int, capacity: int) -> _ContextCache:
        """Empty room for `num_rows` requests of up to `capacity` positions."""
        return _ContextCache(self.config, num_rows=num_rows, capacity=capacity, like=self._fc)

    def store_context(
        self, cache: _ContextCache, features: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Writes keys and values of verified positions.

        Effects: changes `cache`.

        Parameters
        ----------
        features
            Tapped states side by side.  # shape: [positions, taps * hidden]
        rows, positions
            Cache row and absolute position of each.
        """
        config = self.config
        states = self._rms(functional.linear(features, self._fc), self._hidden_norm)
        both = functional.linear(states, self._context_weight, self._context_bias)
        both = both.view(len(features), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        places = torch.tensor(positions, device=self._device)
        cos, sin = self._rotary(features, places[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        flat = torch.tensor(rows, device=self._device) * cache.capacity + places
        for number, layer in enumerate(self._layers):
            keys = _rotate(self._rms(both[:, number, 0], layer.k_norm), cos, sin)
            cache.write(number, flat, keys, both[:, number, 1])

    def block(
        self,
        cache: _ContextCache,
        rows: Sequence[int],
        anchors: Sequence[int],
        lengths: Sequence[int],
        *,
        num_masks: int,
    ) -> torch.Tensor:
        """Final hidden states of the mask slots.

        Effects: writes the block's keys behind each row's context; the next context overwrites them.

        Parameters
        ----------
        rows, anchors, lengths
            Of each request its cache row, last token, and number of context positions (which is the
            anchor's position).
        num_masks
            Mask slots after the anchor.

        Returns
        -------
        torch.Tensor
            # shape: [requests, num_masks, hidden]
        """
        config, width = self.config, 1 + num_masks
        ids = torch.full((len(rows), width), config.mask_token_id, device=self._device)
        ids[:, 0] = torch.tensor(anchors, device=self._device)
        hidden = functional.embedding(ids, self._target.embedding) * config.input_embedding_scale
        starts = torch.tensor(lengths, device=self._device)[:, None]
        positions = starts + torch.arange(width, device=self._device)
        rotation = self._rotary(hidden, positions)
        row_ids = torch.tensor(rows, device=self._device)[:, None]
        flat = (row_ids * cache.capacity + positions).flatten()
        span = max(lengths) + width
        keys = torch.arange(span, device=self._device)
        present = (keys < starts + width)[:, None]
        masks: dict[int | None, torch.Tensor] = {}
        for window in set(config.sliding_windows):
            visible = present.expand(-1, width, -1)
            if window is not None:
                visible = visible & ((positions[:, :, None] - keys).abs() < window)
            masks[window] = visible
        queries = _Queries(
            rotation=(rotation[0][:, :, None], rotation[1][:, :, None]),
            visible=masks,
            cache=cache,
            rows=rows,
            flat=flat,
            span=span,
        )
        for layer in self._layers:
            hidden = layer.forward(hidden, queries)
        return self._rms(hidden, self._norm)[:, 1:]

    def candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of each slot by the target's head, best first, and their logits in float32.

        Returns
        -------
        tuple of torch.Tensor
            Token ids and logits.  # shape: [requests, slots, candidates] both
        """
        config = self.config
        logits = self._target.head(hidden)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        cap = config.final_logit_softcapping
        if cap > 0:
            logits = torch.tanh(logits / cap) * cap
        best = logits.topk(config.num_candidates, dim=-1)
        return best.indices, best.values.float()

    def edges(
        self, hidden: torch.Tensor, ids: torch.Tensor, unary: torch.Tensor, anchors: Sequence[int]
    ) -> torch.Tensor:
        """Score of each candidate after each candidate of the slot before, in float32.

        Returns
        -------
        torch.Tensor
            At slot 0 the anchor stands for every predecessor.
            # shape: [requests, slots, predecessors, candidates]
        """
        if self._selector is None:
            raise RuntimeError("the checkpoint has no path selector")
        predecessor, successor, projection = self._selector
        first = torch.tensor(anchors, device=self._device)[:, None, None].expand(-1, 1, ids.shape[-1])
        earlier = torch.cat([first, ids[:, :-1]], dim=1)
        gates = functional.linear(hidden, projection).float()
        left = predecessor[earlier].float() * gates[:, :, None]
        return unary[:, :, None] + left @ successor[ids].float().transpose(-1, -2)

    def _rms(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, weight.shape, weight, self.config.rms_norm_eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queries:
    """What every layer needs to know of a block: rotation, visible keys by window, and where its keys go."""

    rotation: tuple[torch.Tensor, torch.Tensor]
    visible: dict[int | None, torch.Tensor]
    cache: _ContextCache
    rows: Sequence[int]
    flat: torch.Tensor
    span: int


class _Layer:
    """One drafter layer: its weights, and the forward of a block of queries."""

    def __init__(self, config: DrafterConfig, tensors: dict[str, torch.Tensor], number: int) -> None:
        self._config = config
        self._number = number
        self._window = config.sliding_windows[number]
        prefix = f"layers.{number}"
        own = {
            name.removeprefix(f"{prefix}."): value
            for name, value in tensors.items()
            if name.startswith(f"{prefix}.")
        }

        def joined(kind: str, *names: str) -> torch.Tensor | None:
            parts = [own[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in own]
            return torch.cat(parts) if parts else None

        heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._qkv = torch.cat([own[f"{name}.weight"] for name in heads])
        self._qkv_bias = joined("bias", *heads)
        queries = config.num_heads * config.head_dim
        self.kv_weight = self._qkv[queries:]
        self.kv_bias = None if self._qkv_bias is None else self._qkv_bias[queries:]
        self._out, self._out_bias = own["self_attn.o_proj.weight"], own.get("self_attn.o_proj.bias")
        self._q_norm, self.k_norm = own["self_attn.q_norm.weight"], own["self_attn.k_norm.weight"]
        self._gate_up = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        self._down = own["mlp.down_proj.weight"]
        self._norms = own["input_layernorm.weight"], own["post_attention_layernorm.weight"]
        self._convolutions: tuple[_Convolution | None, _Convolution | None] = (None, None)
        if config.conv_kernel_size:
            first, second = (
                _Convolution(own[f"{name}.base_kernel"], own[f"{name}.kernel_projection.weight"])
                for name in ("attention_conv", "mlp_conv")
            )
            self._convolutions = (first, second)

    def forward(self, hidden: torch.Tensor, queries: _Queries) -> torch.Tensor:
        """Hidden states after this layer.

        Effects: writes the block's keys and values into the cache.  # shape: [requests, width, hidden]
        """
        hidden = self._sublayer(hidden, 0, lambda values: self._attention(values, queries))
        return self._sublayer(hidden, 1, self._mlp)

    def _sublayer(
        self, hidden: torch.Tensor, which: int, inner: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        convolution = self._convolutions[which]
        values = self._rms(hidden, self._norms[which])
        if convolution is None:
            return hidden + inner(values)
        shifts = convolution.shifts(values)
        values = convolution.apply(values, shifts, side=0)
        return hidden + convolution.apply(inner(values), shifts, side=1)

    def _attention(self, values: torch.Tensor, queries: _Queries) -> torch.Tensor:
        config = self._config
        rows, width, _ = values.shape
        heads, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
        mixed = functional.linear(values, self._qkv, self._qkv_bias)
        mixed = mixed.view(rows, width, config.num_heads + 2 * heads, config.head_dim)
        query, key, value = torch.split(mixed, [config.num_heads, heads, heads], dim=2)
        cos, sin = queries.rotation
        query = _rotate(self._rms(query, self._q_norm), cos, sin)
        key = _rotate(self._rms(key, self.k_norm), cos, sin)
        keys, context = queries.cache.extend(
            self._number, queries.flat, key, value, rows=queries.rows, span=queries.span
        )
        # The queries that share a key head are laid side by side, so that keys are not repeated.
        query = query.view(rows, width, heads, groups, config.head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(rows, heads, groups * width, config.head_dim)
        mask = (
            queries.visible[self._window][:, None]
            .expand(-1, groups, -1, -1)
            .reshape(rows, 1, groups * width, -1)
        )
        out = functional.scaled_dot_product_attention(
            query, keys.transpose(1, 2), context.transpose(1, 2), attn_mask=mask
        )
        out = out.view(rows, heads, groups, width, config.head_dim).permute(0, 3, 1, 2, 4)
        return functional.linear(out.reshape(rows, width, -1), self._out, self._out_bias)

    def _mlp(self, values: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(values, self._gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self._down)

    def _rms(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, weight.shape, weight, self._config.rms_norm_eps)


def _rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with the two halves of a head as real and imaginary parts."""
    left, right = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-right, left], dim=-1) * sin


class _Convolution:
    """Depthwise causal convolution inside a block, its coefficients shifted by the sublayer's input.

    Each channel's output is a sum over the last few slots; a group of neighbouring channels shares the
    shift of its coefficients. Nothing comes from before the block.
    """

    def __init__(self, base: torch.Tensor, projection: torch.Tensor) -> None:
        self._base = base
        self._projection = projection
        self._num_taps = base.shape[1]
        self._num_groups = projection.shape[0] // (2 * self._num_taps)

    def shifts(self, values: torch.Tensor) -> torch.Tensor:
        """Shifts of the coefficients.  # shape: [requests, width, side, tap, group]"""
        return functional.linear(values, self._projection).view(
            *values.shape[:2], 2, self._num_taps, self._num_groups
        )

    def apply(self, values: torch.Tensor, shifts: torch.Tensor, *, side: int) -> torch.Tensor:
        """The convolution before (side 0) or after (side 1) a sublayer.  # shape: as `values`"""
        grouped = values.view(*values.shape[:2], self._num_groups, -1)
        base = self._base[side].view(self._num_taps, self._num_groups, -1)
        coefficients = base + shifts[:, :, side, :, :, None]
        out = coefficients[:, :, 0] * grouped
        for tap in range(1, min(self._num_taps, values.shape[1])):
            out[:, tap:] += coefficients[:, tap:, tap] * grouped[:, :-tap]
        return out.flatten(-2)


class _ContextCache:
    """Keys and values of accepted positions, one row a request; the current block's lie behind them."""

    def __init__(self, config: DrafterConfig, *, num_rows: int, capacity: int, like: torch.Tensor) -> None:
        self.capacity = capacity
        self._num_rows = num_rows
        # Zeros, not empty: a NaN in a masked key would still poison its row.
        self._store = like.new_zeros(
            (config.num_layers, 2, num_rows * capacity, config.num_kv_heads, config.head_dim)
        )

    def write(self, layer: int, flat: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values at flat places (row * capacity + position)."""
        self._store[layer, 0].index_copy_(0, flat, keys)
        self._store[layer, 1].index_copy_(0, flat, values)

    def extend(
        self,
        layer: int,
        flat: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        rows: Sequence[int],
        span: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a block's keys and values; returns the rows' first `span` ones.

        # shape: [requests, span, key heads, head width] both
        """
        self.write(layer, flat, keys.flatten(0, 1), values.flatten(0, 1))
        stores = self._store[layer].view(2, self._num_rows, self.capacity, *self._store.shape[3:])
        first = rows[0]
        if list(rows) == list(range(first, first + len(rows))):
            picked = stores[:, first : first + len(rows), :span]
        else:
            picked = stores[:, list(rows), :span]
        return picked[0], picked[1]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one row to another, all layers."""
        rows = self._store.view(*self._store.shape[:2], self._num_rows, self.capacity, *self._store.shape[3:])
        rows[:, :, target, :length] = rows[:, :, source, :length]
