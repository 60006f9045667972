"""Keeps transformers' own progress bars and advice out of specnb's display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers


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
