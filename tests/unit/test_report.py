"""Reports: refusals before execution, failures during it, and pages that need no network.

Cases E01 to E19 of the field, each with the input that broke other tools.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from specnb import notebook, report
from specnb.errors import NotebookError, RecordError, StorageError

END = (
    "from IPython.display import display\n"
    'display({"application/vnd.specnb.end+json": {"run_id": "r"}, "text/plain": "end"}, raw=True)'
)
CDN = re.compile(r"cdn\.jsdelivr|cdnjs|unpkg|googleapis|mathjax|require\.min", re.IGNORECASE)
# Addresses that name things (XML namespaces, schemas, a help link in Vega's own source) and load nothing.
NAMES_ONLY = re.compile(r"https?://(?:www\.w3\.org|vega\.github\.io|github\.com/vega)/")


def write_notebook(path: Path, *cells, kernel: str = "python3"):
    """A notebook of code cells; a pair is (source, tags), a text that starts with `# ` is prose."""
    node = nbformat.v4.new_notebook()
    node.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
    for number, cell in enumerate(cells):
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        make = nbformat.v4.new_markdown_cell if source.startswith("# ") else nbformat.v4.new_code_cell
        made = make(source)
        made.id = f"cell-{number}"
        made.metadata["tags"] = list(tags)
        node.cells.append(made)
    nbformat.write(node, path)
    return path


def execute(tmp_path: Path, *cells, parameters=None, run_id="r", timeout_s=60, **options):
    path = write_notebook(tmp_path / "source.ipynb", *cells, **options)
    before = path.read_bytes()
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    found = report.execute_notebook(
        path, out / "source.ipynb", parameters=parameters or {}, run_id=run_id, timeout_s=timeout_s
    )
    assert path.read_bytes() == before, "the source was written over"
    return found


def printed(execution):
    return "".join(
        output.text
        for cell in execution.node.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )


# Before execution


@pytest.mark.parametrize(
    ("cells", "count"), [(["k = 3"], 0), ([("k = 3", ["parameters"]), ("k = 4", ["parameters"])], 2)]
)
def test_e01_exactly_one_cell_is_tagged(tmp_path, cells, count):
    path = write_notebook(tmp_path / "n.ipynb", *cells)
    with pytest.raises(NotebookError, match=f"{count} cells are tagged 'parameters', exactly one must be"):
        report.check_parameters(path, ["k"])


def test_e01_the_value_that_was_asked_for_is_the_value_that_is_used(tmp_path):
    found = execute(
        tmp_path, ("k: int = 3  # a number", ["parameters"]), "print('k', k)", END, parameters={"k": 5}
    )
    assert printed(found) == "k 5\n"
    assert found.failure is None


def test_e01_a_notebook_that_analysed_another_run_is_a_failure(tmp_path):
    found = execute(tmp_path, ("k = 3", ["parameters"]), END, run_id="other")
    assert found.failure == "The notebook analysed run r, not other: its parameters had no effect."


def test_e02_an_unknown_parameter_is_an_error_naming_the_known_ones(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ("k = 3\nlabel = 'x'", ["parameters"]))
    with pytest.raises(NotebookError, match="unknown parameter kk; it has k, label"):
        report.check_parameters(path, ["kk"])


@pytest.mark.parametrize(
    "line", ["label = f'k={k}'", "twice = 2 * k", "import os", "k += 1", "a = b = 2", "if k: pass", "x: int"]
)
def test_e03_the_parameters_cell_holds_literals_only(tmp_path, line):
    path = write_notebook(tmp_path / "n.ipynb", (f"k = 3\n{line}", ["parameters"]))
    with pytest.raises(NotebookError, match=r"parameters cell, line 2: .* is not an assignment of a literal"):
        report.inspect_parameters(path)


def test_parameters_have_defaults_and_help(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ('a: str = "x"  # first\nb = -1.5', ["parameters"]))
    found = report.inspect_parameters(path)
    assert (found["a"].default, found["a"].text) == ("x", "first")
    assert (found["b"].default, found["b"].text) == (-1.5, "")


def test_an_executed_copy_is_refused_as_a_source(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ("k = 3", ["parameters"]), ("k = 5", ["injected-parameters"]))
    with pytest.raises(NotebookError, match="use the source, not an executed copy"):
        report.inspect_parameters(path)


def test_a_syntax_error_names_its_line(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ("k = 3\nk = = 4", ["parameters"]))
    with pytest.raises(NotebookError, match="parameters cell, line 2: invalid syntax"):
        report.inspect_parameters(path)


def test_files_that_are_no_notebooks_are_refused(tmp_path):
    with pytest.raises(NotebookError, match="can't be read"):
        report.read_notebook(tmp_path / "missing.ipynb")
    (tmp_path / "bad.ipynb").write_text("{")
    with pytest.raises(NotebookError, match="not a valid notebook"):
        report.read_notebook(tmp_path / "bad.ipynb")


def test_the_source_is_never_the_output(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ("k = 3", ["parameters"]))
    with pytest.raises(NotebookError, match="would replace the source"):
        report.execute_notebook(path, path, parameters={})


def test_notebooks_are_found_by_number_name_and_path(tmp_path):
    (found,) = report.find_notebooks(["02"])
    assert found.stem == "02_suffix_decay"
    assert report.find_notebooks(["02_suffix_decay", "04_speedup_by_concurrency.ipynb"])[1].stem.startswith(
        "04"
    )
    own = write_notebook(tmp_path / "mine.ipynb", ("k = 3", ["parameters"]))
    assert report.find_notebooks([str(own)]) == (own,)
    assert next(path.stem[:2] for path in report.find_notebooks()) == "00"
    with pytest.raises(NotebookError, match="notebook '77' is not known; there are 00_verdict, "):
        report.find_notebooks(["77"])
    with pytest.raises(NotebookError, match="names one twice"):
        report.find_notebooks(["02", "02_suffix_decay"])


# Execution


def test_e05_a_failed_cell_is_named_and_what_came_before_is_kept(tmp_path):
    found = execute(
        tmp_path,
        ("k = 3", ["parameters"]),
        "# Heading\ntext",
        "print('before')",
        "1/0",
        "print('after')",
        END,
    )
    assert found.failure == "Cell 4 (cell-3, under 'Heading') raised ZeroDivisionError: division by zero."
    assert printed(found) == "before\n"
    page, body = report.render_body("source", found)
    assert page.failure == found.failure
    assert "before" in body
    assert "ZeroDivisionError" in body
    assert "after" not in body


def test_e05_an_error_output_is_a_failure_even_if_no_exception_came(tmp_path):
    cells = [nbformat.v4.new_code_cell("1/0"), nbformat.v4.new_code_cell(END)]
    cells[0].outputs = [nbformat.v4.new_output("error", ename="E", evalue="x", traceback=["E: x"])]
    for number, cell in enumerate(cells):
        cell.execution_count = number + 1
    node = nbformat.v4.new_notebook(cells=cells)
    assert report._failure(node, None).endswith("raised E: x.")
    cells[0].outputs = []
    cells[0].metadata["papermill"] = {"exception": True}
    assert report._failure(node, None).endswith(" raised an exception.")


def test_e06_a_killed_kernel_is_a_failure_though_papermill_records_no_exception(tmp_path):
    found = execute(
        tmp_path,
        ("k = 3", ["parameters"]),
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "print('later')",
        END,
    )
    assert found.failure == "Cell 2 (cell-1) lost its kernel (killed, or out of memory)."
    assert all(not cell.metadata.get("papermill", {}).get("exception") for cell in found.node.cells)
    page, body = report.render_body("source", found)
    assert page.failure
    assert "later" not in body


def test_e06_a_notebook_without_its_end_is_a_failure(tmp_path):
    found = execute(tmp_path, ("k = 3", ["parameters"]), "print('all')")
    assert found.failure == "The last cell is not the provenance cell, so the notebook may be cut short."


def test_e07_a_cell_that_hangs_is_stopped_and_named(tmp_path):
    found = execute(tmp_path, ("k = 3", ["parameters"]), "import time\ntime.sleep(60)", END, timeout_s=2)
    assert found.failure == "Cell 2 (cell-1) took longer than 2 s and was stopped."
    report.render_body("source", found)


def test_e08_the_kernel_is_this_interpreter_whatever_the_notebook_says(tmp_path, monkeypatch):
    def none_installed(self, name):
        raise NoSuchKernel(name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", none_installed)
    found = execute(
        tmp_path,
        ("k = 3", ["parameters"]),
        "import os, sys\nprint(sys.executable)\nprint(os.getcwd())",
        END,
        kernel="my_old_env",
    )
    assert found.failure is None
    executable, folder = printed(found).split()
    assert os.path.realpath(executable) == os.path.realpath(sys.executable)
    assert Path(folder).name == "out"


def test_system_exit_in_the_middle_is_not_a_finished_notebook(tmp_path):
    found = execute(tmp_path, ("k = 3", ["parameters"]), "raise SystemExit(0)", END)
    assert found.failure is not None


# Rendering


EVIL = "<script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>"


def executed(*cells):
    """An executed notebook made by hand: (source, outputs, tags)."""
    node = nbformat.v4.new_notebook()
    for number, (source, outputs, tags) in enumerate(cells):
        if outputs is None:
            cell = nbformat.v4.new_markdown_cell(source)
        else:
            cell = nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=number + 1)
        cell.metadata["tags"] = tags
        node.cells.append(cell)
    return report.Execution(node=node, failure=None)


def output(**data):
    return nbformat.v4.new_output(
        "display_data", data={key.replace("__", "/"): value for key, value in data.items()}
    )


@pytest.fixture(scope="module")
def run(simulated_run):
    return simulated_run(prompts_per_cell=5, concurrency=(1,), max_tokens=16)


def chart_output(description="d"):
    from specnb import charts

    chart = charts.survival_by_position_chart(
        __import__("polars").DataFrame(
            {"arm": [description], "position": [0], "value": [0.5], "low": [0.4], "high": [0.6], "n": [9]}
        )
    )
    return nbformat.v4.new_output("display_data", data=notebook.ChartView(chart=chart)._repr_mimebundle_())


def page_of(run, execution):
    page, body = report.render_body("02_x", execution)
    return report.render_page(run, page=page, pages=[page], body=body)


def test_the_verdict_comes_first_and_the_title_is_the_page_title(run):
    claims = {
        "claims": [{"arm": "a", "claim": "c", "question": "q?", "verdict": "supported", "sentence": "s."}]
    }
    verdict = nbformat.v4.new_output(
        "execute_result",
        data={"text/html": "<b>VERDICT</b>", notebook.CLAIMS_MIME: claims},
        execution_count=2,
    )
    page, body = report.render_body(
        "02_x", executed(("# Is it so?\nintro", None, []), ("secret_source()", [verdict], ["verdict"]))
    )
    assert page.title == "Is it so?"
    assert page.claims[0]["sentence"] == "s."
    assert body.index("VERDICT") < body.index("intro")
    assert body.count("VERDICT") == 2
    assert "secret_source" not in body
    text = report.render_page(run, page=page, pages=[page], body=body)
    assert "<h1>Is it so?</h1>" in text
    assert '<html lang="en">' in text
    assert f"<code>{run.run_id}</code>" in text
    assert 'aria-current="page">02 x' in text
    assert "SIMULATED" in text
    assert "measured by revision" in text
    assert "report made 20" in text


def test_model_output_is_escaped_wherever_it_can_appear(run):
    stream = nbformat.v4.new_output("stream", name="stdout", text=EVIL)
    text = page_of(
        run,
        executed(
            ("# T?", None, []),
            ("x", [stream], []),
            ("x", [output(text__plain=EVIL)], []),
            ("x", [output(text__markdown=f"**b** {EVIL}")], []),
            ("x", [output(**{"image__svg+xml": f"<svg>{EVIL}</svg>"})], []),
            ("x", [chart_output(EVIL)], []),
        ),
    )
    body = text[text.index("<body>") :]
    assert "<strong>b</strong>" in body
    assert "<script>alert" not in body
    assert "<img src=https" not in body
    failed = report.render_page(run, page=report.Page(name="x", title=EVIL, failure=EVIL), pages=[], body="")
    assert "<script>alert" not in failed


def test_a_page_forbids_the_network_and_all_scripts_but_its_own(run):
    text = page_of(run, executed(("# T?", None, []), ("x", [chart_output()], [])))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert policy.count("'sha256-") == len(re.findall(r"<script>", text)) == 2
    assert "unsafe-eval" not in policy
    plain = page_of(run, executed(("# T?", None, []), ("x", [], [])))
    assert "script-src 'none'" in plain
    assert "<script" not in plain


def test_e11_one_bundle_a_page_and_a_bounded_size(run):
    chart = chart_output()
    one = page_of(run, executed(("# T?", None, []), ("x", [chart], [])))
    six = page_of(run, executed(("# T?", None, []), *[("x", [chart], []) for _ in range(6)]))
    assert six.count("<figure") == 6
    assert six.count("window.vegaEmbed") == one.count("window.vegaEmbed") == 1
    assert len(six) < len(one) + 6 * 60_000
    assert len(one) < 1_500_000


def test_e11_a_page_over_the_limit_is_refused(run, monkeypatch):
    monkeypatch.setattr(report, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(NotebookError, match="draw aggregates and show fewer rows"):
        page_of(run, executed(("# T?", None, [])))


def test_e12_e13_no_page_names_a_cdn_and_every_address_is_a_mere_name(run):
    text = page_of(
        run, executed(("# T?\n$x^2$\n\n```mermaid\na-->b\n```", None, []), ("x", [chart_output()], []))
    )
    assert CDN.search(text) is None
    for found in re.findall(r"https?://[^\s\"'`<>)]+", text):
        assert NAMES_ONLY.match(found), found
    assert not re.search(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=[\"']?(?!data:)(?:https?:)?//", text)


def test_e15_chart_data_with_nan_can_not_reach_a_page():
    with pytest.raises(ValueError, match="not JSON compliant"):
        report._figure({"description": "d", "data": float("nan")}, "<svg></svg>")


def test_data_can_not_close_the_script_element():
    text = report._figure({"description": '"><b>', "x": "</script><script>alert(1)</script>"}, "<svg></svg>")
    assert text.count("</script>") == 1
    assert '"><b>' not in text
    content = re.search(r'application/json">(.*?)</script>', text).group(1)
    assert json.loads(content)["x"].startswith("</script>")


def test_home_and_repository_paths_do_not_reach_a_page(run):
    home, checkout = str(Path.home()), str(Path(report.__file__).resolve().parents[1])
    error = nbformat.v4.new_output(
        "error", ename="E", evalue="x", traceback=[f"File {home}/a.py, {checkout}/b.py"]
    )
    stream = nbformat.v4.new_output("stream", name="stderr", text=f"{checkout}/c.py")
    text = page_of(
        run, executed(("# T?", None, []), ("x", [error, stream, output(text__html=f"{checkout}/d")], []))
    )
    assert checkout not in text
    assert f"{home}/" not in text


def test_a_failed_page_is_marked_and_holds_no_headline(run):
    claims = output(text__html="VERDICT")
    execution = executed(("# T?", None, []), ("x", [claims], ["verdict"]))
    execution = report.Execution(node=execution.node, failure="Cell 3 (c) raised E: x.")
    page, body = report.render_body("02_x", execution)
    text = report.render_page(run, page=page, pages=[page], body=body)
    assert "<title>FAILED: T?</title>" in text
    assert 'role="alert"' in text
    assert "Cell 3 (c) raised E: x. What follows stops there: nothing on this page is a result." in text
    assert body.count("VERDICT") == 1
    assert 'class="nav-failed">FAILED' in text


# Whole reports


def test_a_broken_notebook_gives_a_failed_page_and_is_named(run, tmp_path):
    broken = write_notebook(
        tmp_path / "broken.ipynb",
        "# Is it broken?",
        ('run_dir: str = "x"\nplan: str = ""', ["parameters"]),
        "from specnb import notebook\n\nrun = notebook.open_run(run_dir, plan)\nnotebook.conditions(run)",
        "1/0",
        "notebook.provenance(run)",
    )
    lines = []
    result = report.build_report(
        run.path, notebooks=[str(broken)], out_dir=tmp_path / "out", progress=lines.append
    )
    assert result.failed == ("broken",)
    assert [path.name for path in result.pages] == ["broken.html", "index.html"]
    page = (tmp_path / "out" / "broken.html").read_text()
    assert (
        "Cell 4 (cell-3, under &#39;Is it broken?&#39;) raised ZeroDivisionError: division by zero." in page
    )
    assert "Conditions of every number" in page
    index = (tmp_path / "out" / "index.html").read_text()
    assert "1 of 1 notebooks did not run to their end: broken." in index
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text(), parse_constant=pytest.fail)
    assert verdict["run_id"] == run.run_id
    assert any("broken FAILED" in line for line in lines)
    assert not list((tmp_path / "out").glob(".*"))


def test_a_verdict_that_can_not_be_computed_is_said_and_no_old_one_stays(run, tmp_path, monkeypatch):
    def broken(run):
        raise RecordError("splits.parquet: file is missing")

    monkeypatch.setattr("specnb.verdicts.verdict_json", broken)
    own = write_notebook(
        tmp_path / "own.ipynb",
        "# Is it so?",
        ('run_dir: str = "x"\nplan: str = ""', ["parameters"]),
        "from specnb import notebook\n\nrun = notebook.open_run(run_dir, plan)\nnotebook.provenance(run)",
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "verdict.json").write_text("{}")
    result = report.build_report(run.path, notebooks=[str(own)], out_dir=tmp_path / "out")
    assert result.failed == ("verdict",)
    index = (tmp_path / "out" / "index.html").read_text()
    assert "There is no verdict: splits.parquet: file is missing." in index
    assert "verdict.json" not in index
    assert not (tmp_path / "out" / "verdict.json").exists()


def test_nothing_is_executed_or_written_if_a_notebook_or_the_run_is_wrong(run, tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", ("k = 3", ["parameters"]))
    with pytest.raises(NotebookError, match="unknown parameter run_dir, plan; it has k"):
        report.build_report(run.path, notebooks=[str(path)], out_dir=tmp_path / "out")
    with pytest.raises(RecordError, match="no such run directory"):
        report.build_report(tmp_path / "none", out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pages_of_other_notebooks_do_not_stay_in_the_folder(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("02_suffix_decay.html", "09_old.html", "mine.html"):
        (folder / name).write_text("x")
    report._make_folder(folder, keep={"02_suffix_decay"})
    assert sorted(path.name for path in folder.iterdir()) == ["02_suffix_decay.html", "mine.html"]


def test_a_file_in_place_of_the_folder_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't be written"):
        report.build_report(run.path, notebooks=["02"], out_dir=tmp_path / "file")


def test_e16_e17_a_run_with_nan_is_refused_before_any_page(run, tmp_path):
    import polars as pl

    target = tmp_path / "nan"
    shutil.copytree(run.path, target)
    file = next(target.glob("cells/*/requests.parquet"))
    pl.read_parquet(file).with_columns(pl.lit(float("nan")).alias("grader_score")).write_parquet(file)
    with pytest.raises(RecordError, match="column 'grader_score' is NaN or infinite; unknown is null"):
        notebook.open_run(str(target)).requests  # noqa: B018
