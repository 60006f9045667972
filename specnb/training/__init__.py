"""Training a drafter for a target: corpus, hidden states, training, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specnb.training.plan import TrainPlan, read_train_plan

if TYPE_CHECKING:
    from specnb.training.command import Say

__all__ = ["TrainPlan", "read_train_plan", "train"]


def train(plan: TrainPlan, out: Path, *, resume: bool = False, say: Say = lambda line: None) -> Path:
    """Runs a training plan; see `specnb.training.command.train`. Imports torch only here."""
    from specnb.training import command

    return command.train(plan, out, resume=resume, say=say)
