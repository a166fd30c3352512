"""Spawn real learner ranks once and run many named cases in them.

A case is a function (rank, world, folder) -> result; every rank runs the same cases in the same order, so a case may
use collectives. An exception comes back as a `Failure` and is raised by `result`.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

Case = Callable[[int, int, Path], Any]
RankResults = dict[tuple[str, int], list[Any]]
MODULES = (
    "support.learner_step_cases",
    "support.learner_state_cases",
    "support.learner_shard_cases",
    "support.learner_supervised_cases",
    "support.learner_vision_cases",
    "support.learner_dtype_cases",
    "support.learner_teaching_cases",
    "support.learner_sharing_cases",
    "support.learner_sequence_cases",
    "support.learner_lora_cases",
    "support.learner_adapter_cases",
)
TIMEOUT = 540.0


@dataclass(frozen=True)
class Failure:
    """What went wrong in a case."""

    text: str


def result(results: RankResults, name: str, world: int) -> list[Any]:
    """What the ranks returned for a case, by rank."""
    outcomes = results[name, world]
    failures = [o.text for o in outcomes if isinstance(o, Failure)]
    if failures:
        raise RuntimeError("\n".join(failures))
    return outcomes


def result_file(folder: Path, name: str, world: int, rank: int) -> Path:
    return folder / f"{name}.{world}.{rank}.pt"


def wait_for(path: Path, seconds: float = 200.0) -> None:
    """Wait for another world's result."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not appear within {seconds} s")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, world: int, port: int, names: Sequence[str], folder: Path, modules: Sequence[str]) -> None:
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    )
    torch.set_num_threads(1)
    from openrlhf.learner.setup import init_distributed

    init_distributed("gloo")
    cases: dict[str, Case] = {}
    for module in modules:
        cases |= import_module(module).CASES
    for name in names:
        try:
            outcome = cases[name](rank, world, folder)
        except Exception:
            outcome = Failure(f"{name}, rank {rank} of {world}\n{traceback.format_exc()}")
        file = result_file(folder, name, world, rank)
        torch.save(outcome, file.with_suffix(".part"))
        os.rename(file.with_suffix(".part"), file)


def needed_cases(session: pytest.Session, attribute: str) -> dict[int, list[str]]:
    """World size -> the cases that the modules of the collected tests name in `attribute`.

    Those with tensor parallelism (`shard_...`) come last: DeepSpeed's groups stay for the life of a process.
    """
    needed: dict[int, dict[str, None]] = {}
    for item in session.items:
        module = item.getparent(pytest.Module)
        wanted: Mapping[int, list[str]] = getattr(module.obj, attribute, {}) if module is not None else {}
        for world, names in wanted.items():
            needed.setdefault(world, {}).update(dict.fromkeys(names))
    return {world: sorted(names, key=lambda n: n.startswith("shard_")) for world, names in sorted(needed.items())}


def run_cases(
    needed: Mapping[int, list[str]], folder: Path, modules: Sequence[str] = MODULES, timeout: float = TIMEOUT
) -> RankResults:
    """Start all worlds at once, run their cases, and wait for them."""
    started = {world: start_ranks(names, folder, world, modules) for world, names in needed.items()}
    results: RankResults = {}
    for world, context in started.items():
        for name, outcome in join_ranks(context, needed[world], folder, world, timeout).items():
            results[name, world] = outcome
    return results


def start_ranks(names: Sequence[str], folder: Path, world: int, modules: Sequence[str] = MODULES) -> Any:
    """Start `world` ranks that run the cases of these modules; hand what comes back to `join_ranks`.

    They end with this process, also when a test's time-out ends it.
    """
    return mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
        _rank_main, args=(world, free_port(), list(names), folder, modules), nprocs=world, join=False, daemon=True
    )


def join_ranks(
    context: Any, names: Sequence[str], folder: Path, world: int, timeout: float = TIMEOUT
) -> dict[str, list[Any]]:
    """Wait (bounded) and read the results. A case that never ended is a failure of its own."""
    deadline = time.monotonic() + timeout
    while not context.join(timeout=max(0.0, deadline - time.monotonic())):  # returns whenever one of them ends
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            break

    def read(name: str, rank: int) -> Any:
        file = result_file(folder, name, world, rank)
        if not file.exists():
            return Failure(f"{name}, rank {rank} of {world}: no result within {timeout} s")
        return torch.load(file, weights_only=False)

    return {name: [read(name, rank) for rank in range(world)] for name in names}
