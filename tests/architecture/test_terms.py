"""The packages below the launcher name parameters in their own terms; the launcher knows the flag of each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.launcher.commands import COMMANDS
from openrlhf.launcher.terms import FLAGS, with_flags

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"--[a-z*][a-z_*]*\.")
TERM = re.compile(r"`([a-z_0-9.]+)`")


def messages(package: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every string of a package that is no docstring; of its command line, which has flags, none."""
    source = ROOT / "packages" / package / "src" / "openrlhf" / package
    for path in sorted(source.rglob("*.py")):
        if path.parent.name == "cli":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.mark.parametrize("package", ["core", "learner", "rollout", "agents"])
def test_messages_name_no_flag(package: str) -> None:
    assert [place for place, text in messages(package) if FLAG.search(text)] == []


@pytest.mark.parametrize("package", ["core", "learner", "rollout", "agents"])
def test_every_term_has_a_flag(package: str) -> None:
    unknown = {f"{place}: {term}" for place, text in messages(package) for term in TERM.findall(text)}
    assert {entry for entry in unknown if entry.rsplit(" ", 1)[1] not in FLAGS} == set()


def test_the_flags_exist() -> None:
    known = {flag for command in COMMANDS.values() for flag in command.flags}
    for flag in FLAGS.values():
        assert any(re.fullmatch(flag.replace(".", r"\.").replace("*", ".*"), name) for name in known), flag


def test_terms_are_all_in_use() -> None:
    texts = [text for package in ("core", "learner", "rollout", "agents") for _, text in messages(package)]
    whole = {term for text in texts for term in TERM.findall(text)}
    composed = tuple(part[1] for text in texts if (part := re.search(r"`([a-z_]+\.)$", text)))  # f"`kl.{name}`"
    assert {term for term in FLAGS if term not in whole and not term.startswith(composed)} == set()


def test_a_message_gets_its_flags() -> None:
    said = "`ds.zero_stage` 3 and `optim.optim` muon: `x.y` of `reset`"
    assert with_flags(said) == "--ds.zero_stage 3 and --*.optim muon: `x.y` of `reset`"
