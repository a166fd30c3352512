"""Which arguments vLLM's engine takes, read from the source of the installed version: importing it takes seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

SOURCE = "engine/arg_utils.py"
CLASS = "AsyncEngineArgs"
_SIMPLE = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}


@functools.cache
def engine_arguments() -> Mapping[str, frozenset[str]]:
    """Name of each argument -> names of the types that it may have, as far as all of them are simple ones.

    The fields of vLLM's dataclass `AsyncEngineArgs` and of its base. Empty where vLLM is not installed, or is laid out
    in another way: then the engine itself has the say.
    """
    found = importlib.util.find_spec("vllm")  # finds it, does not import it
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / SOURCE
        if file.is_file():
            return _fields(ast.parse(file.read_text(encoding="utf-8")), CLASS)
    return {}


def unknown_argument(name: str) -> str:
    """What is wrong with an argument's name, with the nearest ones that vLLM has; empty for one that it knows."""
    known = engine_arguments()
    if not known or name in known:
        return ""
    plain = name.lstrip("-").replace("-", "_").lower()
    near = [plain] if plain in known else get_close_matches(plain, list(known), n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"vLLM has no engine argument {name!r}{hint}"


def wrong_type(name: str, value: Any) -> str:
    """What is wrong with the type of an argument's value, where vLLM takes simple types only; else empty."""
    types = engine_arguments().get(name, frozenset())
    if not types or type(value) in {kind for word in types for kind in _SIMPLE[word]}:
        return ""
    return f"{name!r} takes {' or '.join(sorted(types - {'None'}))}, got {value!r}"


def _fields(module: ast.Module, name: str) -> dict[str, frozenset[str]]:
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return {}
    found: dict[str, frozenset[str]] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            found |= _fields(module, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            words = [part.strip() for part in ast.unparse(node.annotation).split("|")]
            if not words[0].startswith("ClassVar"):
                found[node.target.id] = frozenset(words) if set(words) <= _SIMPLE.keys() else frozenset()
    return found
