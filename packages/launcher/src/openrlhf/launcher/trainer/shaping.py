"""From the scalars of finished groups to what is trained on: shaped rewards, baselines, sample references, metrics.

The order is fixed: raw reward -> running normalisation -> clip -> overlong -> stop-properly -> group baseline.
Failed samples are left out of all statistics and of training. Rewards and scores are those of episodes: one with many
branches counts once, with their mean. Lengths are those of the sequences that are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from openrlhf.agents.types import StopReason
from openrlhf.core.config import RewardShapingConfig
from openrlhf.core.rewards import RunningRewardNorm, group_baseline, shape_rewards
from openrlhf.core.tables import estimator_row
from openrlhf.launcher.logging.values import nan_mean
from openrlhf.launcher.samples import Group, SampleInfo, SampleRef
from openrlhf.rollout import episodes


@dataclass(frozen=True, kw_only=True)
class ShapedBatch:
    """The samples to train on and the metrics of all that were sampled."""

    samples: list[SampleRef]
    metrics: dict[str, float] = field(default_factory=dict)


def flatten(groups: Sequence[Group]) -> list[tuple[Group, int, SampleInfo]]:
    """Every sample that did not fail: (group, place in the group, scalars)."""
    return [(g, i, s) for g in groups for i, s in enumerate(g.samples) if not s.failed]


def shape_groups(
    groups: Sequence[Group],
    *,
    estimator: str,
    shaping: RewardShapingConfig,
    max_response_len: int,
    norm: RunningRewardNorm | None,
) -> ShapedBatch:
    """Shape the rewards of a rollout batch.

    max_response_len: rollout.max_new_tokens, else data.max_len. norm: running normaliser, updated here.
    """
    kept = flatten(groups)
    if not kept:
        return ShapedBatch(samples=[], metrics=sample_metrics(groups, [], []))
    raw = torch.tensor([_reward(s) for _, _, s in kept])
    if norm is not None:
        norm.update(torch.tensor(_per_episode(groups, raw.tolist())))
    shaped = shape_rewards(
        raw,
        lengths=torch.tensor([s.longest_turn for _, _, s in kept]),
        truncated=torch.tensor([s.stop_reason == StopReason.LENGTH for _, _, s in kept]),
        config=shaping,
        max_length=max_response_len,
        norm=norm,
    )
    numbers = {id(g): n for n, g in enumerate(groups)}
    names = {id(g): episodes.names(g.samples) for g in groups}
    baseline = group_baseline(
        estimator,
        shaped,
        torch.tensor([numbers[id(g)] for g, _, _ in kept]),
        episodes=torch.tensor([names[id(g)][i] for g, i, _ in kept]),
    )
    samples = [
        SampleRef(
            handle=g.handle,
            position=i,
            index=index,
            reward=value,
            length=s.total_length,
            prompt_length=s.prompt_length,
            raw=s.reward,
            score=s.score,
        )
        for index, ((g, i, s), value, valid) in enumerate(
            zip(kept, baseline.rewards.tolist(), baseline.keep.tolist(), strict=True)
        )
        if valid and s.num_trainable > 0
    ]
    metrics = sample_metrics(groups, raw.tolist(), shaped.tolist())
    if estimator_row(estimator).groups:
        metrics["rollout/dropped_groups"] = float(baseline.dropped_groups)
    return ShapedBatch(samples=samples, metrics=metrics)


def _reward(sample: SampleInfo) -> float:
    assert sample.reward is not None, "a sample that did not fail has a reward"
    return sample.reward


def sample_metrics(groups: Sequence[Group], raw: Sequence[float], shaped: Sequence[float]) -> dict[str, float]:
    """Statistics of one rollout batch, under the names that dashboards know.

    Failed samples are counted where batches are made, with those whose groups are in none.
    """
    every = [s for g in groups for s in g.samples]
    alive = [s for s in every if not s.failed]
    metrics = {"rollout/num_samples": float(len(every))}
    if not alive:
        return metrics
    rewards = [_per_episode([group], own) for group, own in zip(groups, _per_group(groups, raw), strict=True)]
    values = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    scores = [s.score if s.score is not None else r for s, r in zip(alive, raw, strict=True)]
    metrics |= {
        "rollout/num_episodes": float(sum(len(episodes.by_episode(g.samples)) for g in groups)),
        "train/reward": float(values.mean()),
        "train/reward_shaped": nan_mean(_per_episode(groups, shaped)),
        "train/score": nan_mean(_per_episode(groups, scores)),
        "train/response_length": nan_mean([s.num_trainable for s in alive]),
        "train/total_length": nan_mean([s.total_length for s in alive]),
        "train/truncated": nan_mean([s.truncated for s in alive]),
        "train/response_clip_ratio": nan_mean([s.clipped for s in alive]),
        "train/group_reward_std": _group_std(rewards),
        "rollout/reward_mean": float(values.mean()),
        "rollout/reward_std": float(values.std(correction=0)),
        "rollout/response_length_mean": nan_mean([s.num_trainable for s in alive]),
        "rollout/truncated_rate": nan_mean([s.truncated for s in alive]),
    }
    for key in sorted({key for s in alive for key in s.extra_logs}):
        metrics[f"train/{key}"] = nan_mean([s.extra_logs[key] for s in alive if key in s.extra_logs])
    return metrics


def _per_group(groups: Sequence[Group], values: Sequence[float]) -> list[list[float]]:
    """Values of the samples that did not fail, group by group."""
    rest = iter(values)
    return [[next(rest) for s in group.samples if not s.failed] for group in groups]


def _per_episode(groups: Sequence[Group], values: Sequence[float]) -> list[float]:
    """The same, as one mean per episode that has any."""
    means: list[float] = []
    for group, own in zip(groups, _per_group(groups, values), strict=True):
        found: dict[int, list[float]] = {}
        alive = [name for name, s in zip(episodes.names(group.samples), group.samples, strict=True) if not s.failed]
        for name, value in zip(alive, own, strict=True):
            found.setdefault(name, []).append(value)
        means += [nan_mean(branches) for branches in found.values()]
    return means


def _group_std(rewards: Sequence[Sequence[float]]) -> float:
    """Mean over the groups of the sample standard deviation of their episodes' rewards; groups of one count 0."""
    stds = [float(torch.tensor(own, dtype=torch.float64).std()) if len(own) > 1 else 0.0 for own in rewards if own]
    return sum(stds) / len(stds)
