"""Case ids in tests have a line in `tests/CASES.md`, and every line there has a test."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
LINE = re.compile(r"^- ([A-Z]\d{2,3}): .{10,}\.$", re.MULTILINE)
ID = re.compile(r"\b([A-Z])(\d{2,3})(?:-\1(\d{2,3}))?\b")
NAMED = re.compile(r"^test_([a-z]\d{2,3})_")
LINTER = re.compile(r"noqa:.*")


def legend() -> list[str]:
    return LINE.findall((TESTS / "CASES.md").read_text(encoding="utf-8"))


def prose(path: Path) -> Iterator[str]:
    """Comments and docstrings of a file, without the codes of linters."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield LINTER.sub("", token.string)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
            if not isinstance(node, ast.Module) and (named := NAMED.match(node.name)):
                yield named[1].upper()


def ids(path: Path) -> set[str]:
    """The ids in a file; `G01-G08` stands for both ends and all between."""
    found: set[str] = set()
    for text in prose(path):
        for letter, first, last in ID.findall(text):
            numbers = range(int(first), int(last or first) + 1)
            found |= {f"{letter}{number:0{len(first)}}" for number in numbers}
    return found


def test_every_id_has_its_line() -> None:
    listed = legend()
    assert listed == sorted(listed)
    assert len(set(listed)) == len(listed)
    used = {name: path.name for path in TESTS.rglob("*.py") for name in ids(path)}
    assert {name: used[name] for name in used.keys() - set(listed)} == {}
    assert sorted(set(listed) - used.keys()) == []
