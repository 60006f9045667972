"""Acceptance of a drafter on stored answers, thousands of prompts in seconds.

Under greedy decoding the output is the target's own whatever the drafter proposes, so each
step of a served request can be read off the stored answer: from the anchor, the drafts that
equal the answer are accepted. The selector's predecessor is the answer's token, which is
exact as long as the path is accepted. One pass takes every answer position as an anchor; the
walk from the first token in strides of accepted + 1 then gives the steps of serving.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from specnb.training.model import Batches, TrainedDrafter, context_length
from specnb.training.target import TargetModel, TeacherStates

_ROWS = 8
_BLOCKS = 64


@torch.no_grad()
def matched_lengths(
    drafter: TrainedDrafter,
    target: TargetModel,
    teacher: TeacherStates,
    precision: Callable[[], AbstractContextManager[Any]],
) -> list[np.ndarray[Any, Any]]:
    """How many drafts in a row equal the answer, for every answer position as the anchor.

    Returns
    -------
    list of array
        One a row, [answer tokens - 1], values 0 to block_size - 1. Drafts past the answer's end count as
        rejected.
    """
    lengths = teacher.starts.diff().cpu().numpy()
    prompts = teacher.prompt_lengths.cpu().numpy()
    batches = Batches(teacher, context=context_length(int(lengths.max())), block_size=drafter.block_size)
    found = [
        np.zeros(max(int(length - prompt) - 1, 0), dtype=np.int64)
        for length, prompt in zip(lengths, prompts, strict=True)
    ]
    pieces = [(row, start) for row, places in enumerate(found) for start in range(0, len(places), _BLOCKS)]
    for first in range(0, len(pieces), _ROWS):
        group = pieces[first : first + _ROWS]
        rows = torch.tensor([row for row, _ in group])
        anchors = torch.tensor([[prompts[row] + start] for row, start in group]) + torch.arange(_BLOCKS)
        # Anchors past the end are computed and thrown away.
        anchors = torch.minimum(anchors, torch.from_numpy(lengths)[rows][:, None] - 1)
        batch = batches.drawn(rows, anchors)
        with precision():
            hidden = drafter(target, batch)
            tokens = drafter.teacher_forced(target, batch, hidden)
        right = (tokens == batch.block_ids[:, :, 1:]) & batch.valid
        run = right.int().cumprod(dim=2).sum(dim=2).cpu().numpy()
        for line, (row, start) in enumerate(group):
            stop = min(start + _BLOCKS, len(found[row]))
            found[row][start:stop] = run[line, : stop - start]
    return found


def walk(matched: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Accepted drafts of each step of serving one answer, from its first token on."""
    steps = []
    place = 0
    while place < len(matched):
        steps.append(int(matched[place]))
        place += steps[-1] + 1
    return np.array(steps, dtype=np.int64)


def acceptance(steps: list[np.ndarray[Any, Any]], *, num_drafts: int) -> dict[str, Any]:
    """Mean acceptance length pooled over the steps of all answers, and survival by position.

    Returns
    -------
    dict
        `mean_acceptance_length` (bonus token included, null without steps), `survival` [num_drafts], `steps`,
        `answers`.
    """
    pooled = np.concatenate(steps) if steps else np.zeros(0, dtype=np.int64)
    if len(pooled) == 0:
        return {"mean_acceptance_length": None, "survival": None, "steps": 0, "answers": len(steps)}
    return {
        "mean_acceptance_length": round(1 + float(pooled.mean()), 4),
        "survival": [round(float((pooled > place).mean()), 4) for place in range(num_drafts)],
        "steps": len(pooled),
        "answers": len(steps),
    }
