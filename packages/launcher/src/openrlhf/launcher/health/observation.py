"""What the alarms look at: a step in a few numbers, all of which the trainer has anyway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from openrlhf.launcher.samples import Group


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """The samples of one prompt that did not fail. constant: whether several have the same reward.

    same_answer: whether several have the same answer. best: their highest reward.
    """

    constant: bool
    same_answer: bool
    best: float


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step. Rewards are raw. lengths: trainable tokens of each sample, parallel to rewards. sources: data source of
    each. unlabelled: whether no prompt has a label. entropy: of the policy in nats per token, None: not measured."""

    step: int
    metrics: Mapping[str, float]
    groups: Sequence[GroupFacts] = ()
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    lengths: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    sources: Sequence[str] = ()
    unlabelled: bool = False

    @property
    def reward(self) -> float:
        """The mean raw reward; NaN where all samples failed."""
        return float(self.rewards.mean()) if len(self.rewards) else float("nan")

    @property
    def entropy(self) -> float | None:
        """Of the policy, nats per token: measured, else estimated from the log-probs of what was sampled."""
        return self.metrics.get("train/entropy_loss", self.metrics.get("rollout/entropy"))

    @property
    def varies(self) -> bool:
        """Whether two samples have different rewards."""
        return len(self.rewards) > 0 and bool(np.ptp(self.rewards) > 0)


def observe(step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Observation:
    """From what the trainer holds after a step."""
    alive = [(group, s) for group in groups for s in group.samples if not s.failed and s.reward is not None]
    members = defaultdict(list)
    for group, sample in alive:
        members[id(group)].append(sample)
    facts = [
        GroupFacts(
            constant=len(own) > 1 and len({s.reward for s in own}) == 1,
            same_answer=len(own) > 1 and len({s.answer for s in own}) == 1,
            best=max(s.reward for s in own),
        )
        for own in members.values()
    ]
    return Observation(
        step=step,
        metrics=metrics,
        groups=facts,
        rewards=np.array([s.reward for _, s in alive], dtype=np.float64),
        lengths=np.array([s.num_trainable for _, s in alive], dtype=np.float64),
        sources=[group.prompt.datasource for group, _ in alive],
        unlabelled=bool(groups) and all(group.prompt.label in ("", None) for group in groups),
    )
