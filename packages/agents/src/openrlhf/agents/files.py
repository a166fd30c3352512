"""Python files of authors (agents, reward functions): read once, shipped by content, loaded anywhere.

A file that also lies on the disk of the machine that loads it can import its neighbours.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFile:
    """An author's file. path: absolute, where it was read (for tracebacks and neighbours). source: its content."""

    path: str
    source: str

    @property
    def name(self) -> str:
        return Path(self.path).name


class CodeFileError(ValueError):
    """An author's file cannot be used; the message says which file, what is wrong and what is expected."""


def read_code(path: str | Path, flag: str) -> CodeFile:
    """Reads a file given by `flag` (for messages, for example `--reward.remote_url`)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise CodeFileError(f"{flag}: file not found: {str(path)!r} (looked at {file.absolute()})")
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CodeFileError(f"{flag}: {str(path)!r} is not UTF-8 text: {error}") from error
    return CodeFile(path=str(file.resolve()), source=source)


def as_code(path_or_code: str | Path | CodeFile, flag: str) -> CodeFile:
    return path_or_code if isinstance(path_or_code, CodeFile) else read_code(path_or_code, flag)


def load_module(code: CodeFile) -> ModuleType:
    """Runs the file as a module of its own name. Exceptions of the file come out as they are."""
    digest = hashlib.blake2b(f"{code.path}\0{code.source}".encode(), digest_size=6).hexdigest()
    name = f"user_file_{Path(code.path).stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(os.path.dirname(code.path), first=True)
    _make_importable(os.getcwd(), first=False)
    # Tracebacks show the lines also where the file itself does not exist on this machine.
    linecache.cache[code.path] = (len(code.source), None, code.source.splitlines(keepends=True), code.path)
    module = ModuleType(name)
    module.__file__ = code.path
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        exec(compile(code.source, code.path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: str, *, first: bool) -> None:
    if folder in sys.path or not os.path.isdir(folder):
        return
    if first:
        sys.path.insert(0, folder)
    else:
        sys.path.append(folder)
