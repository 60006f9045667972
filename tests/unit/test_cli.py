"""The command line: exit codes, one line for every fault, results on stdout and progress on stderr."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from specnb import cli
from specnb.engines.simulated import SimulatedEngine
from specnb.records import read_run

COMMANDS = ("run", "report", "check", "gate", "doctor", "train", "demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one call gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def specnb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`specnb("run", path, ...)`: the entry point, in this process."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["specnb", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Result(code=end.value.code, out=shown.out, err=shown.err)

    return call


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A plan of two cells for the simulated engine, with a workload of its own."""
    rows = [{"prompt": f"Question {i}?", "tier": "low", "length": "short"} for i in range(4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "small",
        "target": {"model": "m"},
        "engine": {"kind": "simulated"},
        "arms": [
            {"name": "baseline"},
            {"name": "a", "speculative": {"method": "ngram", "num_speculative_tokens": 3}},
        ],
        "workload": {"set": "mine.jsonl", "tiers": ["low"], "lengths": ["short"], "prompts_per_cell": 2},
        "sampling": [{"name": "greedy", "temperature": 0.0, "max_tokens": 8}],
        "load": {"concurrency": [1]},
    }


@pytest.fixture
def plan(content: dict[str, Any], tmp_path: Path) -> Path:
    """That plan in a file."""
    return write(tmp_path / "plan.yaml", content)


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def finished(specnb: Callable[..., Result], plan: Path, tmp_path: Path) -> Path:
    """A finished run of it."""
    result = specnb("run", plan, "--root", tmp_path / "runs")
    assert result.code == 0
    return Path(result.out.strip())


@pytest.fixture
def interrupted(
    specnb: Callable[..., Result], plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A run of it that was stopped in its second cell."""
    run_cell = SimulatedEngine.run_cell

    def stop(engine: SimulatedEngine, cell: Any, *arguments: Any) -> Any:
        if cell.arm.name == "a":
            raise KeyboardInterrupt
        return run_cell(engine, cell, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "run_cell", stop)
        result = specnb("run", plan, "--root", tmp_path / "runs")
    (path,) = (tmp_path / "runs").iterdir()
    assert result.code == 130
    assert result.out == ""
    said = f"specnb: interrupted; finished cells are kept: resume with --resume {path}"
    assert result.err.splitlines()[-1] == said
    return path


def refused(result: Result, said: str) -> None:
    """Bad input: code 2, nothing on stdout, that one line on stderr."""
    assert (result.out, result.err) == ("", f"specnb: {said}\n")
    assert result.code == 2


def complained(result: Result, said: str) -> None:
    """Bad input found once the run began: the last line says so; no traceback."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.splitlines()[-1].startswith(f"specnb: {said}")
    assert "Traceback" not in result.err


# -- help ------------------------------------------------------------------------------------------


def test_commands() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert tuple(commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_docstring(name: str) -> None:
    function = getattr(cli, name)
    assert inspect.getdoc(function)
    result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert inspect.getdoc(function).splitlines()[0] in result.output  # type: ignore[union-attr]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    bare = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert bare == []


def test_no_command_shows_the_help(specnb: Callable[..., Result]) -> None:
    result = specnb()
    assert (result.code, result.err) == (2, "")
    assert all(name in result.out for name in COMMANDS)


def test_help_is_no_fault(specnb: Callable[..., Result]) -> None:
    result = specnb("--help")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chek"], "No such command 'chek'. Did you mean 'check'? see specnb --help"),
        (["frobnicate"], "No such command 'frobnicate'; see specnb --help"),
        (["run"], "Missing argument 'PLAN.yaml'; see specnb run --help"),
        (["check"], "Missing argument 'RUN_DIR'; see specnb check --help"),
        (["run", "a", "b"], "Got unexpected extra argument(s) (b); see specnb run --help"),
        (["run", "--nope", "a"], "No such option: --nope; see specnb run --help"),
        (
            ["gate", "--polcy", "a"],
            "No such option: --polcy (Possible options: --policy); see specnb gate --help",
        ),
        (["run", "a", "--resume"], "Option '--resume' requires an argument; see specnb --help"),
        (["--version"], "No such option: --version; see specnb --help"),
    ],
)
def test_usage(specnb: Callable[..., Result], arguments: list[str], said: str) -> None:
    refused(specnb(*arguments), said)


def test_train_says_what_is_wrong_before_anything_is_loaded(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    said = f"{missing}: can't read the plan (No such file or directory); give the path of a YAML file"
    refused(outside("train", missing), said)
    plan = Path(__file__).parents[2] / "data" / "plans" / "train-demo.yaml"
    empty = tmp_path / "empty"
    refused(
        outside("train", plan, "--resume", empty),
        f"{empty}: holds no training to resume; leave out --resume",
    )
    refused(
        outside("train", plan, "--resume", empty, "--out", empty),
        "--out: --resume names the folder already; give one of the two",
    )


# -- bad plans and workloads -------------------------------------------------------------------------


def test_missing_plan(specnb: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    said = f"{path}: can't read the plan (No such file or directory); give the path of a YAML file"
    for command in ("run", "doctor"):
        refused(specnb(command, path), said)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("repeat",), 2, "unknown key 'repeat'; did you mean 'repeats'?"),
        (
            ("arms", 1, "speculative", "num_speculative_tokens"),
            0,
            "arms[1].speculative.num_speculative_tokens: must be at least 1, got 0",
        ),
        (("load", "concurrency"), [0], "load.concurrency[0]: must be at least 1, got 0"),
        (
            ("engine", "kind"),
            "vlm",
            "engine.kind: must be 'transformers', 'vllm', 'openai' or 'simulated', got",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_bad_plan(
    specnb: Callable[..., Result],
    content: dict[str, Any],
    tmp_path: Path,
    command: str,
    place: tuple[Any, ...],
    value: object,
    said: str,
) -> None:
    spot: Any = content
    for part in place[:-1]:
        spot = spot[part]
    spot[place[-1]] = value
    path = write(tmp_path / "bad.yaml", content)
    result = specnb(command, path)
    assert result.code == 2
    assert result.out == ""
    place_said, _, rest = result.err.partition(": ")[2].partition(": ")
    assert place_said.rpartition(":")[0] == str(path)
    assert int(place_said.rpartition(":")[2]) > 0
    assert rest.startswith(said)
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": no prompts in the file; add one JSON object a line"),
        ("\n\n", ": no prompts in the file; add one JSON object a line"),
        (
            '{"prompt": "a"}\n{"prompt": \n',
            ":2: malformed JSON at column 12 (Expecting value); write one complete JSON object a line",
        ),
    ],
)
def test_bad_workload(
    specnb: Callable[..., Result], plan: Path, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    refused(specnb("run", plan, "--root", tmp_path / "runs"), f"{tmp_path}/mine.jsonl{said}")
    assert not (tmp_path / "runs").exists()


def test_missing_workload(specnb: Callable[..., Result], plan: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").unlink()
    said = "mine.jsonl: no such file; give builtin-en or builtin-zh, or the path of a JSONL file"
    refused(specnb("run", plan, "--root", tmp_path / "runs"), said)


def test_too_few_prompts(specnb: Callable[..., Result], content: dict[str, Any], tmp_path: Path) -> None:
    content["workload"]["prompts_per_cell"] = 9
    result = specnb("run", write(tmp_path / "plan.yaml", content), "--root", tmp_path / "runs")
    refused(
        result,
        "workload mine: 4 prompts of tier low and length short, 9 needed; "
        "ask for fewer or add prompts (it has, by tier: low 4)",
    )


def test_missing_model_directory(content: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed, so the in-process engine can't run")
    content["engine"] = {"kind": "transformers", "device": "cpu"}
    content["target"]["model"] = "./nowhere"
    result = outside("run", write(tmp_path / "plan.yaml", content), "--root", tmp_path / "runs")
    complained(result, "target.model: ./nowhere: no such model directory")
    assert len(result.err.splitlines()) == 2  # what is being loaded, and that it is not there
    assert not (tmp_path / "runs").exists()


def test_engine_that_is_not_installed(
    specnb: Callable[..., Result], content: dict[str, Any], tmp_path: Path
) -> None:
    content["engine"] = {"kind": "vllm", "python": str(tmp_path / "python")}
    result = specnb("run", write(tmp_path / "plan.yaml", content), "--root", tmp_path / "runs")
    complained(result, f"engine.python: {tmp_path / 'python'} can't be run (No such file or directory)")


def test_engine_setting_out_of_range(
    specnb: Callable[..., Result], content: dict[str, Any], tmp_path: Path
) -> None:
    content["engine"]["args"] = {"alpha": 2}
    result = specnb("run", write(tmp_path / "plan.yaml", content), "--root", tmp_path / "runs")
    complained(result, "engine.args (baseline): alpha: ")


# -- bad run directories -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "gate", "report"])
def test_missing_run_directory(specnb: Callable[..., Result], tmp_path: Path, command: str) -> None:
    path = tmp_path / "none"
    said = f"{path}: no such run directory; give a folder that holds manifest.json"
    refused(specnb(command, path), said)


@pytest.mark.parametrize("command", ["check", "gate", "report"])
def test_folder_that_is_no_run(specnb: Callable[..., Result], tmp_path: Path, command: str) -> None:
    said = f"{tmp_path}/manifest.json: can't be read (No such file or directory); "
    refused(specnb(command, tmp_path), f"{said}the run directory is incomplete")


@pytest.mark.parametrize("command", ["check", "gate", "report"])
def test_corrupt_manifest(specnb: Callable[..., Result], finished: Path, command: str) -> None:
    (finished / "manifest.json").write_text('{"run_id": NaN}')
    said = f"{finished}/manifest.json: not valid JSON (NaN is not JSON); the file is corrupt"
    refused(specnb(command, finished), said)


@pytest.mark.parametrize("name", ["requests", "steps"])
def test_gate_on_a_missing_or_corrupt_table(specnb: Callable[..., Result], finished: Path, name: str) -> None:
    file = finished / "cells" / "a.low.c1.greedy.r0" / f"{name}.parquet"
    file.write_bytes(b"PAR1")
    result = specnb("gate", finished)
    complained(result, f"{file}: not a readable Parquet file (")
    assert result.err.count("\n") == 1
    file.unlink()
    refused(specnb("gate", finished), f"{file}: file is missing; the run directory is incomplete")


def test_check_lists_what_fails(specnb: Callable[..., Result], finished: Path) -> None:
    result = specnb("check", finished)
    assert (result.code, result.err) == (0, "")
    assert {line.split()[0] for line in result.out.splitlines()} == {"ok"}
    file = finished / "cells" / "a.low.c1.greedy.r0" / "steps.parquet"
    file.unlink()
    result = specnb("check", finished)
    assert (result.code, result.err) == (1, "")
    failed = [line for line in result.out.splitlines() if line.startswith("FAILS")]
    assert any(f"{file}: file is missing; the run directory is incomplete" in line for line in failed)


def test_bad_policy(specnb: Callable[..., Result], finished: Path, tmp_path: Path) -> None:
    result = specnb("gate", finished, "--policy", tmp_path / "none.yaml")
    complained(result, f"{tmp_path}/none.yaml: ")
    assert result.err.count("\n") == 1
    (tmp_path / "policy.yaml").write_text("minimum_speedups: 2\n")
    result = specnb("gate", finished, "--policy", tmp_path / "policy.yaml")
    complained(result, f"{tmp_path}/policy.yaml")
    assert "minimum_speedups" in result.err
    assert result.err.count("\n") == 1


def test_unknown_notebook(specnb: Callable[..., Result], finished: Path, tmp_path: Path) -> None:
    result = specnb("report", finished, "--notebook", "99", "--out", tmp_path / "out")
    assert result.code == 2
    assert result.out == ""
    assert "99" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


# -- exit codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3])
def test_gate_hands_its_exit_code_to_the_shell(
    specnb: Callable[..., Result], finished: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    from specnb import verdicts

    monkeypatch.setattr(verdicts, "gate_exit_code", lambda verdict, policy: code)
    result = specnb("gate", finished)
    assert (result.code, result.err) == (code, "")
    assert result.out.startswith("a: ")


def test_doctor_hands_its_exit_code_to_the_shell(
    specnb: Callable[..., Result], plan: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    result = specnb("doctor", plan, "--root", tmp_path / "runs")
    assert (result.code, result.err) == (0, "")
    assert "warns  engine     simulated: its numbers say nothing" in result.out
    (tmp_path / "mine.jsonl").write_text("{")
    result = specnb("doctor", plan, "--root", tmp_path / "runs")
    assert (result.code, result.err) == (1, "")
    assert f"FAILS  workload   {tmp_path}/mine.jsonl:1: malformed JSON" in result.out


def test_report_that_failed_exits_1(
    specnb: Callable[..., Result], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specnb import report

    done = SimpleNamespace(out_dir=tmp_path / "out", failed=("02_suffix_decay",))
    monkeypatch.setattr(report, "build_report", lambda *a, **k: done)
    result = specnb("report", finished)
    assert result.code == 1
    assert result.out == f"{tmp_path}/out/index.html\n"
    assert result.err == "specnb: failed: 02_suffix_decay\n"


# -- running and resuming ----------------------------------------------------------------------------


def test_run_prints_the_run_directory_and_its_progress(
    specnb: Callable[..., Result], plan: Path, tmp_path: Path
) -> None:
    result = specnb("run", plan, "--root", tmp_path / "runs")
    assert result.code == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert result.out == f"{path}\n"
    lines = result.err.splitlines()
    assert lines[0] == "Loading the target (m, simulated)"
    assert lines[1].startswith("[1/2] baseline.low.c1.greedy.r0: 2 requests in ")
    assert lines[2].startswith("[2/2] a.low.c1.greedy.r0: 2 requests in ")
    assert ": 2 requests in" in lines[2]
    assert "; 4 of 4 done, about 0 s left" in lines[2]
    assert len(lines) == 3
    assert read_run(path).status == "finished"


def test_interrupted_run_is_resumed(
    specnb: Callable[..., Result], plan: Path, interrupted: Path, tmp_path: Path
) -> None:
    assert read_run(interrupted).status == "interrupted"
    result = specnb("run", plan, "--root", tmp_path / "runs", "--resume", interrupted)
    assert (result.code, result.out) == (0, f"{interrupted}\n")
    assert "[1/1] a.low.c1.greedy.r0: 2 requests in" in result.err
    run = read_run(interrupted)
    assert (run.status, run.requests.height) == ("finished", 4)


def test_resume_with_a_changed_plan(
    specnb: Callable[..., Result], interrupted: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    content["sampling"][0]["max_tokens"] = 9
    content["repeats"] = 2
    result = specnb("run", write(tmp_path / "other.yaml", content), "--resume", interrupted)
    refused(
        result,
        f"{interrupted}: was started with another plan (differs in: repeats, sampling); "
        "resume with the plan in its manifest.json or start a new run",
    )
    assert read_run(interrupted).status == "interrupted"


def test_resume_of_a_finished_run(specnb: Callable[..., Result], finished: Path, plan: Path) -> None:
    said = f"{finished}: this run is finished; nothing to resume"
    refused(specnb("run", plan, "--resume", finished), said)


def test_resume_of_nothing(specnb: Callable[..., Result], plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "none"
    said = f"{path}: no such run directory; give a folder that holds manifest.json"
    refused(specnb("run", plan, "--resume", path), said)


def test_resume_of_a_corrupt_run(specnb: Callable[..., Result], interrupted: Path, plan: Path) -> None:
    (interrupted / "manifest.json").write_text("{}")
    said = f"{interrupted}/manifest.json: key 'schema_version' is missing; the manifest was edited"
    complained(specnb("run", plan, "--resume", interrupted), said)


def test_target_that_can_not_be_written(specnb: Callable[..., Result], plan: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = specnb("run", plan, "--root", tmp_path / "file" / "runs")
    complained(result, f"{tmp_path}/file/runs/small-")
    assert result.err.splitlines()[-1].endswith(
        " can't be written (Not a directory); choose a writable folder"
    )


def test_failed_request_with_on_error_stop(
    specnb: Callable[..., Result], content: dict[str, Any], tmp_path: Path
) -> None:
    content["engine"]["args"] = {"error_rate": 1.0, "baseline_error_rate": 1.0}
    content["on_error"] = "stop"
    result = specnb("run", write(tmp_path / "plan.yaml", content), "--root", tmp_path / "runs")
    complained(result, "baseline.low.c1.greedy.r0: request baseline.low.c1.greedy.r0.0000 failed (")
    (path,) = (tmp_path / "runs").iterdir()
    assert read_run(path).status == "failed"


def test_our_own_fault_keeps_its_traceback(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(SimulatedEngine, "run_cell", broken)
    monkeypatch.setattr(sys, "argv", ["specnb", "run", str(plan), "--root", str(tmp_path / "runs")])
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main()


# -- what is printed ---------------------------------------------------------------------------------


def test_markup_and_line_breaks_in_names_are_text(specnb: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "[bold]x[/nope]\n.yaml"
    said = f"{tmp_path}/[bold]x[/nope] .yaml: can't read the plan (No such file or directory)"
    complained(specnb("run", path), said)


def test_findings_are_one_line_each_and_never_markup(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    cli._print_findings([("ok", "a[red]", f"{long}[/x]\nend"), ("FAILS", "bc", "d")])
    assert capsys.readouterr().out == f"ok     a[red]  {long}[/x] end\nFAILS  bc      d\n"


# -- as a process ------------------------------------------------------------------------------------


def outside(*arguments: object, **environment: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "specnb.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


def test_as_a_process(plan: Path, tmp_path: Path) -> None:
    result = outside("run", plan, "--root", tmp_path / "runs")
    assert result.code == 0
    path = Path(result.out.strip())
    assert read_run(path).status == "finished"
    refused(outside("run", plan, "--resume", path), f"{path}: this run is finished; nothing to resume")
    shutil.rmtree(path / "cells" / "a.low.c1.greedy.r0")
    said = f"{path}/cells/a.low.c1.greedy.r0: listed in the manifest but missing"
    refused(outside("check", path), said)
    refused(outside("nope"), "No such command 'nope'; see specnb --help")


def test_the_installed_command(plan: Path) -> None:
    command = Path(sys.executable).with_name("specnb")
    if not command.exists():
        pytest.skip("specnb's command is not next to this Python; the package is not installed")
    done = subprocess.run(
        [command, "doctor", plan.with_name("none.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_ascii_terminal(plan: Path, tmp_path: Path) -> None:
    """A plan with other letters in its path must not break a C locale."""
    folder = tmp_path / "прогоны"
    result = outside("run", plan, "--root", folder, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert "Traceback" not in result.err
    assert result.code == 0
