"""Many answers at once: a batched decode loop that drops finished rows.

Rows are padded on the left, so that every row writes its next key into the same column of
a cache allocated once; a batch is copied to a smaller one only when a quarter of its rows
has ended. Grouped-query heads share their keys instead of copying them. Greedy and sampled
rows travel together. Knows nothing of prompts' meaning, corpora or drafters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from specnb.training.plan import SAMPLING_CANDIDATES

ATTENTION = "specnb_grouped"
_STEPS_BETWEEN_CHECKS = 8
_KEEP_BELOW = 0.75


class _Column:
    """Where the next keys go; read by every layer."""

    def __init__(self) -> None:
        self.start = 0
        self.shown = 0


class _ColumnLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # __init_subclass__ of transformers
    is_sliding = False
    is_compileable = False

    def __init__(self, column: _Column, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._column = column
        self._capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, width = key_states.shape
        # Zeros, not empty: a NaN in a masked key would still poison its row.
        self.keys = key_states.new_zeros((rows, heads, self._capacity, width))
        self.values = value_states.new_zeros((rows, heads, self._capacity, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys is None or self.values is None:
            raise RuntimeError("the cache holds no keys yet")
        start, stop = self._column.start, self._column.start + key_states.shape[2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return self.keys[:, :, : self._column.shown], self.values[:, :, : self._column.shown]

    def keep_rows(self, rows: torch.Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._column.shown, 0

    def get_seq_length(self) -> int:
        return self._column.start

    def get_max_length(self) -> int:
        return self._capacity


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which the query heads of one group stand in the query's length, for one new token.

    Keys and values are then read once, and the memory-efficient kernel takes the mask.
    """
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if attention_mask is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=heads != groups
        )
    elif length == 1 and heads != groups:
        grouped = query.view(rows, groups, heads // groups, width)
        mask = attention_mask.expand(rows, 1, heads // groups, key.shape[2])
        out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        out = out.reshape(rows, heads, 1, width)
    else:
        key = key.repeat_interleave(heads // groups, dim=1)
        value = value.repeat_interleave(heads // groups, dim=1)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """Registers the grouped attention with transformers and returns its name."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return ATTENTION


def vocabulary_logits(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Logits in float32 from normed hidden states [n, hidden] and the head [vocabulary, hidden].

    A bfloat16 product would round logits near 20 to steps of 0.125, and ties would decide what is greedy.
    """
    with torch.autocast(states.device.type, enabled=False):
        return states.to(head.dtype).float() @ head.float().T


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    top_p: float = 1.0,
    seed: int = 0,
    keep_going: Callable[[], bool] = lambda: True,
) -> list[list[int]]:
    """Answers of one batch of prompts.

    Parameters
    ----------
    model
        A causal language model of transformers with dense attention.
    prompts
        Token ids, each at least one.
    temperatures
        One a prompt; 0 is greedy. Sampled rows draw from the 64 most probable tokens, cut at `top_p`.
    max_new_tokens, stop_ids
        An answer ends after a stop token, which it keeps, or after this many tokens.
    seed
        Sampled answers are the same for the same batch, seed and device.
    keep_going
        Asked now and then; on False the answers so far are returned as they are.

    Returns
    -------
    list of list of int
        Answer tokens in the order of the prompts.
    """
    device = model.device
    longest = max(len(prompt) for prompt in prompts)
    # Multiples of 8: the masked kernels want aligned rows of the mask.
    capacity = -(-(longest + max_new_tokens) // 8) * 8
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    held = torch.zeros((len(prompts), capacity), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        held[row, longest - len(prompt) : longest] = True
    ids, held = ids.to(device), held.to(device)
    column = _Column()
    layers = [_ColumnLayer(column, capacity) for _ in range(model.config.get_text_config().num_hidden_layers)]
    cache = Cache(layers=list(layers))
    heat = torch.tensor(temperatures, dtype=torch.float32, device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    random = torch.Generator(device=device).manual_seed(seed)
    lengths = held.sum(dim=1)
    rows = torch.arange(len(prompts), device=device)
    answers = torch.full((len(prompts), max_new_tokens), -1, dtype=torch.long, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    column.shown = -(-longest // 8) * 8
    shown = held[:, : column.shown]
    causal = torch.arange(column.shown, device=device) <= torch.arange(longest, device=device)[:, None]
    # A padded query sees its own key, so that no row of the mask is empty.
    own = torch.arange(column.shown, device=device) == torch.arange(longest, device=device)[:, None]
    mask = (shown[:, None, None] & causal[None, None]) | own[None, None]
    positions = (held[:, :longest].cumsum(dim=1) - 1).clamp(min=0)
    logits = _forward(model, cache, ids, positions, mask)
    for step in range(max_new_tokens):
        tokens = _pick(logits, heat, top_p, random)
        answers[rows, step] = torch.where(done, -1, tokens)
        done = done | torch.isin(tokens, stops)
        if step + 1 == max_new_tokens:
            break
        if step % _STEPS_BETWEEN_CHECKS == 0:
            alive = ~done
            num_alive = int(alive.sum())
            if num_alive == 0 or not keep_going():
                break
            if num_alive < _KEEP_BELOW * len(rows):
                kept = alive.nonzero().squeeze(1)
                for layer in layers:
                    layer.keep_rows(kept)
                rows, held, lengths, heat = rows[kept], held[kept], lengths[kept], heat[kept]
                tokens, done = tokens[kept], done[kept]
        column.start = longest + step
        column.shown = min(-(-(column.start + 1) // 8) * 8, capacity)
        held[:, column.start] = True
        mask = held[:, None, None, : column.shown]
        logits = _forward(model, cache, tokens[:, None], (lengths + step)[:, None], mask)
    table = answers.cpu().tolist()
    return [row[: row.index(-1)] if -1 in row else row for row in table]


def _forward(
    model: Any, cache: Cache, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Logits of each row's last token, [rows, vocabulary]."""
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=ids.device)
    mask.masked_fill_(~visible, torch.finfo(model.dtype).min)
    out = model.get_decoder()(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
    return vocabulary_logits(out.last_hidden_state[:, -1], model.get_output_embeddings().weight)


def _pick(logits: torch.Tensor, heat: torch.Tensor, top_p: float, random: torch.Generator) -> torch.Tensor:
    """Next token of each row, [rows]: the most probable one where heat is 0, else a draw."""
    width = min(SAMPLING_CANDIDATES, logits.shape[-1])
    values, candidates = logits.topk(width, dim=-1)
    law = torch.softmax(values / heat.clamp(min=1e-3)[:, None], dim=-1)
    # The token that crosses top_p stays, as in the usual definition.
    law = law.masked_fill(law.cumsum(dim=-1) - law >= top_p, 0.0)
    noise = torch.empty_like(law).exponential_(generator=random)
    choice = torch.where(heat > 0, (law / noise).argmax(dim=-1), 0)
    return candidates.gather(1, choice[:, None]).squeeze(1)


class Clock:
    """Seconds since it was started, against a budget."""

    def __init__(self, budget_s: float) -> None:
        self._start = time.perf_counter()
        self.budget_s = budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def open(self) -> bool:
        """Whether budget is left."""
        return self.spent_s < self.budget_s
