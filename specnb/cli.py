"""The command line: one line of text for every fault, and exit codes a batch system can use.

0 done; 1 a check, gate or report failed; 2 bad input; 3 (gate) no clear answer;
130 interrupted. Imports engines and charts only inside the commands that need them.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specnb.config import DEMO_TARGET, Cell, read_plan
from specnb.errors import PlanError, SpecnbError

if TYPE_CHECKING:
    from specnb.runner import Progress as Hooks

app = typer.Typer(
    name="specnb",
    help="Measures what a speculative-decoding drafter really gains, and whether outputs stay the target's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="A plan.")]


def main() -> None:
    """Entry point: runs a command and turns its faults into one line and an exit code."""
    from specnb.runner import Interrupted

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path that the terminal's encoding lacks must not undo a finished run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Without click's standalone mode a command's typer.Exit comes back as a return value.
        code = app(standalone_mode=False, prog_name="specnb")
    except Interrupted as stop:
        _fail(str(stop), code=130)
    except SpecnbError as error:
        _fail(str(error), code=2)
    except typer.Abort:
        _fail("interrupted", code=130)
    except KeyboardInterrupt:
        _fail("interrupted", code=130)
    except Exception as error:
        # Usage errors of typer are click's; everything else is a fault of ours and keeps its traceback.
        if not hasattr(error, "format_message"):
            raise
        message = str(error.format_message()).strip().rstrip(".")
        if not message:  # no command was given; its help is on the screen
            sys.exit(2)
        context = getattr(error, "ctx", None)
        end = "" if message.endswith("?") else ";"
        _fail(f"{message}{end} see {context.command_path if context else 'specnb'} --help", code=2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str, *, code: int) -> NoReturn:
    _err.print(
        f"specnb: {' '.join(line.split())}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    sys.exit(code)


@app.command()
def run(
    plan: PlanFile,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Continue this unfinished run.")
    ] = None,
    root: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("data/runs"),
) -> None:
    """Measure every arm and cell of a plan into a run directory; exit 1 if requests failed."""
    from specnb.runner import measure

    content = read_plan(plan)
    with _RunProgress(_err) as display:
        path = measure(content, root=root, resume=resume, progress=display.hooks())
    _out.print(str(path), markup=False, highlight=False, soft_wrap=True)
    _report_failures(path)


def _report_failures(run_dir: Path) -> None:
    """Says how many requests of a run failed, and where first; exit 1 if any did."""
    from specnb.records import read_run

    requests = read_run(run_dir).requests
    failed = requests.filter(requests["status"] != "ok")
    if failed.is_empty():
        return
    first = failed.row(0, named=True)
    _fail(
        f"{failed.height} of {requests.height} requests failed, the first in {first['cell_id']}: "
        f"{first['error_kind']}, {first['error']}",
        code=1,
    )


@app.command()
def report(
    run_dir: RunDir,
    notebook: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this notebook, e.g. 02 (repeatable).")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the HTML goes.")] = None,
) -> None:
    """Execute the notebooks on a run and write offline HTML, index.html and verdict.json."""
    _write_report(run_dir, notebooks=notebook, out=out)


@app.command()
def check(run_dir: RunDir) -> None:
    """Check a run directory's invariants; exit 1 if any fails."""
    from specnb.checks import check_run

    findings = check_run(run_dir)
    _print_findings([("ok" if found.ok else "FAILS", found.name, found.detail) for found in findings])
    if any(not finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def gate(
    run_dir: RunDir,
    policy: Annotated[
        Path | None, typer.Option(metavar="POLICY.yaml", help="Thresholds; defaults if left out.")
    ] = None,
) -> None:
    """Exit 0 to adopt, 1 not to, 3 if the run can't say (2 means bad input)."""
    from specnb.checks import refuse_altered_files
    from specnb.records import read_run
    from specnb.verdicts import Policy, gate_exit_code, read_policy, verdict_json

    thresholds = read_policy(policy) if policy else Policy()
    opened = read_run(run_dir)
    # Reading names the column and row of a fault; the digests catch damage that reads without one.
    verdict = verdict_json(opened, thresholds)
    refuse_altered_files(opened)
    for arm in verdict["arms"]:
        _out.print(arm["sentence"], markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(gate_exit_code(verdict, thresholds))


@app.command()
def doctor(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.yaml]", help="A plan to check.")] = None,
    root: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("data/runs"),
) -> None:
    """Say what this machine, and a plan on it, can and can't do, before time is spent."""
    from specnb.doctor import diagnose

    findings = diagnose(read_plan(plan) if plan else None, root=root)
    _print_findings([(found.state, found.name, found.detail) for found in findings])
    if any(finding.state == "FAILS" for finding in findings):
        raise typer.Exit(1)


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="A training plan.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the training; build/NAME by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the training in this folder.")
    ] = None,
) -> None:
    """Make a corpus in the target's own words, train the plan's drafters on it and publish them."""
    from specnb.training import read_train_plan
    from specnb.training import train as run_training

    if out is not None and resume is not None:
        raise PlanError("--out: --resume names the folder already; give one of the two")
    content = read_train_plan(plan)
    folder = resume or out or Path("build") / content.name
    run_training(content, folder, resume=resume is not None, say=_say)
    _out.print(str(folder), markup=False, highlight=False, soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the reports go.")] = Path("reports/demo"),
    root: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("data/runs"),
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.yaml", help="Another plan than the demo's.")
    ] = None,
) -> None:
    """Measure the embedded default, with and without speculation, and write its reports."""
    from specnb.demo import demo_plan_path, ensure_demo_target
    from specnb.runner import measure

    began = time.perf_counter()
    content = read_plan(plan or demo_plan_path())
    if content.target.model == DEMO_TARGET:
        ensure_demo_target(say=_say)
    with _RunProgress(_err) as display:
        path = measure(content, root=root, progress=display.hooks())
    measured = time.perf_counter()
    _say(f"Measured in {(measured - began) / 60:.1f} min: {path}")
    _write_report(path, notebooks=None, out=out)
    _say(f"Reports in {(time.perf_counter() - measured) / 60:.1f} min")


def _write_report(run_dir: Path, *, notebooks: list[str] | None, out: Path | None) -> None:
    from specnb.checks import refuse_altered_files
    from specnb.records import read_run
    from specnb.report import build_report

    refuse_altered_files(read_run(run_dir))
    result = build_report(run_dir, notebooks=notebooks, out_dir=out, progress=_say)
    _out.print(str(result.out_dir / "index.html"), markup=False, highlight=False, soft_wrap=True)
    if result.failed:
        _err.print(f"specnb: failed: {', '.join(result.failed)}", style="bold red", markup=False)
        raise typer.Exit(1)


def _print_findings(rows: Sequence[tuple[str, str, str]]) -> None:
    """One line each, state first and never wrapped, so that a log can be searched."""
    width = max(len(name) for _, name, _ in rows)
    for state, name, detail in rows:
        line = f"{state:5}  {name:{width}}  {' '.join(detail.split())}"
        style = {"FAILS": "bold red", "warns": "yellow"}.get(state)
        _out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _say(line: str) -> None:
    _err.print(line, markup=False, highlight=False, soft_wrap=True)


class _RunProgress:
    """A bar on a terminal, one line a cell elsewhere: requests done, cell, arm, estimated time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, left="")
        self._began = self._cell_began = time.perf_counter()
        self._cells_total = self._cells_done = 0
        self._requests_total = self._requests_done = 0
        self._in_cell = 0

    def __enter__(self) -> _RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def hooks(self) -> Hooks:
        """The callbacks that `measure` takes."""
        from specnb.runner import Progress as Hooks

        return Hooks(
            on_start=self._on_start,
            on_message=lambda line: self._console.print(line, markup=False, highlight=False, soft_wrap=True),
            on_cell=self._on_cell,
            on_request=self._on_request,
            on_cell_done=self._on_cell_done,
        )

    def _on_start(self, cells: int, requests: int) -> None:
        self._cells_total, self._requests_total = cells, requests
        self._began = time.perf_counter()
        self._bar.update(self._task, total=requests)

    def _on_cell(self, cell: Cell, requests: int) -> None:
        self._in_cell = requests
        self._cell_began = time.perf_counter()
        self._bar.update(
            self._task, description=f"cell {self._cells_done + 1}/{self._cells_total} {cell.cell_id}"
        )

    def _on_request(self) -> None:
        self._requests_done += 1
        self._bar.update(self._task, advance=1, left=self._left())

    def _on_cell_done(self, cell: Cell) -> None:
        self._cells_done += 1
        seconds = time.perf_counter() - self._cell_began
        if not self._console.is_terminal:
            self._console.print(
                f"[{self._cells_done}/{self._cells_total}] {cell.cell_id}: {self._in_cell} requests in "
                f"{seconds:.1f} s; {self._requests_done} of {self._requests_total} done, {self._left()}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def _left(self) -> str:
        if self._requests_done == 0:
            return ""
        elapsed = time.perf_counter() - self._began
        left = elapsed / self._requests_done * (self._requests_total - self._requests_done)
        return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


if __name__ == "__main__":
    main()
