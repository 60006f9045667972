"""The doctor: each finding on machines and plans made to show it; no model, no torch, no network."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specnb import doctor
from specnb.config import Plan, plan_from_dict
from specnb.doctor import Finding, diagnose
from specnb.engines.base import make_engine
from specnb.errors import PlanError

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
    monkeypatch.setattr(doctor, "_nvidia_cards", lambda: [])
    monkeypatch.setattr(doctor, "_cached_snapshot", lambda name, revision: None)
    set_disk(monkeypatch, 100 * GIB)
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
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
        (
            {"one": "1.0", "two": "2.0"},
            "vllm",
            [("FAILS", "not installed: vllm 3.0; pip install -e '.[gpu]'")],
        ),
        ({"one": "1.0", "two": "2.0", "vllm": "3.0"}, "vllm", [("ok", "3 pinned packages, each at its pin")]),
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
    monkeypatch.setattr(doctor, "_nvidia_cards", lambda: cards)
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
    assert doctor._nvidia_cards() == expected


@pytest.mark.parametrize("fault", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise fault

    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor._nvidia_cards() == []


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


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_engine_that_is_not_there_yet(kind: str) -> None:
    """Remove a kind here when `make_engine` learns it; the two must agree."""
    arms = [
        {"name": "baseline"},
        {"name": "a", "speculative": {"method": "mtp", "num_speculative_tokens": 3}},
    ]
    if kind == "openai":
        arms = [{**arm, "url": "http://localhost:8000"} for arm in arms]
    plan = plan_of(engine={"kind": kind}, arms=arms)
    assert found(plan, "engine") == (
        "FAILS",
        f"engine.kind '{kind}' is not available in this version; use transformers or simulated",
    )
    with pytest.raises(PlanError, match=f"'{kind}' is not available in this version"):
        make_engine(plan)
    assert kind not in doctor.ENGINE_KINDS


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
            (gone, "{m}: no such model directory; check target.model"),
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
    monkeypatch.setattr(doctor, "_tensors", lambda file: iter([("BF16", parameters)]))
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


def test_drafter_directory_that_is_broken(model: Path) -> None:
    (model / "config.json").unlink()
    plan = plan_of(arms=arms_of(method="dflash", model=str(model)))
    state, detail = found(plan, "drafter a")
    assert (state, detail) == ("FAILS", f"{model}/config.json: can't be read (No such file or directory)")


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
