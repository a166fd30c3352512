"""Files of at most 400 lines, functions of at most 60, constructors of at most 8 parameters."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in LISTED if (ROOT / name).exists()}


def test_files_of_the_page():
    """Scripts and styles of our own that a browser loads."""
    pages = (ROOT / "packages").glob("*/src/**/page/*.*")
    sizes = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in pages}
    assert len(sizes) >= 10
    assert {name: lines for name, lines in sizes.items() if lines > FILE_LINES} == {}


def functions(sources: dict[str, str]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def test_files(sources):
    assert {name: text.count("\n") for name, text in sources.items() if text.count("\n") > FILE_LINES} == {}


def test_functions(sources):
    sizes = {where: (node.end_lineno or node.lineno) - node.lineno + 1 for where, node in functions(sources)}
    assert {where: lines for where, lines in sizes.items() if lines > FUNCTION_LINES} == {}


def test_constructors(sources):
    counts = {where: parameters(node) for where, node in functions(sources) if node.name == "__init__"}
    assert {where: count for where, count in counts.items() if count > PARAMETERS} == {}


def test_no_stubs(sources):
    """A function either works or is abstract; none only raises NotImplementedError."""
    stubs = [where for where, node in functions(sources) if is_stub(node)]
    assert stubs == []


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(every) - 1  # without self


def is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    abstract = any("abstract" in ast.unparse(decorator) for decorator in node.decorator_list)
    only = body[0] if len(body) == 1 else None
    return isinstance(only, ast.Raise) and "NotImplementedError" in ast.unparse(only) and not abstract
