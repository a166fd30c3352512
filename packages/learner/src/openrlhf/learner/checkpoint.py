"""A learner's part of a checkpoint: model, optimiser, schedule, average and random states, bit for bit.

Layout under the given folder: `deepspeed/` (DeepSpeed's own files), `rank{r}.pt` (random states), `ema.safetensors`,
`learner.json` (what it was written with). After `python -m openrlhf.learner.universal FOLDER` also
`deepspeed_universal/`, which fits any number of ranks.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.learner.ema import MovingAverage
from openrlhf.learner.engine import TrainingEngine

TAG = "deepspeed"
UNIVERSAL_TAG = "deepspeed_universal"
INFO = "learner.json"
EMA = "ema.safetensors"
STAGES = (
    "stages 1 and 2 load each other's universal checkpoints (`ds.use_universal_ckpt`), 0 and 3 only their own; "
    "keep the stage, or start anew from exported weights (`store.export`, `model_path`)"
)


def save(engine: TrainingEngine, ema: MovingAverage | None, folder: Path, state: dict[str, Any]) -> None:
    """Write into `folder`. Collective. state: small values of the learner, the same on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.ds_engine.save_checkpoint(str(folder), tag=TAG, client_state={}, save_latest=False)
    rank, world = _rank_and_world()
    torch.save({"random": random_state(), "state": state}, folder / f"rank{rank}.pt")
    averages = None if ema is None else ema.full_state()
    if rank == 0:
        if averages is not None:
            from safetensors.torch import save_file

            save_file(averages, str(folder / EMA))
        (folder / INFO).write_text(json.dumps(_fingerprint(engine, ema) | {"world_size": world}, indent=2) + "\n")
    if world > 1:
        dist.barrier()


def load(engine: TrainingEngine, ema: MovingAverage | None, folder: Path) -> dict[str, Any]:
    """Restore from `folder`; returns the `state` that was saved. Collective.

    Random states come back only at the same world size.

    Raises:
        ValueError: no checkpoint there, or one of another role, optimiser, ZeRO stage (universal ones: 1 and 2 are one)
            or, unless universal or of stage 0, world size.
    """
    if not (folder / INFO).is_file():
        raise ValueError(f"no learner checkpoint in {str(folder)!r}: {INFO} is missing")
    info = {"tensor_parallel_size": 1} | json.loads((folder / INFO).read_text())  # older ones lack it
    rank, world = _rank_and_world()
    _check(info, engine, ema, world, folder)
    tag = UNIVERSAL_TAG if _universal(engine) else TAG
    loaded, _ = engine.ds_engine.load_checkpoint(str(folder), tag=tag)
    if loaded is None:
        raise ValueError(f"DeepSpeed found no checkpoint in {str(folder / tag)!r}")
    same = info["world_size"] == world
    saved = torch.load(folder / f"rank{rank if same else 0}.pt", weights_only=False)
    if same:
        set_random_state(saved["random"])
    if ema is not None:
        from safetensors.torch import load_file

        ema.load_full_state(load_file(str(folder / EMA)))
    return saved["state"]


def _fingerprint(engine: TrainingEngine, ema: MovingAverage | None) -> dict[str, Any]:
    assert engine.spec.optim is not None
    return {
        "role": engine.spec.role.value,
        "zero_stage": engine.spec.ds.zero_stage,
        "optim": engine.spec.optim.optim,
        "param_dtype": engine.spec.ds.param_dtype,
        "tensor_parallel_size": engine.spec.ds.tensor_parallel_size,
        "ema": ema is not None,
    }


_FLAGS = {
    "zero_stage": "`ds.zero_stage`",
    "optim": "`optim.optim`",
    "param_dtype": "`ds.param_dtype`",
    "tensor_parallel_size": "`ds.tensor_parallel_size`",
    "role": "role",
}


def _universal(engine: TrainingEngine) -> bool:
    """Stage 0 partitions nothing: its checkpoints fit any number of ranks as they are."""
    return engine.spec.ds.use_universal_ckpt and engine.spec.ds.zero_stage > 0


def _check(info: dict[str, Any], engine: TrainingEngine, ema: MovingAverage | None, world: int, folder: Path) -> None:
    now = _fingerprint(engine, ema)
    universal = _universal(engine)
    # DeepSpeed's universal format for partitioned parameters is not the one for partitioned optimiser states.
    interchangeable = universal and {info["zero_stage"], now["zero_stage"]} <= {1, 2}
    for name, flag in _FLAGS.items():
        if info[name] != now[name] and not (interchangeable and name == "zero_stage"):
            raise ValueError(
                f"the checkpoint {str(folder)!r} was written with {flag} {info[name]!r}, this run has {now[name]!r}"
                + (f": {STAGES}" if name == "zero_stage" else "")
            )
    if now["ema"] and not info["ema"]:
        raise ValueError(f"the checkpoint {str(folder)!r} has no moving average: leave `batch.enable_ema` out")
    convert = f"python -m openrlhf.learner.universal {folder}"
    if universal and not (folder / UNIVERSAL_TAG).is_dir():
        raise ValueError(f"{str(folder)!r} holds no universal checkpoint: make one with\n  {convert}")
    if not universal and info["world_size"] != world and now["zero_stage"] > 0:
        raise ValueError(
            f"the checkpoint {str(folder)!r} was written by {info['world_size']} ranks, this run has {world}: run\n"
            f"  {convert}\nand add `ds.use_universal_ckpt`"
        )


def random_state() -> dict[str, Any]:
    """Python's, torch's and this device's random states."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
