"""Worker processes that start as forks of one process which has imported what they share: torch, transformers, vLLM.

Those imports take 5 to 10 s of CPU time in each of four processes and more; here they are paid once, while Ray starts.
For a Ray of our own on a machine without a GPU: CUDA and fork do not go together.

The file is two programs. `warm.py serve DESCRIPTOR MODULE ...` is the process that has the imports. It has one thread
and no connection to Ray, so its forks are as sound as fresh processes. Ray starts `warm.py SOCKET default_worker.py`
with the worker's arguments as the "Python" of its workers (`py_executable` of a runtime environment). That stand-in
imports nothing, hands its arguments, environment and output files to the first and lives as long as the worker. Where
that does not work it becomes the worker itself, slowly.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "OPENRLHF_WARM_SOCKET"
"""In the environment of workers: where to ask for a fork."""
MODULES = (
    "openrlhf.agents.worker",
    "openrlhf.launcher.ranks.roles",
    "openrlhf.learner.learner",
    "openrlhf.learner.zero.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
)
"""Imported once for all workers. One that is missing or fails is left to who needs it."""
WITHHELD = "ray"
"""Cannot be imported meanwhile: Ray (2.60) reads the job's id when it is loaded, and that is the worker's own."""
FREE = ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_KVCACHE_SPACE")
"""May differ in a fork: set again there, or read after the imports."""
READ_EARLY = (
    *("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "VLLM_"),
    *("DS_", "HF_", "TRANSFORMERS_", "USE_", "CUDA_"),
)
"""Prefixes of variables that libraries read when they are imported; where another one differs a fork would be wrong."""
ANSWER_SECONDS = 240.0
"""What a stand-in waits for its fork: less than Ray waits for it (`ray/node.py`), more than imports ever take."""
SENT_SECONDS = 10.0
MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables that glibc reads when a program starts -> parameters of its `mallopt`."""
QUEUE = 128
"""Stand-ins that may wait for the imports."""
HEADER = struct.Struct("!Q")


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Fork a worker per connection to `listener`, until standard input ends. Returns in each fork, to be that worker.

    A worker is killed when its stand-in ends, and the stand-in is told when its worker does.
    """
    sys.path.pop(0)  # this file's folder
    given = dict(os.environ)
    _import_all(modules)
    early, changed = _early(given), {k: v for k, v in os.environ.items() if given.get(k) != v}
    workers: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> (pid, connection)
    while True:
        connections = [connection for _, connection in workers.values()]
        ready = select.select([0, listener, *workers, *connections], [], [])[0]
        if 0 in ready:
            os._exit(0)
        for descriptor in [d for d in workers if d in ready]:
            pid, connection = workers.pop(descriptor)
            _end(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(descriptor)
        for pid, connection in workers.values():
            if connection in ready:
                os.kill(pid, signal.SIGKILL)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        request = _receive(connection, early)
        if request is None:
            connection.close()
        elif pid := os.fork():
            _close(request["files"])
            with contextlib.suppress(OSError):  # it went meanwhile: seen at the next turn
                connection.sendall(b"+")
            workers[os.pidfd_open(pid)] = (pid, connection)
        else:
            for held in (listener, connection, *connections):
                held.close()
            _close([*workers])
            return _become(request, changed)


def _import_all(modules: Sequence[str]) -> None:
    import gc
    import importlib

    sys.modules[WITHHELD] = None  # type: ignore[assignment]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            sys.stderr.write(f"{name} is not shared by workers: {error}\n")
    del sys.modules[WITHHELD]
    gc.collect()
    gc.freeze()  # collections in the forks leave these pages as they are


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith(READ_EARLY) and k not in FREE}


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _receive(connection: socket.socket, early: Mapping[str, str]) -> dict[str, Any] | None:
    """A stand-in's request; None when it went away, or where a fork would be wrong (`READ_EARLY`)."""
    connection.settimeout(SENT_SECONDS)
    files: list[int] = []
    try:
        header, files, _, _ = socket.recv_fds(connection, HEADER.size, 3)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(HEADER.unpack(header)[0]))
    except (OSError, ValueError, struct.error):
        _close(files)
        return None
    connection.settimeout(None)
    theirs = _early(request["environ"])
    if others := sorted(k for k in {*early, *theirs} if early.get(k) != theirs.get(k)):
        sys.stderr.write(f"no fork for a worker in which {', '.join(others)} differ\n")
        _close(files)
        return None
    return {**request, "files": files}


def _end(connection: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError):  # it went first
        connection.sendall(bytes([code & 0xFF]))
    connection.close()


def _become(request: dict[str, Any], changed: Mapping[str, str]) -> None:
    """This process is the worker of the request from here on, as if its program had just been started.

    changed: environment variables that the imports have set.
    """
    import ctypes
    import random

    os.setpgid(0, 0)  # as a worker of Ray's: it ends a worker's whole group with it
    for number, descriptor in enumerate(request["files"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update({**request["environ"], **changed})
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    for name, parameter in MALLOC.items():
        if os.environ.get(name, "").isdigit():
            ctypes.CDLL(None).mallopt(parameter, min(int(os.environ[name]), 2**31 - 1))
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))


def _ask(path: str, arguments: list[str]) -> int | None:
    """Have a fork run the program `arguments`; its exit code, or None where there is none."""
    request = {"arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            connection.connect(path)
            socket.send_fds(connection, [HEADER.pack(len(data))], [0, 1, 2])
            connection.sendall(data)
            if connection.recv(1) != b"+":
                return None
            connection.settimeout(None)
            code = connection.recv(1)
        except OSError:
            return None
        return code[0] if code else 1


class WarmStart:
    """The process that has the imports, in the driver's hands; it ends with it at the latest. path: its socket."""

    def __init__(self, folder: Path, environ: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        """folder: of the run. environ: of the workers to come."""
        self.path = str(folder / "warm")
        with open(folder / "warm.log", "wb") as said, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(QUEUE)
            self._process = subprocess.Popen(
                [sys.executable, __file__, "serve", str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=[listener.fileno()],
                env=dict(environ),
                process_group=0,  # a signal to the driver's is for the driver alone
            )

    def close(self) -> None:
        """End it. Its forks live on: they end with Ray."""
        self._process.kill()
        self._process.communicate()


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any]:
    """Ray's runtime environment of workers with these variables."""
    made: dict[str, Any] = {"env_vars": dict(environment)}
    if VARIABLE in environment:
        made["py_executable"] = shlex.join([sys.executable, "-I", "-S", __file__, environment[VARIABLE]])
    return made


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
        import runpy

        runpy.run_path(sys.argv[0], run_name="__main__")
    elif (_code := _ask(sys.argv[1], sys.argv[2:])) is not None:
        sys.exit(_code)
    else:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
