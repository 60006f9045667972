"""The doctor: each finding on machines and plans made to show it; no model, no torch, no network."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest

from specnb import doctor, telemetry
from specnb.config import Engine, Plan, plan_from_dict, read_plan
from specnb.doctor import Finding, diagnose
from specnb.engines import footprint, preflight, support
from specnb.errors import EngineError

GIB = 1 << 30
TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four cores, 16 GiB, no GPU, 100 GiB of disk, an empty cache, and a folder of its own."""
    facts = {"num_cores": 4, "memory_bytes": 16 * GIB, "processor": "Toy 1000"}
    monkeypatch.setattr(doctor, "host_facts", lambda: facts)
    monkeypatch.setattr(doctor, "_cuda_cards", lambda: [])
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: [])
    monkeypatch.setattr(support, "installed_version", lambda python: "0.32.0")
    monkeypatch.setattr(telemetry, "gpus", lambda: ())
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda: {})
    monkeypatch.setattr(telemetry, "gpu_processes", lambda: {})
    monkeypatch.setattr(doctor, "_cached_snapshot", lambda name, revision: None)
    set_disk(monkeypatch, 100 * GIB)
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE", "SPECNB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def set_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * free, free, free))


def plan_of(**changes: Any) -> Plan:
    """A plan for the simulated engine, 3 prompts in each of 2 tiers; `changes` replace whole sections."""
    return plan_from_dict(
        {
            "name": "p",
            "target": {"model": "m"},
            "engine": {"kind": "simulated"},
            "arms": [
                {"name": "baseline"},
                {"name": "a", "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
            ],
            "workload": {"set": "builtin-en", "tiers": ["low", "high"], "prompts_per_cell": 3},
            "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 16}],
            "load": {"concurrency": [1, 2]},
            "repeats": 2,
            **changes,
        }
    )


def in_process(model: Path | str, dtype: str = "auto", **changes: Any) -> Plan:
    target = {"model": str(model), "dtype": dtype}
    return plan_of(**{"target": target, "engine": {"kind": "transformers", "device": "cpu"}, **changes})


def tensor_file(file: Path, tensors: dict[str, tuple[str, list[int], int]], *, cut: int = 0) -> None:
    """A safetensors file: name -> dtype, shape, bytes."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes((struct.pack("<Q", len(text)) + text + bytes(end))[: -cut or None])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of 1,000 float32 parameters."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    tensor_file(folder / "model.safetensors", {"w": ("F32", [10, 90], 3600), "b": ("F32", [100], 400)})
    return folder


def found(plan: Plan | None, name: str, **options: Any) -> tuple[str, str]:
    """State and detail of the one finding of that name."""
    (finding,) = [finding for finding in diagnose(plan, **options) if finding.name == name]
    return finding.state, finding.detail


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


# -- the machine ---------------------------------------------------------------------------------


def test_machine_alone() -> None:
    findings = diagnose(None)
    assert names(findings) == ["python", "packages", "host", "gpu", "disk", "output"]
    shown = {finding.name: (finding.state, finding.detail) for finding in findings}
    version = ".".join(str(part) for part in sys.version_info[:3])
    assert shown["python"] == ("ok", version)
    assert shown["host"] == ("ok", "4 cores, 16.0 GiB memory, Toy 1000")
    assert shown["gpu"] == ("n/a", "no NVIDIA GPU found; the in-process engine runs on the CPU")
    assert shown["disk"] == ("ok", "100.0 GiB free at data/runs")
    assert shown["output"] == ("ok", "data/runs will be made")


def test_order_of_a_plans_findings() -> None:
    assert names(diagnose(plan_of())) == [
        *["python", "packages", "host", "gpu", "disk", "output"],
        *["engine", "workload", "target", "drafter a", "size", "quantiles", "repeats"],
    ]


def test_findings_are_one_line_each(model: Path) -> None:
    for plan in (None, plan_of(), in_process(model)):
        for finding in diagnose(plan):
            assert "\n" not in finding.detail
            assert finding.state in ("ok", "warns", "FAILS", "n/a")


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MINIMUM_PYTHON", (9, 9))
    state, detail = found(None, "python")
    assert (state, detail.partition(", ")[2]) == ("FAILS", "9.9 or newer is needed; make a new environment")


REQUIRES = ["one==1.0", "two==2.0", 'vllm==3.0; extra == "gpu"', 'ruff==4.0; extra == "test"', "loose>=1"]


@pytest.mark.parametrize(
    ("versions", "kind", "expected"),
    [
        ({"one": "1.0", "two": "2.0"}, None, [("ok", "2 pinned packages, each at its pin")]),
        ({"one": "1.0+cu130", "two": "2.0"}, None, [("ok", "2 pinned packages, each at its pin")]),
        (
            {"one": "1.1", "two": "2.0"},
            None,
            [("warns", "other than pinned: one 1.1 (pinned 1.0); pip install -e .")],
        ),
        (
            {"one": "1.1"},
            None,
            [
                ("FAILS", "not installed: two 2.0; pip install -e ."),
                ("warns", "other than pinned: one 1.1 (pinned 1.0); pip install -e ."),
            ],
        ),
        # Servers may have an environment of their own: their version is the engine's finding.
        ({"one": "1.0", "two": "2.0"}, "vllm", [("ok", "2 pinned packages, each at its pin")]),
    ],
)
def test_packages_against_the_pins(
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    kind: str | None,
    expected: list[tuple[str, str]],
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(importlib.metadata, "version", version)
    plan = plan_of(engine={"kind": kind}) if kind else None
    shown = [(f.state, f.detail) for f in diagnose(plan) if f.name == "packages"]
    assert shown == expected


def test_this_environment_has_its_pins() -> None:
    assert found(None, "packages")[0] == "ok"


def test_specnb_itself_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert found(None, "packages") == ("FAILS", "specnb is not installed here; pip install -e .")


CARDS = [("H200", 141 * GIB), ("L4", 24 * GIB)]


@pytest.mark.parametrize(
    ("engine", "cards", "expected"),
    [
        ({"kind": "simulated"}, CARDS, ("n/a", "the simulated engine uses none")),
        ({"kind": "transformers", "device": "cpu"}, CARDS, ("n/a", "the plan says device: cpu")),
        ({"kind": "transformers"}, [], ("warns", "no CUDA device: device auto means the CPU here")),
        ({"kind": "transformers"}, CARDS, ("ok", "H200, 141.0 GiB")),
        ({"kind": "transformers", "device": "cuda:1"}, CARDS, ("ok", "L4, 24.0 GiB")),
        (
            {"kind": "transformers", "device": "cuda"},
            [],
            ("FAILS", "no CUDA device but the plan says device: cuda; say cpu or auto"),
        ),
        (
            {"kind": "transformers", "device": "cuda:2"},
            CARDS,
            ("FAILS", "engine.device cuda:2: there are 2 CUDA devices, from cuda:0"),
        ),
        (
            {"kind": "transformers", "device": "tpu"},
            CARDS,
            ("FAILS", "engine.device 'tpu' is unknown; use cpu, cuda or auto"),
        ),
        ({"kind": "vllm"}, CARDS, ("ok", "H200, 141.0 GiB; L4, 24.0 GiB")),
        ({"kind": "vllm"}, [], ("FAILS", "no NVIDIA GPU found (nvidia-smi); engine.kind vllm needs one")),
    ],
)
def test_gpu(
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, str],
    cards: list[tuple[str, int]],
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(doctor, "_cuda_cards", lambda: cards)
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: cards)
    assert found(plan_of(engine=engine), "gpu") == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "NVIDIA H200, 143771\nNVIDIA L4, 23034\n",
            [("NVIDIA H200", 143771 << 20), ("NVIDIA L4", 23034 << 20)],
        ),
        ("NVIDIA GB10, [N/A]\n", []),
        ("", []),
    ],
)
def test_cards_as_the_driver_lists_them(
    monkeypatch: pytest.MonkeyPatch, output: str, expected: list[tuple[str, int]]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=output, stderr="")
    )
    assert preflight.nvidia_cards() == expected


@pytest.mark.parametrize("fault", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise fault

    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", run)
    assert preflight.nvidia_cards() == []


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (GIB // 2, ("warns", "0.5 GiB free at data/runs, which is little; use another --root")),
        (50 << 20, ("FAILS", "50 MiB free at data/runs, about 0.3 GiB needed; use another --root")),
        (9 * GIB, ("ok", "9.0 GiB free at data/runs")),
    ],
)
def test_disk(monkeypatch: pytest.MonkeyPatch, free: int, expected: tuple[str, str]) -> None:
    # 16 cells x 1,000 prompts x 100 tokens x 200 bytes = 305 MiB
    set_disk(monkeypatch, free)
    workload = {"set": "builtin-en", "tiers": ["low", "high"], "prompts_per_cell": 1000}
    sampling = [{"name": "greedy", "temperature": 0.0, "max_tokens": 100}]
    plan = plan_of(workload=workload, sampling=sampling)
    assert found(plan, "disk") == expected


@pytest.mark.parametrize("blocked", ["file", "file/runs", "file/a/b"])
def test_output_under_a_file(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "file").touch()
    assert found(None, "output", root=tmp_path / blocked) == (
        "FAILS",
        f"{tmp_path}/file: can't be written (Not a directory); choose another --root",
    )


def test_output_on_a_system_that_takes_no_folders() -> None:
    state, detail = found(None, "output", root=Path("/proc/specnb/runs"))
    assert state == "FAILS"
    assert detail.startswith("/proc: can't be written (")


def test_output_leaves_nothing_behind(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    assert found(None, "output", root=root) == ("ok", f"{root} is writable")
    assert list(root.iterdir()) == []
    assert found(None, "output", root=root / "a" / "b") == ("ok", f"{root}/a/b will be made")
    assert list(root.iterdir()) == []


# -- engine and workload -----------------------------------------------------------------------------


def test_engines() -> None:
    assert found(plan_of(), "engine") == (
        "warns",
        "simulated: its numbers say nothing about a model or a machine",
    )
    assert found(in_process("x"), "engine") == ("ok", "transformers, dtype float32 on cpu")
    assert found(plan_of(engine={"kind": "simulated", "args": {"alpha": 2}}), "engine")[0] == "FAILS"
    assert found(plan_of(engine={"kind": "simulated", "args": {"alfa": 0.5}}), "engine")[0] == "FAILS"


def test_every_kind_of_engine_is_known_here() -> None:
    kinds = Engine.model_fields["kind"].annotation
    assert set(doctor.ENGINE_KINDS) == set(get_args(kinds))


def workload_of(rows: list[dict[str, str]], folder: Path) -> str:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Q{i}", **row}) + "\n" for i, row in enumerate(rows)))
    return str(path)


def test_workload(tmp_path: Path) -> None:
    assert found(plan_of(), "workload") == ("ok", "builtin-en: prompts by tier low 3, high 3")
    rows = [{"tier": "low", "length": "short"}] * 5
    mine = {"set": workload_of(rows, tmp_path), "tiers": ["low"], "prompts_per_cell": 4}
    assert found(plan_of(workload={**mine, "lengths": ["short", "long"]}), "workload") == (
        "warns",
        "mine: prompts by tier low 4; no prompt of low: long",
    )
    state, detail = found(plan_of(workload={**mine, "prompts_per_cell": 6}), "workload")
    assert state == "FAILS"
    assert detail.startswith(
        "workload mine: 5 prompts of tier low and length short, medium or long, 6 needed;"
    )
    state, detail = found(plan_of(workload={**mine, "set": "none.jsonl"}), "workload")
    assert (state, detail.partition(";")[0]) == ("FAILS", "none.jsonl: no such file")
    (tmp_path / "mine.jsonl").write_text("{\n")
    state, detail = found(plan_of(workload=mine), "workload")
    assert state == "FAILS"
    assert detail.startswith(f"{tmp_path}/mine.jsonl:1: malformed JSON")
    # Nothing else of the report depends on it.
    assert found(plan_of(workload=mine), "quantiles") == ("n/a", "the workload can't be read")


# -- target ----------------------------------------------------------------------------------------


def test_target_in_a_directory(model: Path) -> None:
    plan = in_process(model)
    assert found(plan, "target") == ("ok", f"{model}: 0 M parameters")
    assert found(plan, "dtype") == ("ok", "float32")
    # 1,000 x 4 bytes, and 2 sequences x 1,016 tokens x 2 layers x 2 heads x 16 x 2 x 4 bytes of cache
    assert found(plan, "memory") == (
        "ok",
        "about 1 MiB (weights 0 MiB, largest cell's cache 1 MiB) of 16.0 GiB memory",
    )


def breakages() -> list[Any]:
    def no_config(folder: Path) -> None:
        (folder / "config.json").unlink()

    def bad_config(folder: Path) -> None:
        (folder / "config.json").write_text("{")

    def list_config(folder: Path) -> None:
        (folder / "config.json").write_text("[]")

    def pickle(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    def empty(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"")

    def text(folder: Path) -> None:
        (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
        )

    def cut(folder: Path) -> None:
        tensor_file(folder / "model.safetensors", {"w": ("F32", [100], 400)}, cut=1)

    def shard(folder: Path) -> None:
        index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def index(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text("[]")

    def gone(folder: Path) -> None:
        shutil.rmtree(folder)

    return [
        pytest.param(change, said, id=change.__name__)
        for change, said in (
            (gone, "{m}: no such model directory; mend the plan's path"),
            (no_config, "{m}/config.json: can't be read (No such file or directory)"),
            (bad_config, "{m}/config.json: not valid JSON; it is corrupt"),
            (list_config, "{m}/config.json: not a JSON object; it is corrupt"),
            (pickle, "{m}: holds no .safetensors file; convert the weights (pickle is refused)"),
            (empty, "{m}/model.safetensors: not a safetensors file; fetch it again"),
            (text, "{m}/model.safetensors: not a safetensors file; fetch it again"),
            (cut, "{m}/model.safetensors: 472 bytes of 473, so it is truncated; fetch it again"),
            (shard, "{m}: model-2.safetensors of its index is missing; fetch the model again"),
            (index, "{m}/model.safetensors.index.json: can't be read; fetch the model again"),
        )
    ]


@pytest.mark.parametrize(("change", "said"), breakages())
def test_target_directory_that_is_broken(model: Path, change: Callable[[Path], None], said: str) -> None:
    change(model)
    assert found(in_process(model), "target") == ("FAILS", said.format(m=model))


def test_target_of_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = in_process("org/name")
    assert found(plan, "target") == (
        "warns",
        "org/name: not whole in the local cache; it will be fetched from the hub (network)",
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found(plan, "target") == (
        "FAILS",
        "org/name: not whole in the local cache, and HF_HUB_OFFLINE forbids fetching it",
    )
    monkeypatch.setattr(doctor, "_cached_snapshot", lambda name, revision: model)
    assert found(plan, "target") == ("ok", "org/name: 0 M parameters, in the local cache")
    (model / "model.safetensors").unlink()
    assert found(plan, "target")[0] == "FAILS"


@pytest.mark.parametrize("name", ["a/b/c", "bad name", "x" * 90 + "!"])
def test_target_that_is_neither_directory_nor_hub_id(name: str) -> None:
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    assert found(in_process(name), "target") == (
        "FAILS",
        f"{shown}: neither a directory nor a hub id; check target.model",
    )


def test_cache_of_the_hub_is_asked_without_the_network(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(model, folder / "snapshots" / "abc")
    assert doctor._cached_snapshot("org/name", None) == folder / "snapshots" / "abc"
    assert doctor._cached_snapshot("org/name", "abc") == folder / "snapshots" / "abc"
    assert doctor._cached_snapshot("org/name", "other") is None
    assert doctor._cached_snapshot("org/none", None) is None
    assert doctor._cached_snapshot("a/b/c", None) is None


def test_demo_target(model: Path, tmp_path: Path) -> None:
    plan = in_process("demo", "float32")
    assert found(plan, "target") == (
        "warns",
        f"will be fetched once (92 MB) through pip into {tmp_path}/cache; that needs the network",
    )
    shutil.copytree(model, tmp_path / "cache" / "some")
    (tmp_path / "cache" / "some" / "specnb.json").write_text("{}")
    assert found(plan, "target") == ("ok", "demo: 0 M parameters, in the local cache")
    (tmp_path / "cache" / "some" / "config.json").unlink()
    assert found(plan, "target")[1].endswith("; it will be fetched again")


def test_dtype_against_device_and_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(in_process(model, "float16"), "dtype") == (
        "warns",
        "float16 on the CPU is slow, and some operations lack it; use float32",
    )
    assert found(in_process(model, "bfloat16"), "dtype") == (
        "warns",
        "bfloat16, the weights are stored in float32: the law judged is that of bfloat16",
    )
    monkeypatch.setattr(doctor, "_cuda_cards", lambda: CARDS)
    on_gpu = in_process(model, "float16", engine={"kind": "transformers", "device": "cuda"})
    assert found(on_gpu, "dtype")[1].startswith("float16, the weights are stored in float32")
    auto = in_process(model, engine={"kind": "transformers"})
    assert found(auto, "dtype") == ("ok", "auto")
    assert found(auto, "engine") == ("ok", "transformers, dtype auto on cuda")


@pytest.mark.parametrize(
    ("parameters", "dtype", "device", "expected"),
    [
        (27_000_000_000, "bfloat16", "cpu", "FAILS"),  # 50 GiB of 16
        (27_000_000_000, "bfloat16", "cuda", "ok"),  # 50 GiB of 141
        (27_000_000_000, "bfloat16", "cuda:1", "FAILS"),  # 50 GiB of 24
        (4_100_000_000, "float32", "cpu", "warns"),  # 15.3 GiB of 16
        (4_100_000_000, "bfloat16", "cpu", "ok"),
        (4_100_000_000, "auto", "cpu", "warns"),  # auto is float32 on the CPU
        (8_000_000_000, "auto", "cuda:1", "ok"),  # as stored, 14.9 GiB
    ],
)
def test_memory(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: int,
    dtype: str,
    device: str,
    expected: str,
) -> None:
    # The header alone is read; that the data is missing is another finding.
    monkeypatch.setattr(footprint, "_tensors", lambda file: iter([("BF16", parameters)]))
    monkeypatch.setattr(doctor, "_cuda_cards", lambda: CARDS)
    plan = in_process(model, dtype, engine={"kind": "transformers", "device": device})
    state, detail = found(plan, "memory")
    assert state == expected
    size = parameters * (4 if dtype == "float32" or (dtype, device) == ("auto", "cpu") else 2) / GIB
    assert f"weights {size:.1f} GiB" in detail
    if expected == "FAILS":
        assert detail.endswith("; use a smaller dtype or target")


def test_memory_without_what_the_cache_needs(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert found(in_process(model), "memory") == ("ok", "about 0 MiB (weights 0 MiB) of 16.0 GiB memory")


# -- drafters --------------------------------------------------------------------------------------


def arms_of(**speculative: Any) -> list[dict[str, Any]]:
    return [{"name": "baseline"}, {"name": "a", "speculative": {"num_speculative_tokens": 3, **speculative}}]


def test_drafters(model: Path) -> None:
    assert found(plan_of(), "drafter a") == ("ok", "ngram, up to 3 drafts a step")
    state, detail = found(in_process(model, arms=arms_of(method="mtp")), "drafter a")
    assert state == "FAILS"
    assert detail.startswith("speculative.method: 'mtp' is not available in the in-process engine")
    assert found(plan_of(arms=[{"name": "baseline"}]), "drafter") == (
        "warns",
        "no arm speculates; nothing can be compared with the baseline",
    )
    assert found(plan_of(arms=arms_of(method="ngram", num_speculative_tokens=16)), "drafter a") == (
        "warns",
        "num_speculative_tokens 16, but answers end after 16 tokens; lower it or allow more",
    )


@pytest.mark.parametrize("config", [{"block_size": 8}, {"dflash_config": {"block_size": 8}}])
def test_more_drafts_than_a_block_holds(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    speculative = {"method": "dflash", "model": str(model)}
    assert found(plan_of(arms=arms_of(**speculative, num_speculative_tokens=7)), "drafter a")[0] == "ok"
    assert found(plan_of(arms=arms_of(**speculative, num_speculative_tokens=8)), "drafter a") == (
        "warns",
        "num_speculative_tokens 8 is more than the 7 drafts of its block; use 7",
    )


def test_a_drafter_of_the_in_process_engine_is_held_against_its_target(tmp_path: Path) -> None:
    from tiny_models import save_tiny_drafter, save_tiny_target

    target = save_tiny_target(tmp_path / "target")
    drafter = save_tiny_drafter(tmp_path / "drafter", target)
    speculative = {"method": "dflash", "model": str(drafter)}
    plan = in_process(target, arms=arms_of(**speculative))
    assert found(plan, "drafter a") == ("ok", "dflash, up to 3 drafts a step")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    state, detail = found(plan, "drafter a")
    assert (state, detail) == (
        "FAILS",
        f"speculative.model: {drafter}: hidden_size is 32 but the target's is 48; use a drafter trained for "
        "this target",
    )
    missing = in_process(target, arms=arms_of(method="dflash", model=str(tmp_path / "none")))
    assert found(missing, "drafter a") == (
        "FAILS",
        f"speculative.model: {tmp_path / 'none'}: no such model directory",
    )


def test_drafter_directory_that_is_broken(model: Path) -> None:
    (model / "config.json").unlink()
    plan = plan_of(arms=arms_of(method="dflash", model=str(model)))
    state, detail = found(plan, "drafter a")
    assert (state, detail) == ("FAILS", f"{model}/config.json: can't be read (No such file or directory)")


# -- servers that are launched -----------------------------------------------------------------------

PLANS = Path(__file__).parents[2] / "data" / "plans"
H200 = [("NVIDIA H200", 143771 << 20)]


def served(model: Path | str = "org/name", **changes: Any) -> Plan:
    """A plan for a launched vLLM; `engine` and `speculative` are added to, other sections replaced."""
    engine = {"kind": "vllm", "args": {"max_model_len": 2048}, **changes.pop("engine", {})}
    speculative = {"method": "ngram", "num_speculative_tokens": 3, **changes.pop("speculative", {})}
    arms = [{"name": "baseline"}, {"name": "a", "speculative": speculative}]
    return plan_of(target={"model": str(model), "dtype": "bfloat16"}, engine=engine, arms=arms, **changes)


def states(plan: Plan, name: str) -> list[tuple[str, str]]:
    return [(finding.state, finding.detail) for finding in diagnose(plan) if finding.name == name]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has one H200."""
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: H200)


def test_order_of_a_served_plans_findings(model: Path, h200: None) -> None:
    assert names(diagnose(served(model, engine={"port": 18999}))) == [
        *["python", "packages", "host", "gpu", "telemetry", "disk", "output"],
        *["engine", "support", "port", "descriptors", "workload", "target", "dtype", "memory"],
        *["lengths", "time", "drafter a", "size", "quantiles", "repeats", "warm-up"],
    ]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", ("ok", "vllm 0.32.0, dtype bfloat16")),
        ("0.32.0+cpu", ("ok", "vllm 0.32.0+cpu, dtype bfloat16")),
        ("0.31.1", ("warns", "vllm 0.31.1, dtype bfloat16; specnb is tested with 0.32.0")),
    ],
)
def test_version_of_vllm(monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[str, str]) -> None:
    asked = []
    monkeypatch.setattr(support, "installed_version", lambda python: asked.append(python) or version)
    assert found(served(engine={"python": "there/python"}), "engine") == expected
    assert asked == [str(Path.cwd() / "there" / "python")]


def test_wrong_version_fails_before_any_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """DFlash 2 came with 0.28: one line says so, with the place in the plan."""
    monkeypatch.setattr(support, "installed_version", lambda python: "0.27.1")
    dflash = {"method": "dflash", "model": "incoai/Qwen3.8-27B-DFlash2", "num_speculative_tokens": 7}
    failed = [detail for state, detail in states(served(speculative=dflash), "support") if state == "FAILS"]
    assert len(failed) == 1
    assert failed[0].startswith("arms.a: ")
    assert "needs vLLM 0.28, this is 0.27.1" in failed[0]


def test_without_vllm_the_plan_is_judged_for_the_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(python: str | None) -> str:
        raise EngineError("engine.python: here has no vLLM; install it there")

    monkeypatch.setattr(support, "installed_version", absent)
    assert found(served(), "engine") == ("FAILS", "engine.python: here has no vLLM; install it there")
    plan = served(speculative={"rejection_sample_method": "fly"}, modelled=True)
    ((state, detail),) = [pair for pair in states(plan, "support") if "fly" in pair[1]]
    assert state == "FAILS"
    assert "needs vLLM 0.33, this is 0.32.0" in detail
    assert detail.endswith(" (judged for vLLM 0.32.0)")


def test_greedy_drafts_at_a_temperature_are_warned_about(model: Path) -> None:
    sampling = [{"name": "sampled", "temperature": 1.0, "max_tokens": 16}]
    warned = states(served(speculative={"method": "mtp"}, sampling=sampling), "support")
    assert [state for state, _ in warned] == ["warns"]
    assert "draft_sample_method defaults to greedy: at temperature > 0 (sampled)" in warned[0][1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("ok", "H200, 141.0 GiB; L4, 24.0 GiB")),
        ({"devices": "1"}, ("ok", "H200, 141.0 GiB; L4, 24.0 GiB")),
        ({"devices": "0,2"}, ("FAILS", "engine.devices names 2, the last GPU here is 1; mend it")),
        ({"args": {"tensor_parallel_size": 2}}, ("ok", "H200, 141.0 GiB; L4, 24.0 GiB")),
        (
            {"args": {"tensor_parallel_size": 2}, "devices": "0"},
            (
                "FAILS",
                "the plan's parallelism needs 2 GPUs of 1; lower it (H200, 141.0 GiB; L4, 24.0 GiB)",
            ),
        ),
        (
            {"args": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            (
                "FAILS",
                "the plan's parallelism needs 4 GPUs of 2; lower it (H200, 141.0 GiB; L4, 24.0 GiB)",
            ),
        ),
    ],
)
def test_gpus_of_a_server(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: CARDS)
    assert found(served(engine=changes), "gpu") == expected


def test_d11_a_gpu_that_an_orphan_holds(monkeypatch: pytest.MonkeyPatch, h200: None) -> None:
    """70 GiB in use by someone else: vLLM would stop at start, or make its cache silently smaller."""
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda: {"0": 70 * GIB})
    monkeypatch.setattr(telemetry, "gpu_processes", lambda: {"0": (4711,)})
    assert found(served(), "gpu") == (
        "FAILS",
        "GPU 0: 70.0 GiB of 140.4 GiB in use (processes 4711), and vLLM wants 0.92 of it free; "
        "end what holds it",
    )
    assert found(served(engine={"args": {"gpu_memory_utilization": 0.5}}), "gpu")[0] == "ok"


def test_vllm_for_the_cpu_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(support, "installed_version", lambda python: "0.32.0+cpu")
    assert found(served(model), "gpu") == ("n/a", "vLLM's build for the CPU uses none")
    assert found(served(model), "memory") == (
        "warns",
        "about 0 MiB of 16.0 GiB for weights, and most of the rest for keys and values; "
        "set VLLM_CPU_KVCACHE_SPACE in engine.env (GiB)",
    )
    env = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    # 2 GiB over 2 layers x 2 (key, value) x 2 heads x 16 x 2 bytes
    assert found(served(model, engine={"env": env}), "memory") == (
        "ok",
        "about 2.0 GiB (weights 0 MiB, keys and values 2.0 GiB) of 16.0 GiB; room for 8,388,608 tokens",
    )
    state, detail = found(served(model, engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "17"}}), "memory")
    assert (state, detail.rpartition(" needed, ")[2]) == (
        "FAILS",
        "16.0 GiB here; lower VLLM_CPU_KVCACHE_SPACE",
    )
    long = served(model, engine={"env": env, "args": {"max_model_len": 9_000_000}})
    assert found(long, "memory")[1].endswith(
        "one sequence of 9000000 tokens needs 2.1 GiB: the server will not start; lower max_model_len"
    )


def test_telemetry_without_nvml(monkeypatch: pytest.MonkeyPatch, h200: None) -> None:
    assert found(served(), "telemetry") == (
        "warns",
        "NVML gives nothing: GPU memory and power won't be recorded",
    )
    card = telemetry.Gpu(
        index="0", name="H200", uuid="GPU-0", driver="580", memory_bytes=1, power_limit_watts=700.0
    )
    monkeypatch.setattr(telemetry, "gpus", lambda: (card,))
    assert "telemetry" not in names(diagnose(served()))


def test_b38_port_in_use() -> None:
    assert "port" not in names(diagnose(served()))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert found(served(engine={"port": port}), "port") == (
            "FAILS",
            f"engine.port {port}: in use; stop what listens there, "
            "or leave engine.port out to get a free one",
        )
    assert found(served(engine={"port": port}), "port") == ("ok", f"{port} is free")


def test_descriptors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (64, 1024))
    path = workload_of([{"tier": "low", "length": "short"}] * 1000, tmp_path)
    mine = {"set": path, "tiers": ["low"], "lengths": ["short"], "prompts_per_cell": None}
    assert found(served(workload=mine, load={"concurrency": [960]}), "descriptors") == (
        "ok",
        "1024 allowed, 1024 needed",
    )
    assert found(served(workload=mine, load={"concurrency": [961]}), "descriptors") == (
        "FAILS",
        "1024 allowed (ulimit -Hn), 1025 needed; raise it or lower the concurrency",
    )


def test_missing_weights(model: Path, tmp_path: Path) -> None:
    assert found(served(), "target") == (
        "warns",
        "org/name: not whole in the local cache; it will be fetched from the hub (network) "
        "while the GPU waits; fetch it first (hf download)",
    )
    offline = served(engine={"env": {"HF_HUB_OFFLINE": "1"}})
    assert found(offline, "target") == (
        "FAILS",
        "org/name: not whole in the local cache, and HF_HUB_OFFLINE forbids fetching it",
    )
    dflash = {"method": "dflash", "model": "org/drafter", "num_speculative_tokens": 7}
    assert found(served(model, speculative=dflash), "drafter a")[0] == "warns"
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    assert found(served(model, speculative={**dflash, "model": str(drafter)}), "drafter a") == (
        "FAILS",
        f"{drafter}: holds no .safetensors file; convert the weights (pickle is refused)",
    )


def test_config_alone_is_enough_for_dummy_weights_only(tmp_path: Path, h200: None) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(SMALL))
    dummy = {"args": {"load_format": "dummy", "max_model_len": 2048}}
    assert found(served("bare"), "target")[0] == "FAILS"
    assert found(served("bare", engine=dummy), "target")[0] == "FAILS"  # the plan does not say modelled
    assert found(served("bare", engine=dummy, modelled=True), "target") == (
        "ok",
        f"{tmp_path}/bare: 113 M parameters by config.json, no weights",
    )
    unknown = {**SMALL, "num_experts": 8}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(unknown))
    plan = served("bare", engine=dummy, modelled=True)
    assert found(plan, "target") == ("ok", f"{tmp_path}/bare: config.json alone, size unknown")
    assert found(plan, "memory") == (
        "n/a",
        "config.json does not tell what the target needs; not estimated",
    )


SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 64000,
}


MODELLED = PLANS.parent / "models" / "modelled-27b"
DFLASH2 = {"method": "dflash", "model": str(MODELLED / "drafter"), "num_speculative_tokens": 7}


def modelled(*, speculative: dict[str, Any] | None = None, **args: Any) -> Plan:
    """The 27 B pair without weights, greedy, 96 tokens, 1 to 64 at once; `args` are vLLM's."""
    options = {
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.85,
        **args,
    }
    return served(
        MODELLED / "target",
        modelled=True,
        engine={"args": {name: value for name, value in options.items() if value is not None}},
        speculative={**DFLASH2, **(speculative or {})},
        workload={
            "set": str(PLANS.parent / "workloads" / "arithmetic-en.jsonl"),
            "tiers": ["unlabelled"],
            "lengths": ["unlabelled"],
            "prompts_per_cell": 16,
            "prompts_by_concurrency": [{"from_concurrency": 64, "prompts": 192}],
        },
        sampling=[{"name": "greedy", "temperature": 0.0, "max_tokens": 96}],
        load={"concurrency": [1, 8, 64]},
    )


def test_memory_of_the_modelled_pair_on_an_h200(h200: None) -> None:
    """Keys and values take 276 KiB a token: 256 of the target's, 20 of the drafter's."""
    # 0.85 x 143,771 MiB - 47.86 - 3.58 - 3 (assumed) = 64.9 GiB; / 276 KiB = 246,544 tokens
    assert found(modelled(), "memory") == (
        "ok",
        "arm a: about 51.4 GiB (weights 47.9 GiB, drafter 3.6 GiB) of 119.3 GiB (0.85 of 140.4 GiB); "
        "64.9 GiB are left for 246,544 tokens, 64 requests of at most 270 need 17,280",
    )
    assert found(modelled(), "lengths") == (
        "ok",
        "requests of about 270 tokens at most, max_model_len is 4096",
    )
    assert found(modelled(), "drafter a") == (
        "ok",
        "dflash, up to 7 drafts a step, 1,924 M parameters by config.json, no weights",
    )
    assert found(modelled(kv_cache_dtype="fp8"), "memory")[1].partition("left for ")[2].startswith("493,089 ")


def test_shipped_modelled_plans_pass_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: H200 * 2)
    for name in ("h200-27b-modelled", "h200-27b-modelled-tp2"):
        findings = diagnose(read_plan(PLANS / f"{name}.yaml"))
        assert {f.name for f in findings if f.state == "FAILS"} == set()
        assert {f.name for f in findings if f.state == "warns"} <= {"quantiles", "telemetry"}


def test_shipped_modelled_rates_have_the_published_acceptance_lengths() -> None:
    """AL is 1 + the sum of survival; the rates are constant conditionals, rounded to four decimals."""
    plan = read_plan(PLANS / "h200-27b-modelled.yaml")
    rates = {
        arm.name: (arm.speculative.model_extra or {})["synthetic_acceptance_rates"]
        for arm in plan.arms
        if arm.speculative is not None
    }
    lengths = {name: round(1 + sum(values), 4) for name, values in rates.items()}
    assert lengths == {
        "dflash2-gsm8k": 6.22,
        "dflash2-al5-46": 5.46,
        "dflash2-al4-10": 4.1,
        "dflash2-miss": 1.0,
    }
    for name, rate in (("dflash2-al5-46", 0.88707), ("dflash2-al4-10", 0.79503)):
        assert rates[name] == pytest.approx([rate ** (i + 1) for i in range(7)], abs=6e-5)


def test_the_released_pairs_plans_pass_up_to_the_missing_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: H200 * 2)
    card = telemetry.Gpu(
        index="0", name="H200", uuid="GPU-0", driver="580", memory_bytes=1, power_limit_watts=700.0
    )
    monkeypatch.setattr(telemetry, "gpus", lambda: (card,))
    for name in ("", "-thinking", "-tp2"):
        findings = diagnose(read_plan(PLANS / f"qwen3.8-27b-dflash2{name}.yaml"))
        assert {f.name for f in findings if f.state not in ("ok", "n/a")} == {
            "target",
            "drafter dflash2",
            "quantiles",
        }
        assert not [f for f in findings if f.state == "FAILS"]


def test_d06_memory_counts_drafter_logits_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 24 GB card holds no 27 B target; an 80 GB one does until draft logits and length take the rest."""

    def on(*cards: int, **args: Any) -> tuple[str, str]:
        monkeypatch.setattr(doctor, "nvidia_cards", lambda: [("NVIDIA H100", gib * GIB) for gib in cards])
        return found(modelled(speculative={"draft_sample_method": "probabilistic"}, **args), "memory")

    state, detail = on(24)
    assert state == "FAILS"
    assert "one sequence of 4096 tokens needs 1.1 GiB, 0 MiB are left: the server will not start" in detail
    # 128 sequences x 7 drafts x 248,320 x 4 bytes = 0.83 GiB
    state, detail = on(80)
    assert state == "ok"
    assert "(weights 47.9 GiB, drafter 3.6 GiB, draft logits 0.8 GiB) of 68.0 GiB" in detail
    # vLLM's default for such a card, 1,024 sequences, and for a small one, 256
    assert "draft logits 6.6 GiB" in on(80, max_num_seqs=None)[1]
    assert "draft logits 1.7 GiB" in on(48, max_num_seqs=None)[1]
    state, detail = on(80, max_model_len=40960, max_num_seqs=1024)
    assert state == "FAILS"
    assert "one sequence of 40960 tokens needs 10.8 GiB, 6.9 GiB are left" in detail
    state, detail = on(80, gpu_memory_utilization=0.72)
    assert state == "warns"
    assert "requests of at most 270 fit at once, the others wait in the server" in detail
    # Half of everything but the logits on each of two cards, the smaller of which counts.
    state, detail = on(80, 48, tensor_parallel_size=2)
    assert state == "ok"
    assert "(weights 23.9 GiB, drafter 1.8 GiB, draft logits 0.8 GiB) of 40.8 GiB" in detail
    assert "(0.85 of 48.0 GiB, 2 GPUs)" in detail


def test_answers_longer_than_the_server_takes(model: Path, tmp_path: Path) -> None:
    def limited(length: int, tokens: int) -> tuple[str, str]:
        sampling = [{"name": "greedy", "temperature": 0.0, "max_tokens": tokens}]
        return found(served(model, engine={"args": {"max_model_len": length}}, sampling=sampling), "lengths")

    assert limited(512, 512) == ("FAILS", "answers of up to 512 tokens, but max_model_len is 512; raise it")
    state, detail = limited(2048, 16)
    assert state == "ok"
    longest = int(detail.partition("about ")[2].partition(" ")[0])
    assert limited(longest, 16)[0] == "ok"
    assert limited(longest - 1, 16) == (
        "warns",
        f"requests of about {longest} tokens at most, max_model_len is {longest - 1}; raise it",
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 4096}, "hidden_size 4096, the target has 5120"),
        ({"vocab_size": 151936}, "vocab_size 151936, the target has 248320"),
        (
            {"dflash_config": {"block_size": 8, "target_layer_ids": [1, 64]}},
            "taps layer 64 of a target with 64",
        ),
    ],
)
def test_drafter_of_another_target(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((MODELLED / "drafter" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **change}))
    plan = served(
        MODELLED / "target",
        engine={"args": {"load_format": "dummy"}},
        speculative={"method": "dflash", "model": "other", "num_speculative_tokens": 7},
        modelled=True,
    )
    assert found(plan, "drafter a") == (
        "FAILS",
        f"other: {said}; use the drafter that was made for this target",
    )


def test_block_drafter_without_is_causal(tmp_path: Path) -> None:
    config = json.loads((MODELLED / "drafter" / "config.json").read_text())
    del config["is_causal"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    plan = served(
        MODELLED / "target",
        engine={"args": {"load_format": "dummy"}},
        speculative={"method": "dflash", "model": "other", "num_speculative_tokens": 7},
        modelled=True,
    )
    assert found(plan, "drafter a") == (
        "warns",
        "its config.json has sliding windows and no is_causal: it will run causally; add is_causal: false",
    )


def test_k_over_the_trained_block_is_said_once(tmp_path: Path) -> None:
    plan = served(
        MODELLED / "target",
        engine={"args": {"load_format": "dummy"}},
        speculative={"method": "dflash", "model": str(MODELLED / "drafter"), "num_speculative_tokens": 8},
        modelled=True,
    )
    said = [f.detail for f in diagnose(plan) if "drafts of its block" in f.detail]
    assert said == ["arms.a: num_speculative_tokens 8 is more than the 7 drafts of its block; use 7"]


def test_time_on_a_card_of_known_bandwidth(monkeypatch: pytest.MonkeyPatch, h200: None) -> None:
    plan = modelled()
    # 2 arms x 2 repeats x 96 tokens x (16/1 + 16/8 + 192/64) = 8,064 steps;
    # 51.392 GB / (0.7 x 4.8 TB/s) = 15.3 ms; and 4 starts of 90 s
    assert found(plan, "time") == (
        "ok",
        "very roughly 8 min: 4 server starts, 8,064 steps of 15.3 ms; speculating arms need fewer steps",
    )
    monkeypatch.setattr(doctor, "nvidia_cards", lambda: [("Some card", 80 * GIB)])
    assert "time" not in names(diagnose(plan))


def test_prompts_by_concurrency(tmp_path: Path) -> None:
    path = workload_of([{"tier": "low", "length": "short"}] * 20, tmp_path)
    mine = {"set": path, "tiers": ["low"], "lengths": ["short"], "prompts_per_cell": 3}
    steps = {"prompts_by_concurrency": [{"from_concurrency": 8, "prompts": 16}]}
    plan = served(workload={**mine, **steps}, load={"concurrency": [1, 2, 8]})
    assert found(plan, "workload") == ("ok", "mine: prompts by tier low 3 to 16")
    # 2 arms x 2 repeats x (3 + 3 + 16) prompts of 16 tokens
    assert found(plan, "size") == ("ok", "12 cells, 88 requests, at most 1,408 output tokens")
    assert found(plan, "warm-up") == ("ok", "up to 8 requests that are not measured, from 4 prompts")
    assert found(served(workload=mine, load={"concurrency": [1, 8]}), "workload") == (
        "FAILS",
        "mine: prompts by tier low 3; 3 prompts of tier low can't keep 8 requests in flight; "
        "raise workload.prompts_per_cell",
    )


def test_arrivals_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("0.0\n0.5\n2.5\n")

    def of(prompts: int) -> tuple[str, str]:
        workload = {"set": "builtin-en", "tiers": ["low"], "prompts_per_cell": prompts}
        load = {"mode": "open", "trace": "trace.txt", "concurrency": [2]}
        return found(served(workload=workload, load=load), "arrivals")

    assert of(3) == ("ok", "3 arrivals over 2.5 s")
    assert of(4) == ("FAILS", f"{tmp_path}/trace.txt:3: 3 arrivals for 4 requests; use a longer trace")


# -- servers that are running ------------------------------------------------------------------------


@contextmanager
def running(status: int, content: Any) -> Iterator[tuple[str, list[str | None]]]:
    """A server that answers everything with one status and JSON; gives its URL and the keys it was sent."""
    keys: list[str | None] = []
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def attached(*urls: str) -> Plan:
    arms = [
        {"name": "baseline", "url": urls[0]},
        {
            "name": "a",
            "url": urls[-1],
            "speculative": {"method": "mtp", "num_speculative_tokens": 3},
        },
    ]
    return plan_of(engine={"kind": "openai"}, arms=arms)


MODELS = {"object": "list", "data": [{"id": "other"}, {"id": "m"}]}


def test_running_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(200, MODELS) as (first, keys), running(200, MODELS) as (second, _):
        plan = attached(first, f"{second}/v1")
        assert found(plan, "server baseline") == ("ok", f"{first} serves m")
        assert keys == [None]
        assert found(plan, "server a") == ("ok", f"{second}/v1 serves m")
        assert found(plan, "engine") == ("ok", "openai, servers that are running already")
        assert found(plan, "gpu")[0] == found(plan, "target")[0] == "n/a"
        assert found(plan, "api key") == ("n/a", "SPECNB_API_KEY is not set: requests carry no key")
        monkeypatch.setenv("SPECNB_API_KEY", "secret-7")
        findings = diagnose(plan)
        assert keys[-1] == "Bearer secret-7"
        assert [f.detail for f in findings if f.name == "api key"] == ["SPECNB_API_KEY is set"]
        assert not [f for f in findings if "secret-7" in f.detail]
        same = attached(first)
        assert found(same, "server a") == (
            "warns",
            f"{first} is the server of baseline, too: the arms can't differ",
        )


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, {"data": [{"id": "x"}, {"id": "y"}]}, "serves x, y, not target.model m; mend one of them"),
        (200, {"data": []}, "serves nothing, not target.model m; mend one of them"),
        (401, {"error": "no"}, "refuses the key (HTTP 401); set SPECNB_API_KEY"),
        (403, b"", "refuses the key (HTTP 403); set SPECNB_API_KEY"),
        (404, b"<html>", "no list of models (HTTP 404); is it an OpenAI-compatible server?"),
        (200, [], "no list of models (HTTP 200); is it an OpenAI-compatible server?"),
    ],
)
def test_b38_a_server_that_is_not_the_plans(status: int, content: Any, said: str) -> None:
    with running(status, content) as (url, _):
        assert found(attached(url), "server baseline") == ("FAILS", f"{url}: {said}")


def test_server_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    state, detail = found(attached(url), "server baseline")
    assert state == "FAILS"
    assert "\n" not in detail
    assert url.removeprefix("http://") in detail
    assert found(attached("ftp://x"), "server baseline")[0] == "FAILS"


# -- size and what it can show -----------------------------------------------------------------------


def test_size_counts_caps_by_length() -> None:
    # 2 arms x 2 tiers x 2 concurrencies x 2 repeats, 3 prompts: one at each length, capped at 4, 16 and 16.
    plan = plan_of(
        workload={
            "set": "builtin-en",
            "tiers": ["low", "high"],
            "prompts_per_cell": 3,
            "max_tokens": {"short": 4, "long": 99},
        }
    )
    assert found(plan, "size") == ("ok", "16 cells, 48 requests, at most 576 output tokens")
    everything = plan_of(workload={"set": "builtin-en", "tiers": ["low"], "prompts_per_cell": None})
    assert found(everything, "size") == ("ok", "8 cells, every prompt of the workload in each")


@pytest.mark.parametrize(
    ("prompts", "repeats", "expected"),
    [
        (59, 1, ("warns", "P95 needs 60, P99 needs 300 and will not be printed below that")),
        (30, 2, ("warns", "P99 needs 300 and will not be printed below that")),
        (299, 1, ("warns", "P99 needs 300 and will not be printed below that")),
        (150, 2, ("ok", "enough for P95 and P99")),
    ],
)
def test_quantiles(tmp_path: Path, prompts: int, repeats: int, expected: tuple[str, str]) -> None:
    path = workload_of([{"tier": "low", "length": "short"}] * prompts, tmp_path)
    plan = plan_of(
        workload={"set": path, "tiers": ["low"], "lengths": ["short"], "prompts_per_cell": None},
        repeats=repeats,
    )
    state, detail = found(plan, "quantiles")
    group = f"{prompts * repeats} requests a group (tier, sampling, concurrency): "
    assert (state, detail) == (expected[0], group + expected[1])


def test_the_quantiles_needs_are_those_of_the_statistics() -> None:
    for name, least in doctor.QUANTILE_MINIMUM.items():
        tail = 1 - int(name[1:]) / 100
        assert least * tail == pytest.approx(3)


def test_repeats() -> None:
    assert found(plan_of(), "repeats") == ("ok", "2, order abba")
    sampling = [
        {"name": "greedy", "temperature": 0.0, "max_tokens": 16},
        {"name": "warm", "temperature": 1.0, "max_tokens": 16, "repeats": 1},
    ]
    assert found(plan_of(sampling=sampling), "repeats") == (
        "warns",
        "warm runs once: no run-to-run interval and no control; set repeats: 2",
    )


def test_warm_up(model: Path, tmp_path: Path) -> None:
    path = workload_of([{"tier": "low", "length": "short"}] * 4, tmp_path)
    mine = {"set": path, "tiers": ["low"], "prompts_per_cell": 3}
    load = {"concurrency": [1]}
    assert found(in_process(model, workload=mine, load={**load, "warmup_requests": 1}), "warm-up") == (
        "ok",
        "1 requests that are not measured",
    )
    assert found(in_process(model, workload=mine, load={**load, "warmup_requests": 2}), "warm-up") == (
        "warns",
        "the workload has 1 prompts that are not measured, 2 wanted; lower prompts_per_cell",
    )
    assert found(in_process(model, workload=mine, load={**load, "warmup_requests": 0}), "warm-up") == (
        "warns",
        "none: the first cell of each arm pays for it; set load.warmup_requests",
    )


def test_no_torch_for_a_plan_that_needs_none() -> None:
    code = (
        "import sys; from specnb.doctor import diagnose; from specnb.config import read_plan\n"
        "findings = diagnose(read_plan(sys.argv[1])); diagnose(None)\n"
        "assert len(findings) > 10; assert 'torch' not in sys.modules"
    )
    demo = Path(__file__).parents[2] / "data" / "plans" / "demo.yaml"
    done = subprocess.run(
        [sys.executable, "-c", code, str(demo)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
