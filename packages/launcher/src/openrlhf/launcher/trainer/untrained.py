"""Samples that were not trained on yet, as a file of a checkpoint: handles become trajectories and back."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.launcher.trainer.collect import Collected, Untrained
from openrlhf.launcher.trainer.protocols import Group, Rollout

FILE = "untrained.pkl"


async def write_untrained(untrained: Untrained, rollout: Rollout, folder: Path) -> None:
    """Write `folder`/untrained.pkl; nothing when everything was trained on."""
    if not untrained:
        return
    content = {
        "batches": [(await _resolved(b.groups, rollout), b.metrics) for b in untrained.batches],
        "groups": await _resolved(untrained.groups, rollout),
        "deadlines": untrained.deadlines,
        "prompts": untrained.prompts,
    }
    (folder / FILE).write_bytes(pickle.dumps(content))


async def read_untrained(rollout: Rollout, folder: Path) -> Untrained:
    """What `write_untrained` wrote; empty without such a file, which is trusted like the rest of the checkpoint."""
    path = folder / FILE
    if not path.exists():
        return Untrained()
    content = pickle.loads(path.read_bytes())
    return Untrained(
        batches=[
            Collected(groups=[await _stored(g, rollout) for g in groups], metrics=metrics)
            for groups, metrics in content["batches"]
        ],
        groups=[await _stored(g, rollout) for g in content["groups"]],
        deadlines=content["deadlines"],
        prompts=content["prompts"],
    )


async def _resolved(groups: Sequence[Group], rollout: Rollout) -> list[dict[str, Any]]:
    samples = await asyncio.gather(*(rollout.fetch(group) for group in groups))
    return [
        {"prompt": group.prompt, "samples": list(group.samples), "trajectories": trajectories}
        for group, trajectories in zip(groups, samples, strict=True)
    ]


async def _stored(saved: dict[str, Any], rollout: Rollout) -> Group:
    handle = await rollout.store(saved["trajectories"])
    return Group(prompt=saved["prompt"], samples=saved["samples"], handle=handle)
