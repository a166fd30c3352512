"""Calls across processes are typed: Ray's `.remote` is reached by `launcher/ray/remote.py` alone, never by a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parents[2] / "packages").glob("*/src/**/*.py"))
HANDLE = "remote.py"


def untyped_calls(tree: ast.Module) -> Iterator[int]:
    """Lines with `actor.method.remote(...)` or `getattr(...).remote(...)`; `options(...).remote()` makes an actor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "remote":
            made = isinstance(node.value, ast.Name) or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Attribute)
                and node.value.func.attr == "options"
                and not isinstance(node.value.func.value, ast.Attribute)
            )
            if not made:
                yield node.lineno


def methods_by_name(tree: ast.Module) -> Iterator[str]:
    """Methods whose caller names another method in quotes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name != "__call__":
                    for given in method.args.args:
                        if given.arg == "method" and given.annotation and ast.unparse(given.annotation) == "str":
                            yield f"{node.name}.{method.name}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ref = actor.call.remote('pause')", 1),
        ("ref = getattr(actor, name).remote()", 1),
        ("refs = actor.run.options(num_returns=2).remote(x)", 1),
        ("actor = kind.options(num_cpus=0).remote()", 0),
        ("actor = kind.remote(spec)", 0),
        ("ref = engine.ask(EngineControl.pause)", 0),
    ],
)
def test_what_counts_as_an_untyped_call(text: str, found: int) -> None:
    assert len(list(untyped_calls(ast.parse(text)))) == found


def test_no_remote_call_goes_by_a_name() -> None:
    offenders = [
        f"{path.name}:{line}"
        for path in SOURCES
        if not (path.name == HANDLE and path.parent.name == "ray")
        for line in untyped_calls(ast.parse(path.read_text(encoding="utf-8")))
        if "ray" in path.parts
    ]
    assert not offenders


def test_no_actor_takes_a_method_by_its_name() -> None:
    ray = [path for path in SOURCES if path.parent.name == "ray"]
    assert not [name for path in ray for name in methods_by_name(ast.parse(path.read_text(encoding="utf-8")))]
