"""Rows about two learner ranks: data-parallel, one model cut over both, and rows of tokens cut over both."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch

from openrlhf.launcher.selfcheck.learning import make_learner, must_agree, settings, small_batch, take_steps
from openrlhf.launcher.selfcheck.models import make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.setup import leave_distributed

RANKS = 2
RANKS_TIMEOUT = 400.0


def ranks(folder: Path) -> Outcome:
    """Two ranks with half of the batch each, against one with all of it."""
    return _against_one(folder, "two ranks")


def tensor_parallel(folder: Path) -> Outcome:
    """Two ranks with half of every matrix each, against one with whole ones."""
    return _against_one(folder, "--ds.tensor_parallel_size 2", tensor_parallel_size=RANKS)


def sequence_parallel(folder: Path) -> Outcome:
    """Two ranks with half of every packed row each, against one with whole rows."""
    return _against_one(folder, "--ds.ring_attn_size 2", ring_attn_size=RANKS, packing_samples=True)


def _against_one(folder: Path, what: str, **together: Any) -> Outcome:
    """together: settings with which both ranks work on all samples; without, each has half of them."""
    model = make_model(folder / "model")
    expected = take_steps(make_learner(model, settings()), small_batch())
    leave_distributed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    result = folder / "losses.json"
    processes = [
        context.Process(target=_rank, args=(rank, port, model, together, str(result))) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            process.join(RANKS_TIMEOUT)
            if process.exitcode != 0:
                raise CheckError(f"rank {rank} of {what}: exit status {process.exitcode}, None is no end in time")
    finally:
        for process in processes:
            process.kill()
    worst = must_agree(json.loads(result.read_text()), expected, what)
    return Outcome(detail=f"losses differ by {worst:.1e} at most", numbers={"relative_difference": worst})


def _rank(rank: int, port: int, model: str, together: dict[str, Any], result: str) -> None:
    number, size = str(rank), str(RANKS)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, LOCAL_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    batch = small_batch()
    if not together:
        batch = batch.select(torch.arange(rank, batch.size, RANKS))
    losses = take_steps(make_learner(model, settings(**together)), batch)
    if rank == 0:
        Path(result).write_text(json.dumps(losses))
    leave_distributed()
