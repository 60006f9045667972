"""What every part that loads a target does alike: a quiet transformers, the device, the stop tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from specnb.errors import PlanError


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers while a model loads, and restores its settings."""
    logs: Any = transformers.logging
    level = logs.get_verbosity()
    bars = logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def resolve_device(name: str, *, key: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is a GPU.

    Raises
    ------
    PlanError
        This machine has no such device; `key` names the plan's key.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"{key}: '{name}' is not available here; use cpu, cuda or auto") from error
    return device


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's, else the tokenizer's; may be empty."""
    ids = model.generation_config.eos_token_id
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if not ids and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    return frozenset(ids)
