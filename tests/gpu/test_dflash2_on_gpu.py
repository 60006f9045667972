"""Block drafters on a CUDA device draft and accept what they do on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    TEXTS,
    dflash_plan,
    planned,
    run_arm,
    save_tiny_drafter,
    save_tiny_target,
)

from specnb.engines.transformers import TransformersEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COLUMNS = ["request_id", "step", "position", "accepted", "answer_rank", "in_answer"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 3}, {"architectures": ["DFlashDraftModel"]}],
    ids=["DFlash 2", "narrow window", "DFlash"],
)
def test_answers_and_drafts_do_not_depend_on_the_device(
    tmp_path: Path, changes: dict[str, Any], temperature: float
) -> None:
    config = ARCHITECTURES["llama"]()
    config.vocab_size = 8
    folder = save_tiny_target(tmp_path / "target", config, sharpness=8.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", folder, seed=7, **changes)
    arm = {"model": str(drafter), "draft_sample_method": "probabilistic"}
    tables = []
    for device in ("cpu", "cuda"):
        plan = dflash_plan(folder, arm, device=device, temperature=temperature, ignore_eos=True)
        tables.append(run_arm(TransformersEngine(plan), 1, planned(TEXTS)))
    on_cpu, on_gpu = tables
    assert on_gpu["steps"]["num_accepted_tokens"].sum() > 0
    answers = [table["requests"]["output_token_ids"].to_list() for table in tables]
    assert answers[0] == answers[1]
    assert on_gpu["positions"].select(COLUMNS).equals(on_cpu["positions"].select(COLUMNS))


def test_low_precision_runs(tmp_path: Path) -> None:
    """Heads as wide as in real models, in bfloat16, with many requests at once."""
    config = ARCHITECTURES["llama"]()
    config.vocab_size = 4096
    folder = save_tiny_target(tmp_path / "target", config, sharpness=4.0)
    drafter = save_tiny_drafter(tmp_path / "drafter", folder, head_dim=64, dtype="bfloat16")
    arm = {"model": str(drafter), "draft_sample_method": "probabilistic"}
    plan = dflash_plan(
        folder, arm, concurrency=64, dtype="bfloat16", device="cuda", temperature=0.7, ignore_eos=True
    )
    tables = run_arm(TransformersEngine(plan), 1, planned(TEXTS * 20))
    assert set(tables["requests"]["status"]) == {"ok"}
    assert tables["positions"]["draft_prob"].is_between(0, 1).all()
