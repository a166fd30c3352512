"""Runs an author's file as a module that other processes can import too.

A file that also lies on the disk of the machine that loads it can import its neighbours.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import linecache
import os
import re
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.agents.files import CodeFile, text_lines

STUB = "from openrlhf.agents.modules import run_in_child\n\nrun_in_child(globals(), {path}, {source})\n"


def load_module(code: CodeFile) -> ModuleType:
    """Runs the file as a module of its own name. Exceptions of the file come out as they are.

    Its functions and classes may be sent to process pools, also to those that start afresh (multiprocessing's spawn
    and forkserver) and on machines where the file does not lie.
    """
    digest = hashlib.blake2b(f"{code.path}\0{code.source}".encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    stem = re.sub(r"[^0-9A-Za-z]", "_", Path(code.path).stem)[:100]
    name = f"user_file_{stem}_{digest}"  # a name that can be imported
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(os.path.dirname(code.path), first=True)
    _make_importable(os.getcwd(), first=False)
    _offer_to_children(name, code)
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    module.__dict__["__getattr__"] = stand_in = _Missing(code, "it was not complete when this process was forked")
    try:
        _run(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    if module.__dict__["__getattr__"] is stand_in:
        del module.__dict__["__getattr__"]
    return module


def run_in_child(namespace: dict[str, Any], path: str, source: str) -> None:
    """Called by the stub of `_offer_to_children`: runs the file once more, in a process that imports it."""
    code = CodeFile(path=path, source=source)
    try:
        _run(code, namespace)
    except Exception as error:
        traceback.print_exc()
        namespace["__getattr__"] = _Missing(code, f"importing it raised {type(error).__name__}: {error}", owner=0)


class _Missing:
    """A module's `__getattr__` in processes that its file started and in which it is not complete.

    A worker that finds no attribute for its task dies, and a multiprocessing.Pool starts another one for ever. So what
    is missing is replaced by functions that say why: they fail the call, with the reason. owner: not in this process.
    """

    def __init__(self, code: CodeFile, why: str, *, owner: int | None = None) -> None:
        self._owner = os.getpid() if owner is None else owner
        self._reason = (
            f"{code.name} cannot be used in a process that it started: {why}; make process pools inside a function, "
            "when they are first used, not while the file is imported"
        )

    def __call__(self, name: str) -> Callable[..., Any]:
        if os.getpid() == self._owner or name.startswith("__"):
            raise AttributeError(f"module has no attribute {name!r}")
        return self._fail

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(self._reason)


def _run(code: CodeFile, namespace: dict[str, Any]) -> None:
    # Tracebacks show the lines also where the file itself does not exist on this machine.
    lines = [line + "\n" for line in text_lines(code.source)]
    linecache.cache[code.path] = (len(code.source), None, lines, code.path)
    namespace["__file__"] = code.path
    exec(compile(code.source, code.path, "exec"), namespace)


def _offer_to_children(name: str, code: CodeFile) -> None:
    """Puts an archive with a module `name` on sys.path, which multiprocessing hands to the processes it starts.

    Here it is never imported: `load_module` has put the module itself into sys.modules. The archive is a file in memory
    where there is such a thing (Linux), because it then ends with this process, however that ends.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"{name}.py", STUB.format(path=ascii(code.path), source=ascii(code.source)))
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create(name)
        place = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, place = tempfile.mkstemp(prefix=f"{name}_", suffix=".zip")
        atexit.register(Path(place).unlink, missing_ok=True)
    with open(handle, "wb", closefd=not place.startswith("/proc/")) as file:
        file.write(content.getvalue())
    sys.path.append(place)


def _make_importable(folder: str, *, first: bool) -> None:
    if folder in sys.path or not os.path.isdir(folder):
        return
    if first:
        sys.path.insert(0, folder)
    else:
        sys.path.append(folder)
