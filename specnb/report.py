"""From a run directory to offline HTML: execute the notebooks, render each, write the index.

Execution and rendering are two steps: a notebook that fails, dies or hangs still becomes a
page, marked FAILED and naming the cell, and the caller learns of it. Notebooks run in
the interpreter that runs this code, whatever kernel their author had. Pages load nothing
over the network and forbid it: one bundle of Vega a page, everything else inline, all
model output escaped. May import notebook, verdicts and below; nothing imports it but the
command line.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import html
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jinja2
import nbformat
import papermill
import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from markupsafe import Markup
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from papermill.exceptions import PapermillException
from traitlets import default

from specnb import __version__, notebook, theme
from specnb.errors import NotebookError, SpecnbError, StorageError
from specnb.provenance import git_sha, utc_now
from specnb.records import Run, read_run

CELL_TIMEOUT_S: Final = 1800
START_TIMEOUT_S: Final = 120
MAX_PAGE_BYTES: Final = 5_000_000

_CHART_SCHEMA: Final = "https://vega.github.io/schema/vega-lite/v6.json"
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a notebook: its name, default value and the help comment beside it."""

    name: str
    default: object
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An executed notebook: its cells as far as they got, and what went wrong (None if nothing)."""

    node: NotebookNode
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a report; `failure` is None for a page whose notebook ran to its end."""

    name: str
    title: str
    claims: tuple[Mapping[str, Any], ...] = ()
    failure: str | None = None

    @property
    def file(self) -> str:
        """The page's file name."""
        return f"{self.name}.html"

    @property
    def label(self) -> str:
        """Short name for navigation: `02 suffix decay`."""
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """What was written: the folder, its HTML pages (index last) and the notebooks that failed."""

    out_dir: Path
    pages: tuple[Path, ...]
    failed: tuple[str, ...] = field(default=())


class _ThisInterpreter(AsyncKernelManager):  # type: ignore[misc, unused-ignore]
    """Starts the IPython kernel of the running interpreter; no installed kernelspec is looked up."""

    @default("transport_encryption")
    def _encrypt_where_possible(self) -> str:
        return "auto" if zmq.has("curve") else "disabled"

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="specnb",
            language="python",
            env={"PYDEVD_DISABLE_FILE_VALIDATION": "1"},
            metadata={"supported_encryption": "curve"},
        )


def build_report(
    run_dir: Path | str,
    *,
    notebooks: Sequence[str] | None = None,
    out_dir: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ReportResult:
    """Executes notebooks on a run and writes `index.html`, a page a notebook and `verdict.json`.

    Parameters
    ----------
    run_dir
        A run directory.
    notebooks
        Names (`02`, `02_suffix_decay`) or paths of notebooks; all of the repository if None.
    out_dir
        Folder for the pages; `reports/RUN_ID` if None. Pages of notebooks that are not built now are
        removed, so that no page of another run stays beside these.
    progress
        Called with one line before each slow step.

    Returns
    -------
    ReportResult
        `failed` names notebooks that did not run to their end, and `verdict` if it could not be computed;
        the pages exist and say so.

    Raises
    ------
    RecordError
        The run can't be read.
    NotebookError
        A notebook is unknown, or its structure or parameters are wrong; found before any is executed.
    StorageError
        The pages can't be written.
    """
    say = progress or (lambda line: None)
    run = read_run(run_dir)
    paths = find_notebooks(notebooks)
    parameters = {"run_dir": str(Path(run_dir).resolve()), "plan": ""}
    for path in paths:
        check_parameters(path, parameters)
    folder = Path(out_dir) if out_dir is not None else Path("reports") / run.run_id
    _make_folder(folder, keep={path.stem for path in paths})

    pages: list[Page] = []
    bodies: dict[str, str] = {}
    verdict: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="specnb-report-") as scratch:
        for number, path in enumerate(paths, start=1):
            say(f"[{number}/{len(paths)}] {path.stem}")
            executed = execute_notebook(
                path, Path(scratch) / path.name, parameters=parameters, run_id=run.run_id
            )
            page, body = render_body(path.stem, executed)
            pages.append(page)
            bodies[page.name] = body
            verdict = verdict or _verdict_of(executed)
            if page.failure:
                say(f"{path.stem} FAILED: {page.failure}")
    failed = [page.name for page in pages if page.failure]
    problem = None
    if verdict is None:
        from specnb.verdicts import verdict_json

        say("Computing the verdict")
        try:
            verdict = verdict_json(run)
        except SpecnbError as error:
            # The pages are written all the same; a verdict of an earlier report must not stay beside them.
            problem = str(error)
            failed.append("verdict")
            (folder / "verdict.json").unlink(missing_ok=True)

    written = [
        _write(folder / page.file, render_page(run, page=page, pages=pages, body=bodies[page.name]))
        for page in pages
    ]
    if verdict is not None:
        text = json.dumps(verdict, indent=2, ensure_ascii=False, allow_nan=False)
        _write(folder / "verdict.json", text + "\n")
    index = render_index(run, pages=pages, verdict=verdict, problem=problem)
    written.append(_write(folder / "index.html", index))
    return ReportResult(out_dir=folder, pages=tuple(written), failed=tuple(failed))


def find_notebooks(names: Sequence[str] | None = None) -> tuple[Path, ...]:
    """Paths of notebooks by number, name or path; every numbered notebook of the repository if None.

    Raises
    ------
    NotebookError
        A name fits no notebook or two; the message lists the known ones.
    """
    folder = Path(__file__).resolve().parents[1] / "notebooks"
    known = {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if names is None:
        if not known:
            raise NotebookError(f"{folder}: no notebook found; run specnb from its checkout")
        return tuple(known.values())
    found: list[Path] = []
    for name in names:
        given = Path(name)
        if given.suffix == ".ipynb" and given.exists():
            found.append(given)
            continue
        stem = given.name.removesuffix(".ipynb")
        fits = [known[stem]] if stem in known else [path for key, path in known.items() if key[:2] == stem]
        if len(fits) != 1:
            raise NotebookError(f"notebook '{name}' is not known; there are {', '.join(known) or 'none'}")
        found += fits
    stems = [path.stem for path in found]
    if len(set(stems)) < len(stems):
        raise NotebookError(f"notebooks: {', '.join(stems)} names one twice; give each once")
    return tuple(found)


# Before execution


def read_notebook(path: Path) -> NotebookNode:
    """A notebook file, valid as nbformat 4.

    Raises
    ------
    NotebookError
        The file is missing, not JSON, or not a notebook.
    """
    try:
        node: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(node)
    except OSError as error:
        raise NotebookError(
            f"{path}: can't be read ({error.strerror}); give the path of a notebook"
        ) from error
    except (ValueError, nbformat.ValidationError) as error:
        raise NotebookError(f"{path}: not a valid notebook ({str(error).splitlines()[0]})") from error
    return node


def inspect_parameters(path: Path) -> dict[str, Parameter]:
    """Parameters of a notebook by name, checked so that each override takes effect.

    Raises
    ------
    NotebookError
        There is not exactly one cell tagged `parameters`, it was executed by papermill before, or the
        cell holds more than assignments of literals (a derived value would keep its old content).
    """
    node = read_notebook(path)
    tagged = [cell for cell in node.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise NotebookError(
            f"{path}: {len(tagged)} cells are tagged 'parameters', exactly one must be; "
            "otherwise values that are passed in are overwritten or ignored"
        )
    if any("injected-parameters" in cell.metadata.get("tags", []) for cell in node.cells):
        raise NotebookError(
            f"{path}: holds an 'injected-parameters' cell; use the source, not an executed copy"
        )
    source = tagged[0].source
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NotebookError(f"{path}: parameters cell, line {error.lineno}: {error.msg}") from error
    lines = source.splitlines()
    found: dict[str, Parameter] = {}
    for statement in tree.body:
        name, value = _assignment(statement)
        try:
            default = ast.literal_eval(value) if value is not None else None
        except ValueError:
            value = None
        if name is None or value is None:
            raise NotebookError(
                f"{path}: parameters cell, line {statement.lineno}: '{lines[statement.lineno - 1].strip()}' "
                "is not an assignment of a literal; a derived value would keep its old content: move it"
            )
        comment = lines[(statement.end_lineno or statement.lineno) - 1].partition("#")[2].strip()
        found[name] = Parameter(name=name, default=default, text=comment)
    return found


def check_parameters(path: Path, given: Iterable[str]) -> None:
    """Refuses parameters that the notebook does not have.

    Raises
    ------
    NotebookError
        A name is unknown; the message lists the known ones. Also as `inspect_parameters`.
    """
    known = inspect_parameters(path)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise NotebookError(
            f"{path}: unknown parameter {', '.join(unknown)}; it has {', '.join(known) or 'no parameters'}"
        )


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, statement.value
    return None, None


# Execution


def execute_notebook(
    path: Path,
    output: Path,
    *,
    parameters: Mapping[str, object],
    run_id: str | None = None,
    timeout_s: int = CELL_TIMEOUT_S,
) -> Execution:
    """Executes a copy of a notebook with papermill; the source is not touched.

    Parameters
    ----------
    path, output
        The source, and where the executed copy goes.
    parameters
        Values of the parameters cell.
    run_id
        The run that the last cell must name; None skips that check.
    timeout_s
        Longest time a cell may take, in seconds.

    Returns
    -------
    Execution
        `failure` is one sentence that names the cell: an exception, a dead kernel, a timeout, a cell
        that never ran, or a notebook that ended without its provenance cell.

    Raises
    ------
    NotebookError
        Structure or parameters are wrong (`check_parameters`).
    """
    check_parameters(path, parameters)
    if path.resolve() == output.resolve():
        raise NotebookError(f"{path}: the executed copy would replace the source; give another output")
    fault: str | None = None
    raised: str | None = None
    started: list[str] = []
    with _quiet_papermill():
        try:
            papermill.execute_notebook(
                str(path),
                str(output),
                dict(parameters),
                kernel_name="python3",
                language="python",
                progress_bar=False,
                start_timeout=START_TIMEOUT_S,
                execution_timeout=timeout_s,
                kernel_manager_class=_ThisInterpreter,
                resources={"metadata": {"path": str(output.parent)}},
                on_cell_start=lambda cell, cell_index: started.append(cell.get("id", "")),
            )
        except (CellExecutionError, PapermillException) as error:
            raised = f"Execution failed: {_one_line(str(error))}."
        except CellTimeoutError:
            fault = f"took longer than {timeout_s} s and was stopped"
        except DeadKernelError:
            fault = "lost its kernel (killed, or out of memory)"
        except RuntimeError as error:
            fault = f"could not run: the kernel did not start ({_one_line(str(error))})"
    node = read_notebook(output if output.exists() else path)
    # Cells that papermill adds would shift the numbers by which people find a cell in the source.
    added = {"papermill-error-cell-tag", "injected-parameters"}
    node.cells = [cell for cell in node.cells if added.isdisjoint(cell.metadata.get("tags", []))]
    # The cell's own output says more than the exception that papermill made of it.
    found = _failure(node, run_id, fault=fault, stopped_in=started[-1:])
    return Execution(node=node, failure=found or raised)


def _failure(
    node: NotebookNode, run_id: str | None, *, fault: str | None = None, stopped_in: Sequence[str] = ()
) -> str | None:
    """What is wrong with an executed notebook, whatever the exception that did or did not reach us."""
    code = [
        (number, cell) for number, cell in enumerate(node.cells) if cell.cell_type == "code" and cell.source
    ]
    if fault:
        numbers = [number for number, cell in code if cell.get("id") in stopped_in]
        return f"{_place(node, numbers[0]) if numbers else 'The notebook'} {fault}."
    for number, cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                value = _one_line(_ANSI.sub("", output.evalue))
                return f"{_place(node, number)} raised {output.ename}: {value}."
        if cell.metadata.get("papermill", {}).get("exception") is True:
            return f"{_place(node, number)} raised an exception."
        if cell.execution_count is None:
            return f"{_place(node, number)} was not executed."
    ends = [
        output.data[notebook.END_MIME]
        for output in (code[-1][1].outputs if code else [])
        if notebook.END_MIME in output.get("data", {})
    ]
    if not ends:
        return "The last cell is not the provenance cell, so the notebook may be cut short."
    if run_id is not None and ends[-1]["run_id"] != run_id:
        return f"The notebook analysed run {ends[-1]['run_id']}, not {run_id}: its parameters had no effect."
    return None


def _place(node: NotebookNode, number: int) -> str:
    """A cell's number for people (cells counted from 1), its id, and the heading it stands under."""
    heading = ""
    for cell in node.cells[:number]:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("#"):
                    heading = line.lstrip("# ").strip()
    cell = node.cells[number]
    under = f", under '{heading}'" if heading else ""
    return f"Cell {number + 1} ({cell.get('id', 'no id')}{under})"


class _quiet_papermill:
    """Holds back papermill's log lines while it runs: faults are returned, not logged."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("papermill")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL + 1)

    def __exit__(self, *exception: object) -> None:
        self._logger.setLevel(self._level)


# Rendering


def render_body(name: str, executed: Execution) -> tuple[Page, str]:
    """The page and the HTML of its content: verdict first, then prose and outputs, no code.

    Parameters
    ----------
    name
        The notebook's name, which becomes the page's.
    executed
        From `execute_notebook`; failed ones are rendered as far as they got.
    """
    node = _copy(executed.node)
    title = _take_title(node) or name
    claims: list[Mapping[str, Any]] = []
    figures: list[str] = []
    headline: list[NotebookNode] = []
    for cell in node.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.output_type = "display_data"
                output.pop("execution_count", None)
            claims += output.get("data", {}).get(notebook.CLAIMS_MIME, {}).get("claims", [])
            _prepare_output(output, figures)
        if "verdict" in cell.metadata.get("tags", []) and cell.outputs and executed.failure is None:
            copy = _copy(cell)
            copy.id = f"headline-{len(headline)}"
            copy.metadata["tags"] = ["headline"]
            headline.append(copy)
    node.cells = headline + list(node.cells)
    exporter = _exporter()
    body, _ = exporter.from_notebook_node(node)
    for number, figure in enumerate(figures):
        body = body.replace(_placeholder(number), figure)
    page = Page(name=name, title=title, claims=tuple(claims), failure=executed.failure)
    return page, body


def render_page(run: Run, *, page: Page, pages: Sequence[Page], body: str) -> str:
    """A whole page: navigation, title, banner if it failed, content, footer, and Vega if it holds charts."""
    scripts = [_vega_bundle(), _template("charts.js")] if 'class="chart"' in body else []
    return _page(
        run,
        title=page.title,
        current=page.name,
        pages=pages,
        body=body,
        failure=f"{notebook.scrub(page.failure)} What follows stops there: nothing on this page is a result."
        if page.failure
        else None,
        scripts=scripts,
        # A failed notebook may have stopped before its conditions box, which holds the banners.
        banners=notebook.banners(run) if "specnb-conditions" not in body else [],
    )


def render_index(
    run: Run, *, pages: Sequence[Page], verdict: Mapping[str, Any] | None, problem: str | None = None
) -> str:
    """The index page: final verdict, conditions, one row a notebook with its claims, limits.

    Parameters
    ----------
    run, pages
        The run, and the pages that were made.
    verdict
        From `verdicts.verdict_json`; None if it could not be computed.
    problem
        Why it could not.
    """
    stopped = [page.name for page in pages if page.failure]
    faults = []
    if stopped:
        faults.append(
            f"{len(stopped)} of {len(pages)} notebooks did not run to their end: {', '.join(stopped)}. "
            "What they show is missing."
        )
    if verdict is None:
        faults.append(f"There is no verdict: {notebook.scrub(problem or 'unknown fault')}.")
    template = _environment().get_template("index.html.j2")
    body = template.render(
        verdict=notebook.final(verdict).html if verdict is not None else None,
        conditions=notebook.conditions(run).html,
        pages=pages,
        tone=theme.verdict_tone,
        scrub=notebook.scrub,
        limits=notebook.limits(run),
    )
    return _page(
        run,
        title=f"Should this drafter go in front of this target? {run.plan.name}",
        current="index",
        pages=pages,
        body=body,
        failure=" ".join(faults) or None,
    )


def _page(
    run: Run,
    *,
    title: str,
    current: str,
    pages: Sequence[Page],
    body: str,
    failure: str | None,
    scripts: Sequence[str] = (),
    banners: Sequence[str] = (),
) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            current=current,
            pages=pages,
            body=Markup(body),
            failure=failure,
            banners=banners,
            scripts=[Markup(script) for script in scripts],
            script_hashes=Markup(hashes),
            css=Markup(_template("report.css")),
            watermark=notebook.watermark(run),
            run_id=run.run_id,
            started=str(run.manifest.get("started_at") or "")[:10],
            measured_sha=_short(run.manifest.get("git_sha")),
            analysed_sha=_short(git_sha()),
            made=utc_now(),
            version=__version__,
        )
    )
    size = len(text.encode())
    if size > MAX_PAGE_BYTES:
        raise NotebookError(
            f"{current}: the page has {size / 1e6:.1f} MB, more than {MAX_PAGE_BYTES / 1e6:.0f}; "
            "draw aggregates and show fewer rows"
        )
    return text


def _copy(node: NotebookNode) -> NotebookNode:
    copied: NotebookNode = nbformat.from_dict(json.loads(json.dumps(node)))  # type: ignore[no-untyped-call]
    return copied


def _take_title(node: NotebookNode) -> str | None:
    """Removes the first H1 from the notebook and returns its text."""
    for cell in node.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            line, _, rest = cell.source.partition("\n")
            cell.source = rest.strip()
            return str(line[2:].strip())
    return None


def _prepare_output(output: NotebookNode, figures: list[str]) -> None:
    """Makes an output safe to print: charts become figures, foreign SVG an image, text loses home paths."""
    if output.output_type == "error":
        output.traceback = [notebook.scrub(line) for line in output.traceback]
        return
    if output.output_type == "stream":
        output.text = notebook.scrub(output.text)
        return
    data = output.get("data", {})
    if notebook.CHART_MIME in data:
        figures.append(_figure(data[notebook.CHART_MIME], data["image/svg+xml"]))
        output.data = {"text/html": _placeholder(len(figures) - 1)}
    elif "image/svg+xml" in data:
        encoded = base64.b64encode(data["image/svg+xml"].encode()).decode()
        output.data = {"text/html": f'<img alt="figure" src="data:image/svg+xml;base64,{encoded}">'}
    elif "text/html" in data:
        # The page has its own style sheet; the one for JupyterLab would narrow it.
        output.data = {"text/html": notebook.scrub(data["text/html"].replace(notebook.STYLE, ""))}
    else:
        output.data = {
            kind: notebook.scrub(text) if kind.startswith("text/") else text for kind, text in data.items()
        }


def _placeholder(number: int) -> str:
    return f'<div data-specnb-figure="{number}"></div>'


def _figure(spec: Mapping[str, Any], svg: str) -> str:
    """A chart as a static picture with its specification beside it, which `charts.js` makes interactive."""
    spec = {key: value for key, value in spec.items() if key != "usermeta"} | {"$schema": _CHART_SCHEMA}
    described = html.escape(str(spec.get("description", "chart")), quote=True)
    # `<` can't occur in the script element, so that no text in the data can close it.
    content = json.dumps(spec, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><div class="still" role="img" aria-label="{described}">{svg}</div>'
        f'<script type="application/json">{content}</script></figure>'
    )


def _exporter() -> HTMLExporter:
    exporter = HTMLExporter(  # type: ignore[no-untyped-call]
        raw_template=_template("notebook.html.j2"),
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
        mathjax_url="",
        require_js_url="",
        mermaid_js_url="",
        jquery_url="",
        filters={"escape_html": lambda text: html.escape(text, quote=False)},
    )
    exporter.config.NbConvertBase.display_data_priority = [
        "text/html",
        "text/markdown",
        "image/png",
        "image/jpeg",
        "text/plain",
    ]
    return exporter


def _verdict_of(executed: Execution) -> dict[str, Any] | None:
    """The verdict that an executed notebook displayed, if it ran to its end."""
    if executed.failure is not None:
        return None
    for cell in executed.node.cells:
        for output in cell.get("outputs", []):
            found = output.get("data", {}).get(notebook.VERDICT_MIME)
            if found is not None:
                return dict(found)
    return None


@lru_cache(maxsize=1)
def _vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the installed package."""
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    bundle: str = vl_convert.javascript_bundle(snippet, vl_version=notebook.VEGALITE_VERSION)
    if "</script" in bundle.lower():
        raise NotebookError("the Vega bundle holds a closing script tag and can't be embedded")
    return bundle


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(_template)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def _template(name: str) -> str:
    return files("specnb").joinpath("templates", name).read_text(encoding="utf-8")


def _short(sha: Any) -> str:
    if not sha:
        return "unknown"
    revision, dash, dirty = str(sha).partition("-")
    return f"{revision[:12]}{dash}{dirty}"


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


# Files


def _make_folder(folder: Path, *, keep: set[str]) -> None:
    """Makes the folder and removes pages of notebooks that are not built now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for page in folder.glob("[0-9][0-9]_*.html"):
            if page.stem not in keep:
                page.unlink()
    except OSError as error:
        raise _storage_error(folder, error) from error


def _write(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise _storage_error(path, error) from error
    return path


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: can't be written ({error.strerror}); choose a writable folder with --out")
