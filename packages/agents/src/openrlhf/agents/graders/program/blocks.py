"""Finds the program in a response written in Markdown.

Fences are those of CommonMark (backticks or tildes, closed by at least as many, or by the end of the text), at any
indentation, in lists and quotations. That is more than CommonMark allows, since models indent as they like.
"""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass

from openrlhf.agents.graders.program.prelude import HOMES

OPENING = re.compile(r"(?P<lead>(?:[ \t]++|>|(?:[-*+]|\d{1,9}+[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>.*)")
LANGUAGE = re.compile(r"\{?\s*\.?(?P<name>[A-Za-z0-9_+#-]*)")
PYTHON = {"python", "py", "python3", "py3", "python2", "ipython", "pycon", "sage"}
MAX_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Block:
    """language: of the info string, lower case, "" without one."""

    language: str
    source: str

    @property
    def named(self) -> bool:
        return self.language in PYTHON


def find_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text in order. A block that nothing closes goes to the end of the text."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        opening = OPENING.match(lines[at])
        at += 1
        if opening is None or (opening["fence"][0] == "`" and "`" in opening["info"]):
            continue
        content: list[str] = []
        while at < len(lines) and not _closes(lines[at], opening["fence"]):
            content.append(lines[at])
            at += 1
        at += 1
        language = LANGUAGE.match(opening["info"].strip())
        name = language["name"].lower() if language else ""
        blocks.append(Block(name, "\n".join(_unindent(content, opening["lead"])) + "\n"))
    return [block for block in blocks if block.source.strip()][-MAX_BLOCKS:]


def _closes(line: str, fence: str) -> bool:
    rest = line.lstrip(" \t>").rstrip()
    return len(rest) >= len(fence) and set(rest) == {fence[0]}


def _unindent(lines: list[str], lead: str) -> list[str]:
    """Without the indentation, and the quotation marks, that the opening fence has."""
    if ">" in lead:
        marks = lead.count(">")
        lines = [re.sub(rf"^(?:[ \t]*>[ ]?){{0,{marks}}}", "", line) for line in lines]
        lead = lead[lead.rindex(">") + 1 :].removeprefix(" ")
    width = len(lead.expandtabs(4))
    return [_without(line, width) for line in lines]


def _without(line: str, width: int) -> str:
    removed = 0
    while removed < width and line[:1] in (" ", "\t"):
        removed += 4 if line[0] == "\t" else 1
        line = line[1:]
    return line


def extract_program(response: str) -> str:
    """The last block that is a program, with the blocks that define what it lacks before it.

    A program is a block named as Python, or one without a name that parses and does more than write down values. Named
    blocks come first. Where no block is a program the last one counts, and without blocks the whole response.
    """
    blocks = find_blocks(response)
    if not blocks:
        return response.replace("\r\n", "\n")
    programs = [block for block in blocks if is_program(block)]
    chosen = [block for block in programs if block.named] or programs
    if not chosen:
        unnamed = [block for block in blocks if block.named or not block.language]
        return (unnamed or blocks)[-1].source
    last = chosen[-1]
    return "\n".join([*_helpers(last, programs[: programs.index(last)]), last.source])


def is_program(block: Block) -> bool:
    if block.language and not block.named:
        return False
    if block.source.lstrip().startswith(">>>"):
        return False
    tree = _parse(block.source)
    if tree is None:
        return block.named
    return any(_does_something(statement) for statement in tree.body)


def _does_something(statement: ast.stmt) -> bool:
    """Whether a statement is more than a value: sample output and `O(n)` parse as expressions, too."""
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return False  # "Note: text"
    if not isinstance(statement, ast.Expr):
        return True
    call = statement.value
    return isinstance(call, ast.Call) and (not isinstance(call.func, ast.Name) or call.func.id not in ("O", "Theta"))


def _helpers(last: Block, earlier: list[Block]) -> list[str]:
    """The earlier blocks that define names which the last one, or a helper of it, uses and does not define."""
    missing = _missing(last.source)
    found: list[str] = []
    for block in reversed(earlier):
        if missing & _defined(block.source):
            found.insert(0, block.source)
            missing = (missing | _missing(block.source)) - _defined(block.source)
    return found


def _missing(source: str) -> set[str]:
    tree = _parse(source)
    if tree is None:
        return set()
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return used - _bound(tree) - set(dir(builtins)) - {"__file__", "__name__"}


def _bound(tree: ast.AST) -> set[str]:
    """Every name that is bound somewhere: assignments, definitions, imports, arguments."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
    return names


def _defined(source: str) -> set[str]:
    """What a block defines at its top level."""
    tree = _parse(source)
    names: set[str] = set()
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            names |= _bound(node)
    return names


def offered_names(source: str) -> list[str]:
    """The names of judges' preludes that a program uses and does not define."""
    return sorted(_missing(source) & set(HOMES))


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
