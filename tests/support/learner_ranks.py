"""Spawn real learner ranks once and run many named cases in them.

A case is a function (rank, world, folder) -> result; every rank runs the same cases in the same order, so a case may
use collectives. Results come back as {case: [result of rank 0, of rank 1, ...]}; an exception comes back as its text.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

Case = Callable[[int, int, Path], Any]
TIMEOUT = 240.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, world: int, port: int, module: str, names: Sequence[str], folder: Path) -> None:
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    )
    torch.set_num_threads(1)
    from openrlhf.learner.setup import init_distributed

    init_distributed("gloo")
    cases: Mapping[str, Case] = import_module(module).CASES
    for name in names:
        try:
            result = cases[name](rank, world, folder)
        except Exception:
            result = f"FAILED {name}\n{traceback.format_exc()}"
        torch.save(result, folder / f"{name}.{world}.{rank}.pt")


def start_ranks(module: str, names: Sequence[str], folder: Path, world: int) -> Any:
    """Start `world` ranks that run the cases of `module`; hand the result to `join_ranks`."""
    args = (world, free_port(), module, list(names), folder)
    return mp.spawn(_rank_main, args=args, nprocs=world, join=False)


def join_ranks(context: Any, names: Sequence[str], folder: Path, world: int) -> dict[str, list[Any]]:
    """Wait (bounded) and read the results."""
    deadline = time.monotonic() + TIMEOUT
    while not context.join(timeout=max(0.0, deadline - time.monotonic())):  # returns whenever one of them ends
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"ranks did not end within {TIMEOUT} s")
    read = {n: [torch.load(folder / f"{n}.{world}.{r}.pt", weights_only=False) for r in range(world)] for n in names}
    failures = [r for results in read.values() for r in results if isinstance(r, str) and r.startswith("FAILED")]
    if failures:
        raise RuntimeError("\n".join(failures))
    return read


def run_ranks(module: str, names: Sequence[str], folder: Path, world: int) -> dict[str, list[Any]]:
    return join_ranks(start_ranks(module, names, folder, world), names, folder, world)
