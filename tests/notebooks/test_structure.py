"""Notebooks are an argument, not a program: six parts in order, no logic, no outputs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from specnb import report

FOLDER = Path(report.__file__).resolve().parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
FORBIDDEN = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.If,
    ast.IfExp,
    ast.Try,
    ast.With,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.AugAssign,
    ast.Subscript,
    ast.JoinedStr,
)
every_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path: Path):
    return nbformat.read(path, as_version=4)


def tags(cell):
    return cell.metadata.get("tags", [])


def code(node):
    return [cell for cell in node.cells if cell.cell_type == "code"]


def prose(node):
    return [cell for cell in node.cells if cell.cell_type == "markdown"]


def test_numbers_and_names_are_unique_and_complete():
    names = [path.stem for path in PATHS]
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", name) for name in names)
    numbers = [name[:2] for name in names]
    assert len(set(numbers)) == len(numbers)
    assert {"00_verdict", "02_suffix_decay", "03_hit_rate_by_entropy"} <= set(names)
    assert {"04_speedup_by_concurrency", "05_output_equivalence"} <= set(names)


@every_notebook
def test_six_parts_in_order(path):
    node = read(path)
    first = node.cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# [^\n]+\?(\n|$)", first.source), "the H1 is a question"
    assert sum(line.startswith("# ") for cell in prose(node) for line in cell.source.splitlines()) == 1
    cells = code(node)
    assert tags(cells[0]) == ["parameters"]
    assert cells[1].source.startswith("from specnb import ")
    assert "notebook.open_run(run_dir, plan)" in cells[1].source
    assert "notebook.conditions(run)" in cells[1].source
    assert tags(cells[-2]) == ["verdict"]
    assert cells[-1].source == "notebook.provenance(run)"
    assert node.cells[-1] is cells[-1]


@every_notebook
def test_every_section_is_introduced_by_prose(path):
    node = read(path)
    headings = [cell for cell in prose(node)[1:] if cell.source.startswith("## ")]
    assert len(headings) >= 3
    assert all(len(cell.source.splitlines()) >= 3 for cell in headings), (
        "a heading with an explanation below it"
    )


@every_notebook
def test_no_logic(path):
    for cell in code(read(path)):
        tree = ast.parse(cell.source)
        found = [type(part).__name__ for part in ast.walk(tree) if isinstance(part, FORBIDDEN)]
        if "parameters" not in tags(cell):
            assert not found, f"{cell.id}: {found}"
            for part in tree.body:
                literal = isinstance(part, (ast.Assign, ast.AnnAssign)) and isinstance(
                    part.value, (ast.Constant, ast.List, ast.Dict, ast.Tuple)
                )
                assert not literal, f"{cell.id}: a literal outside the parameters cell"
        imports = [part for part in ast.walk(tree) if isinstance(part, (ast.Import, ast.ImportFrom))]
        assert not imports or cell is code(read(path))[1] or "from specnb import" in cell.source


@every_notebook
def test_imports_stand_in_one_cell_and_come_from_the_package_alone(path):
    cells = [
        cell
        for cell in code(read(path))
        if any(isinstance(part, (ast.Import, ast.ImportFrom)) for part in ast.walk(ast.parse(cell.source)))
    ]
    assert len(cells) == 1
    modules = {part.module for part in ast.parse(cells[0].source).body if isinstance(part, ast.ImportFrom)}
    assert modules == {"specnb"}


@every_notebook
def test_every_name_that_is_imported_or_assigned_is_used(path):
    cells = code(read(path))
    text = "\n".join(cell.source for cell in cells)
    stored = {
        part.id
        for part in ast.walk(ast.parse(text))
        if isinstance(part, ast.Name) and part.ctx.__class__ is ast.Store
    }
    for part in ast.parse(cells[1].source).body:
        if isinstance(part, ast.ImportFrom):
            stored |= {alias.name for alias in part.names}
    loaded = {
        part.id
        for part in ast.walk(ast.parse(text))
        if isinstance(part, ast.Name) and part.ctx.__class__ is ast.Load
    }
    assert stored <= loaded, stored - loaded


@every_notebook
def test_parameters_are_typed_literals_with_help(path):
    cell = code(read(path))[0]
    tree = ast.parse(cell.source)
    assert all(isinstance(part, ast.AnnAssign) for part in tree.body)
    found = report.inspect_parameters(path)
    assert {name: parameter.default for name, parameter in found.items()} == {
        "run_dir": "data/samples/demo",
        "plan": "",
    }
    assert all(len(parameter.text) > 15 for parameter in found.values())


@every_notebook
def test_e19_stripped_with_stable_ids_and_no_paths(path):
    node = read(path)
    ids = [cell.id for cell in node.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9-]{2,64}", cell_id) for cell_id in ids)
    for cell in code(node):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert set(node.metadata) == {"kernelspec", "language_info"}
    assert node.metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    text = path.read_text(encoding="utf-8")
    assert "injected-parameters" not in text
    assert not re.search(r"(?<![\w.])/(?:home|root|Users|work|tmp|mnt)/", text)
    assert not re.search(r"hf_[A-Za-z0-9]{8}|sk-[A-Za-z0-9]{8}", text)


@every_notebook
def test_prose_holds_no_result(path):
    """Numbers go stale. Digits may stand in names and in defining statements such as `falls to 1`."""
    for cell in prose(read(path)):
        text = re.sub(r"`[^`]*`", "", cell.source)
        assert not re.search(r"\d+\.\d+|\d+ ?%|\d+ ?(?:times|tokens|ms|seconds|prompts)\b", text), cell.id


@every_notebook
def test_no_math_and_no_pictures_from_elsewhere(path):
    for cell in prose(read(path)):
        assert "$" not in cell.source
        assert "http" not in cell.source
        assert "![" not in cell.source


@every_notebook
def test_definitions_that_prose_names_exist(path):
    import importlib

    for cell in prose(read(path)):
        for dotted in re.findall(r"`(specnb\.[a-z_.]+\.[A-Za-z_]+)`", cell.source):
            module, _, name = dotted.rpartition(".")
            found = getattr(importlib.import_module(module), name)
            assert found.__doc__, dotted
