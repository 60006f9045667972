"""A key-value cache whose rows have different lengths, on unmodified transformers models.

Requests of different length and acceptance share one forward: keys are scattered to each
row's own positions, a 4-D mask shows each query only its row's earlier keys, and rolling
back rejected drafts is simply not advancing the row's length (stale keys stay masked
until they are overwritten). Rows in use are always the first ones, so that a shrinking
batch needs no copies but one row's on each release.

Knows nothing of sampling, drafts or records. Read for transformers 5.17 to 5.19.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = "specnb_ragged"


class Placement:
    """Where the keys of the next forward go; set before each forward, read by every layer."""

    def __init__(self) -> None:
        self.first_row = 0
        self.num_rows = 0
        self.kv_len = 0
        self.flat = torch.empty(0, dtype=torch.long)


class _RaggedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # __init_subclass__ of transformers
    is_sliding = False
    is_compileable = False

    def __init__(self, placement: Placement, *, num_rows: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placement = placement
        self._num_rows = num_rows
        self._capacity = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty: a NaN in a masked key would still poison its row. Token-major, so that
        # scattering is one index_copy_.
        heads, width = key_states.shape[1], key_states.shape[-1]
        self.keys = key_states.new_zeros((self._num_rows * self._capacity, heads, width))
        self.values = value_states.new_zeros(
            (self._num_rows * self._capacity, value_states.shape[1], value_states.shape[-1])
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._stores()
        return self._store(keys, key_states), self._store(values, value_states)

    def _stores(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            raise RuntimeError("the cache holds no keys yet")
        return self.keys, self.values

    def _store(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        place = self._placement
        store.index_copy_(0, place.flat, states.transpose(1, 2).flatten(0, 1))
        rows = store.view(self._num_rows, self._capacity, *store.shape[1:])
        rows = rows[place.first_row : place.first_row + place.num_rows, : place.kv_len]
        return rows.transpose(1, 2)

    def copy_row(self, source: int, target: int, length: int) -> None:
        for store in self._stores():
            rows = store.view(self._num_rows, self._capacity, *store.shape[1:])
            rows[target, :length] = rows[source, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._placement.kv_len, 0

    def get_seq_length(self) -> NoReturn:
        # One number can't describe ragged rows; a model that asks for it would compute wrong positions.
        raise RuntimeError("a ragged cache has no single sequence length")

    def get_max_length(self) -> int:
        return self._capacity


class RaggedCache:
    """Key-value cache for `num_rows` requests of up to `capacity` tokens, and their lengths.

    Parameters
    ----------
    num_layers, num_rows, capacity
        Decoder layers, requests held at once, tokens a request may reach (drafts included).
    device, dtype
        Of the model.
    sliding_window
        Width of sliding-window layers, None without.
    mask_kind
        `full`, `sliding` or `mixed` (a mask for each layer type).
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        sliding_window: int | None = None,
        mask_kind: str = "full",
    ) -> None:
        self.capacity = capacity
        self._device = device
        self._dtype = dtype
        self._sliding_window = sliding_window
        self._mask_kind = mask_kind
        self._placement = Placement()
        self._layers = [
            _RaggedLayer(self._placement, num_rows=num_rows, capacity=capacity) for _ in range(num_layers)
        ]
        self.cache = Cache(layers=list(self._layers))
        self._keys_before = torch.arange(capacity, device=device)

    def inputs(self, *, first_row: int, starts: list[int], width: int) -> dict[str, Any]:
        """Model arguments for rows `first_row ...`, each fed `width` tokens from its own start position.

        Effects: sets where the layers store the keys of the next forward.

        Returns
        -------
        dict
            attention_mask (additive, [rows, 1, width, keys], or one for each layer type),
            position_ids [rows, width], past_key_values, use_cache.
        """
        place = self._placement
        positions = torch.tensor(starts, device=self._device)[:, None] + self._keys_before[:width]
        rows = torch.arange(first_row, first_row + len(starts), device=self._device)[:, None]
        place.first_row, place.num_rows = first_row, len(starts)
        place.kv_len = max(starts) + width
        place.flat = (rows * self.capacity + positions).flatten()
        keys = self._keys_before[: place.kv_len]
        visible = keys <= positions[:, None, :, None]
        full = self._additive(visible)
        mask: Any = full
        if self._sliding_window is not None and self._mask_kind != "full":
            sliding = self._additive(visible & (keys > positions[:, None, :, None] - self._sliding_window))
            mask = sliding
            if self._mask_kind == "mixed":
                mask = {"full_attention": full, "sliding_attention": sliding}
        return {
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` keys and values of one row to another."""
        for layer in self._layers:
            layer.copy_row(source, target, length)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        # The lowest finite number, not -inf: a block of keys that is masked whole must not give NaN.
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~visible, torch.finfo(self._dtype).min)


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
    """Scaled dot product attention that shares keys among grouped heads instead of copying them.

    transformers' own `sdpa` repeats keys and values whenever a mask is given; on a CPU that copy costs
    more than the attention.
    """
    if attention_mask is None:
        raise RuntimeError("ragged attention needs an explicit mask")
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> str:
    """Registers the ragged attention with transformers and returns its name."""
    AttentionInterface.register(ATTENTION, _attention)
    return ATTENTION
