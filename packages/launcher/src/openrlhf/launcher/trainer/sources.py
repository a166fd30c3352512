"""Metrics of each data source and environment: their parts of what the metrics of the whole batch say.

`source/{name}/...` where a prompt has a datasource, and `environment/{name}/...` where environments are something else:

num_episodes, share: episodes of the batch and their part of all. reward, pass_rate: means over those that did not fail.
response_length: mean over their samples, as `train/response_length` is.
failed_samples: failed episodes of all groups that finished since the last batch; they add up to rollout/failed_samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.logging.values import nan_mean
from openrlhf.launcher.samples import Group
from openrlhf.rollout import episodes

UNNAMED = "default"
"""The datasource of prompts that have none."""
PASSED = 1.0
"""The score from which on an episode passes: what graders give for a right answer."""


def named(items: Iterable[PromptItem]) -> bool:
    """Whether there is anything to tell apart."""
    return any(item.datasource != UNNAMED or item.environment for item in items)


def _prefixes(item: PromptItem) -> list[str]:
    own = [f"environment/{item.environment}"] if item.environment not in ("", item.datasource) else []
    return [f"source/{item.datasource}", *own]


def by_source(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of each source and environment in a batch; empty where all prompts are of one that has no name."""
    if not named(g.prompt for g in groups):
        return {}
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        for prefix in _prefixes(group.prompt):
            parts[prefix].append(group)
    every = _count(groups)
    metrics: dict[str, float] = {}
    for prefix, own in sorted(parts.items()):
        values = {
            "num_episodes": float(_count(own)),
            "share": _count(own) / every,
            "reward": nan_mean(value for g in own for value in _means(g, score=False)),
            "pass_rate": pass_rate(own),
            "response_length": nan_mean(s.num_trainable for g in own for s in g.samples if not s.failed),
            "failed_samples": 0.0,
        }
        metrics |= {f"{prefix}/{name}": value for name, value in values.items()}
    return metrics


def failures_by_source(failed: Iterable[tuple[PromptItem, int]]) -> dict[str, float]:
    """How many episodes failed, from prompts and the failed episodes of each."""
    metrics: dict[str, float] = defaultdict(float)
    for item, count in failed:
        for prefix in _prefixes(item):
            metrics[f"{prefix}/failed_samples"] += count
    return dict(metrics)


def pass_rate(groups: Sequence[Group]) -> float:
    """The share of episodes with a score of 1 or more among those that did not fail; branches count by their mean."""
    return nan_mean(float(value >= PASSED) for group in groups for value in _means(group, score=True))


def _count(groups: Sequence[Group]) -> int:
    return sum(len(episodes.by_episode(g.samples)) for g in groups)


def _means(group: Group, *, score: bool) -> list[float]:
    """The mean reward (or score, where there is one) of every episode with a branch that did not fail."""
    found = []
    for episode in episodes.by_episode(group.samples):
        alive = [s for s in episode if not s.failed]
        if alive:
            found.append(nan_mean(s.score if score and s.score is not None else s.reward for s in alive))
    return found
