"""What was sampled and not trained on yet, and its file in a checkpoint: handles become trajectories and back."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.agents.types import PromptItem, Turn
from openrlhf.launcher.samples import Group, SampleInfo
from openrlhf.launcher.trainer.protocols import Rollout

FILE = "untrained.pkl"
W = TypeVar("W", SampleInfo, PromptItem, Turn)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A rollout batch and what it took to get it."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """What was sampled or drawn but not trained on yet: part of a checkpoint, so that nothing is lost.

    batches: filled ones. groups: accepted ones that no batch has yet, with their deadlines. prompts: of the groups that
    were under way; they are rolled out again.
    """

    batches: list[Collected] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    deadlines: list[int] = field(default_factory=list)
    prompts: list[PromptItem] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.batches or self.groups or self.prompts)


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
    content = _Unpickler(io.BytesIO(path.read_bytes())).load()
    return Untrained(
        batches=[
            Collected(groups=[await _stored(g, rollout) for g in groups], metrics=metrics)
            for groups, metrics in content["batches"]
        ],
        groups=[await _stored(g, rollout) for g in content["groups"]],
        deadlines=content["deadlines"],
        prompts=[_whole(p) for p in content["prompts"]],
    )


class _Unpickler(pickle.Unpickler):
    """Finds what checkpoints of 0.2 hold where it lies now."""

    def find_class(self, module: str, name: str) -> Any:
        home = SampleInfo.__module__ if name == SampleInfo.__name__ else module
        return super().find_class(home, name)


async def _resolved(groups: Sequence[Group], rollout: Rollout) -> list[dict[str, Any]]:
    samples = await asyncio.gather(*(rollout.fetch(group) for group in groups))
    return [
        {"prompt": group.prompt, "samples": list(group.samples), "trajectories": trajectories}
        for group, trajectories in zip(groups, samples, strict=True)
    ]


async def _stored(saved: dict[str, Any], rollout: Rollout) -> Group:
    trajectories = saved["trajectories"]
    if isinstance(trajectories, list):
        trajectories = [replace(t, turns=[_whole(turn) for turn in t.turns]) for t in trajectories]
    handle = await rollout.store(trajectories)
    return Group(prompt=_whole(saved["prompt"]), samples=[_whole(s) for s in saved["samples"]], handle=handle)


def _whole(saved: W) -> W:
    """With the fields that it has in this version, where an earlier one wrote it."""
    return type(saved)(**{f.name: getattr(saved, f.name) for f in fields(saved) if hasattr(saved, f.name)})
