"""The in-process engine on a CUDA device: the unit tests' equality and law, and the demo target's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import ARCHITECTURES, TEXTS, planned, run_arm, save_tiny_target, tiny_plan
from transformers import AutoModelForCausalLM

from specnb.engines.transformers import TransformersEngine
from specnb.workloads import Prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_speculation_equals_baseline_and_generate(tmp_path: Path, name: str) -> None:
    folder = save_tiny_target(tmp_path, ARCHITECTURES[name](), sharpness=4.0)
    engine = TransformersEngine(tiny_plan(folder, device="cuda"))
    assert engine.describe()["device"] == "cuda"
    tables = [run_arm(engine, arm, planned(TEXTS, arm=str(arm))) for arm in (0, 1)]
    answers = [table["requests"]["output_token_ids"].to_list() for table in tables]
    assert answers[0] == answers[1]
    assert tables[1]["steps"]["num_accepted_tokens"].sum() > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    for text, answer in zip(TEXTS, answers[0], strict=True):
        ids = torch.tensor([engine.encode(Prompt(id="x", text=text))], device="cuda")
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert answer == expected[0, ids.shape[1] :].tolist()


def test_sampled_answers_do_not_depend_on_the_device(tmp_path: Path) -> None:
    """Random numbers are the requests' own, drawn on the host: CPU and GPU sample the same tokens."""
    folder = save_tiny_target(tmp_path, vocab_size=16, sharpness=4.0)
    answers = []
    for device in ("cpu", "cuda"):
        engine = TransformersEngine(tiny_plan(folder, device=device, temperature=0.8, top_p=0.9))
        answers.append(run_arm(engine, 1, planned(TEXTS))["requests"]["output_token_ids"].to_list())
    assert answers[0] == answers[1]
