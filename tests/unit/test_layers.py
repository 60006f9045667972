"""Layers, read from the source: who may import whom, and what `import specnb` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "specnb"

# A module imports from those before it. `engines` and `drafters` are packages with a layer of their own.
ORDER = (
    "errors",
    "schema",
    "provenance",
    "config",
    "workloads",
    "records",
    "prometheus",
    # analysis: reads run directories, and nothing else
    "stats",
    "acceptance",
    "candidates",
    "cost",
    "reconciliation",
    "latency",
    "equivalence",
    "checks",
    "verdicts",
    "theme",
    "charts",
    # measuring
    "load",
    "telemetry",
    "drafters",
    "demo",
    "engines",
    "training",
    "runner",
    "doctor",
    # what a person starts
    "notebook",
    "report",
    "cli",
)
ANALYSIS = (
    "prometheus",
    "stats",
    "acceptance",
    "candidates",
    "cost",
    "reconciliation",
    "latency",
    "equivalence",
    "checks",
    "verdicts",
    "theme",
    "charts",
)
MEASURING = ("workloads", "drafters", "demo", "engines", "training", "runner", "doctor")
HEAVY = ("torch", "transformers", "vllm")
MAY_IMPORT_HEAVY = ("engines", "drafters", "demo", "training")
EXCEPTIONS = {
    # Converting the demo's weights shares `engines.loading`, which imports nothing of specnb but its errors.
    ("demo", "engines"),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def unit_of(file: Path) -> str:
    """The module's or package's name below `specnb`; "" for `specnb/__init__.py`."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is imported inside a function) for each import of a file."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}:{child.lineno}: relative import"
                assert child.module is not None
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            else:
                checking = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield from visit(child, inside or function or checking)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), False)


def test_every_module_has_its_layer() -> None:
    assert {unit_of(file) for file in FILES} - {""} == set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    unit = unit_of(file)
    for name, _ in imports_of(file):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package != "specnb" or other == unit or (unit, other) in EXCEPTIONS:
            continue
        if unit == "":
            assert other in ("errors", "config", "records")
        elif other not in ("__version__", ""):
            assert ORDER.index(other) < ORDER.index(unit), f"{unit} imports {other}, which is above it"


@pytest.mark.parametrize("unit", ANALYSIS)
def test_analysis_never_touches_an_engine(unit: str) -> None:
    for name, _ in imports_of(PACKAGE / f"{unit}.py"):
        assert name.split(".")[:2] not in [["specnb", other] for other in MEASURING]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_the_measuring_stage_imports_heavy_packages(file: Path) -> None:
    for name, inside in imports_of(file):
        package = name.partition(".")[0]
        if package not in HEAVY:
            continue
        asks_for_cuda = unit_of(file) == "doctor" and package == "torch" and inside
        assert unit_of(file) in MAY_IMPORT_HEAVY or asks_for_cuda, f"{file.name} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_print_nothing_and_say_what_they_are(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    printed = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printed == []
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_public_names_have_docstrings(file: Path) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    found = [node for parent in (tree, *classes) for node in parent.body if isinstance(node, kinds)]
    bare = [node.name for node in found if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert bare == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_name_that_says_nothing(file: Path) -> None:
    assert not {"utils", "util", "helpers", "helper", "manager", "misc", "common"} & set(
        file.relative_to(PACKAGE).with_suffix("").parts
    )


@pytest.mark.parametrize(
    "module", ["specnb", "specnb.cli", "specnb.runner", "specnb.doctor", "specnb.checks"]
)
def test_import_is_light(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "transformers", "vllm", "altair", "papermill", "huggingface_hub"}
    assert done.stderr == ""


def test_public_names_of_the_package() -> None:
    import specnb

    assert specnb.__all__ == ["Plan", "Run", "SpecnbError", "__version__", "read_plan", "read_run"]
    assert (PACKAGE / "py.typed").exists()
