"""A learner's part of a checkpoint: model, optimiser, schedule, average and random states, bit for bit.

Layout under the given folder: the backend's own files, `rank{r}.pt` (random states), `ema.safetensors`, `learner.json`
(what it was written with).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.ema import MovingAverage
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.folders.shared import sizes_below
from openrlhf.learner.spec import Role

INFO = "learner.json"
EMA = "ema.safetensors"


def save(
    engine: TrainingEngine, role: Role, ema: MovingAverage | None, folder: Path, state: dict[str, Any]
) -> dict[str, int]:
    """Write into `folder`. Collective. state: small values of the learner, the same on every rank.

    Returns the files that this rank then sees there, its own among them, with their bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(folder)
    rank, world = rank_and_world()
    torch.save({"random": random_state(), "state": state}, folder / f"rank{rank}.pt")
    averages = None if ema is None else ema.full_state()
    if rank == 0:
        if averages is not None:
            from safetensors.torch import save_file

            save_file(averages, str(folder / EMA))
        info = {"role": role.value, **engine.layout(), "ema": ema is not None, "world_size": world}
        (folder / INFO).write_text(json.dumps(info, indent=2) + "\n")
    if world > 1:
        dist.barrier()
    return sizes_below(folder)


def load(engine: TrainingEngine, role: Role, ema: MovingAverage | None, folder: Path) -> dict[str, Any]:
    """Restore from `folder`; returns the `state` that was saved. Collective.

    Random states come back only at the same world size.

    Raises:
        ValueError: no checkpoint there, or one of another role or without an average, or what the backend refuses.
    """
    if not (folder / INFO).is_file():
        raise ValueError(f"no learner checkpoint in {str(folder)!r}: {INFO} is missing")
    info = json.loads((folder / INFO).read_text())
    if info["role"] != role.value:
        raise ValueError(
            f"the checkpoint {str(folder)!r} was written with role {info['role']!r}, this run has {role.value!r}"
        )
    if ema is not None and not info["ema"]:
        raise ValueError(f"the checkpoint {str(folder)!r} has no moving average: leave `batch.enable_ema` out")
    engine.load(folder, info)
    rank, world = rank_and_world()
    same = info["world_size"] == world
    saved = torch.load(folder / f"rank{rank if same else 0}.pt", weights_only=False)
    if same:
        set_random_state(saved["random"])
    if ema is not None:
        from safetensors.torch import load_file

        ema.load_full_state(load_file(str(folder / EMA)))
    return saved["state"]


def random_state() -> dict[str, Any]:
    """Python's, torch's and this device's random states."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
