"""`openrlhf` is a namespace of five distributions: nobody owns its root, everybody owns whole second-level packages."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src/openrlhf"))
SECOND_LEVEL = sorted(path for source in SOURCES for path in source.iterdir() if path.name != "__pycache__")
BARE = ("core", "rollout", "learner", "launcher")
DISTRIBUTIONS = ["agents", "core", "launcher", "learner", "rollout"]


def test_five_distributions():
    assert [source.parents[1].name for source in SOURCES] == DISTRIBUTIONS


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parents[1].name)
def test_namespace_root_holds_folders_only(source):
    assert [path.name for path in source.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("package", SECOND_LEVEL, ids=lambda path: path.name)
def test_second_level_package_is_whole(package):
    assert (package / "__init__.py").is_file()
    assert (package / "py.typed").is_file()


def test_second_level_package_has_one_owner():
    assert [name for name, owners in Counter(path.name for path in SECOND_LEVEL).items() if owners > 1] == []


@pytest.mark.parametrize("package", [path for path in SECOND_LEVEL if path.name in BARE], ids=lambda path: path.name)
def test_init_is_a_docstring(package):
    """Names come from the module that owns them, so that importing a configuration loads no torch."""
    body = ast.parse((package / "__init__.py").read_text()).body
    assert len(body) == 1
    assert ast.get_docstring(ast.Module(body=body, type_ignores=[]))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_is_complete(name):
    folder = ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"openrlhf-{name}"
    assert project["license"] == "Apache-2.0"
    assert (folder / "README.md").is_file()
    assert (folder / "CHANGELOG.md").is_file()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_entry_points_exist(name):
    """A console script or plugin that names a missing function fails at the user's first call only."""
    folder = ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    plugins = [target for group in project.get("entry-points", {}).values() for target in group.values()]
    for target in [*project.get("scripts", {}).values(), *plugins]:
        module, _, function = target.partition(":")
        path = folder / ("src" if module.startswith("openrlhf.") else "site") / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.is_file(), f"{target}: there is no {file.name} for it"
        assert function in top_level_names(file), f"{target}: no such function in {file.name}"


def top_level_names(file: Path) -> set[str]:
    """Functions and imported names at the top of a module."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
