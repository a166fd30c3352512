"""DeepSpeed's files in a learner's checkpoint: `deepspeed/`, and `deepspeed_universal/` for any number of ranks.

The latter is made by `python -m openrlhf.learner.universal FOLDER`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from openrlhf.learner.checkpoint_dir import fresh_directory
from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.spec import LearnerSpec

TAG = "deepspeed"
UNIVERSAL_TAG = "deepspeed_universal"
STAGES = (
    "stages 1 and 2 load each other's universal checkpoints (`ds.use_universal_ckpt`), 0 and 3 only their own; "
    "keep the stage, or start anew from exported weights (`store.export`, `model_path`)"
)


def layout(spec: LearnerSpec) -> dict[str, Any]:
    """What the files depend on."""
    assert spec.optim is not None, "only trained models have checkpoints"
    lora = spec.ds.lora
    adapters = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "target_modules": " ".join(lora.target_modules),
        "rslora": lora.rslora,
        "dora": lora.dora,
    }
    return {
        "zero_stage": spec.ds.zero_stage,
        "optim": spec.optim.optim,
        "param_dtype": spec.ds.param_dtype,
        "tensor_parallel_size": spec.ds.tensor_parallel_size,
        **{f"lora.{name}": value for name, value in adapters.items()},
    }


def save(ds_engine: Any, spec: LearnerSpec, folder: Path) -> None:
    """Write into `folder`; of a model with adapters not its base, which `model_path` has. Collective."""
    alone = spec.ds.lora.rank > 0
    ds_engine.save_checkpoint(str(folder), tag=TAG, client_state={}, save_latest=False, exclude_frozen_parameters=alone)


def load(ds_engine: Any, spec: LearnerSpec, folder: Path, saved: Mapping[str, Any]) -> None:
    """Restore from `folder`. Collective.

    Raises:
        ValueError: a checkpoint of another optimiser, dtype, ZeRO stage (universal ones: 1 and 2 are one) or, unless
            universal or of stage 0, world size.
    """
    # stage 0 partitions nothing: its checkpoints fit any number of ranks as they are
    universal = spec.ds.use_universal_ckpt and spec.ds.zero_stage > 0
    now = layout(spec)
    older = {"tensor_parallel_size": 1} | {name: value for name, value in now.items() if name.startswith("lora.")}
    _check(folder, {**older, **saved}, now, universal=universal)  # those of older releases do not say so
    tag = UNIVERSAL_TAG if universal else TAG
    own = partial(_load_trained, str(folder)) if spec.ds.lora.rank > 0 else None
    loaded, _ = ds_engine.load_checkpoint(str(folder), tag=tag, custom_load_fn=own)
    if loaded is None:
        raise ValueError(f"DeepSpeed found no checkpoint in {str(folder / tag)!r}")


def _load_trained(folder: str, *, src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """All that is trained; the rest of the model is as it was loaded.

    Of 4-bit weights files hold the scales, which belong to no parameter.
    """
    missing, unexpected = dst.load_state_dict(src, strict=False)
    trained = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    wrong = sorted({*(name for name in unexpected if ".lora_" in name), *trained.intersection(missing)})
    if wrong:
        raise ValueError(
            f"the checkpoint {folder!r} has other adapters than this model: {', '.join(wrong[:3])}"
            f"{', ...' if len(wrong) > 3 else ''}; give the `model_path` that it was written with"
        )


def _check(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], *, universal: bool) -> None:
    # DeepSpeed's universal format for partitioned parameters is not the one for partitioned optimiser states.
    interchangeable = universal and {saved["zero_stage"], now["zero_stage"]} <= {1, 2}
    for name in now:
        if saved[name] != now[name] and not (interchangeable and name == "zero_stage"):
            place = f"`optim.{name}`" if name == "optim" else f"`ds.{name}`"
            raise ValueError(
                f"the checkpoint {str(folder)!r} was written with {place} {saved[name]!r}, this run has {now[name]!r}"
                + (f": {STAGES}" if name == "zero_stage" else "")
            )
    convert = f"python -m openrlhf.learner.universal {folder}"
    if universal and not (folder / UNIVERSAL_TAG).is_dir():
        raise ValueError(f"{str(folder)!r} holds no universal checkpoint: make one with\n  {convert}")
    _, world = rank_and_world()
    if not universal and saved["world_size"] != world and now["zero_stage"] > 0:
        raise ValueError(
            f"the checkpoint {str(folder)!r} was written by {saved['world_size']} ranks, this run has {world}: run\n"
            f"  {convert}\nand add `ds.use_universal_ckpt`"
        )


def convert(folder: Path, saved: Mapping[str, Any]) -> Path:
    """Write `deepspeed_universal` beside `deepspeed` in one learner's folder; complete or absent.

    saved: what the checkpoint was written with.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    if saved["zero_stage"] == 0:
        raise ValueError(f"{str(folder)!r} was written with `ds.zero_stage` 0: it loads at any world size as it is")
    if (folder / UNIVERSAL_TAG).is_dir():  # complete, and a checkpoint never changes
        return folder / UNIVERSAL_TAG
    with fresh_directory(folder / UNIVERSAL_TAG) as out:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(folder / TAG),
                output_folder=str(out),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    return folder / UNIVERSAL_TAG
