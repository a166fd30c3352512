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
from openrlhf.core.config import RewardShapingConfig, TurnRewards
from openrlhf.core.rewards import RunningRewardNorm, group_baseline, shape_rewards
from openrlhf.core.tables import estimator_row
from openrlhf.core.turns import turn_credit
from openrlhf.launcher.logging.values import nan_mean
from openrlhf.launcher.samples import Group, SampleInfo, SampleRef
from openrlhf.launcher.trainer.sources import by_source, pass_rate
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
    turn_rewards: TurnRewards = "off",
    turn_gamma: float = 1.0,
) -> ShapedBatch:
    """Shape the rewards of a rollout batch.

    max_response_len: rollout.max_new_tokens, else data.max_len. norm: running normaliser, updated here.
    turn_rewards, turn_gamma: as in `core.turns.turn_credit`.
    """
    kept = flatten(groups)
    if not kept:
        return ShapedBatch(samples=[], metrics=sample_metrics(groups, [], []))
    # A turn's baseline is about small differences of sums, which float32 would round.
    precision = torch.float32 if turn_rewards == "off" else torch.float64
    raw = torch.tensor([_reward(s) for _, _, s in kept], dtype=precision)
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
    members = [(numbers[id(g)], names[id(g)][i]) for g, i, _ in kept]
    baseline = group_baseline(
        estimator,
        shaped,
        torch.tensor([number for number, _ in members]),
        episodes=torch.tensor([name for _, name in members]),
    )
    metrics = sample_metrics(groups, raw.tolist(), shaped.tolist())
    credit: dict[int, list[float]] = {}
    if turn_rewards != "off":
        scale = 1.0 if norm is None else norm.scale
        turns = [s.turn_rewards for _, _, s in kept]
        credit, more = _credit(turn_rewards, estimator, shaped, turns, members=members, gamma=turn_gamma, scale=scale)
        metrics |= more
    rows = enumerate(zip(kept, baseline.rewards.tolist(), baseline.keep.tolist(), strict=True))
    samples = [
        _reference(g, i, index=index, reward=value, turns=credit.get(index))
        for index, ((g, i, s), value, valid) in rows
        if valid and s.num_trainable > 0
    ]
    if estimator_row(estimator).groups:
        metrics["rollout/dropped_groups"] = float(baseline.dropped_groups)
    return ShapedBatch(samples=samples, metrics=metrics)


def _reference(group: Group, place: int, *, index: int, reward: float, turns: Sequence[float] | None) -> SampleRef:
    sample = group.samples[place]
    return SampleRef(
        handle=group.handle,
        position=place,
        index=index,
        reward=reward,
        length=sample.total_length,
        prompt_length=sample.prompt_length,
        raw=sample.reward,
        score=sample.score,
        turn_rewards=turns,
    )


def _credit(
    mode: TurnRewards,
    estimator: str,
    shaped: torch.Tensor,
    turns: Sequence[Sequence[float] | None],
    *,
    members: Sequence[tuple[int, int]],
    gamma: float,
    scale: float,
) -> tuple[dict[int, list[float]], dict[str, float]]:
    """What the turns of every sample get, by the sample's number, and metrics. members: its group and episode.

    A sample whose turns are not known has one reward for all of them.
    """
    known = [(n, rewards) for n, rewards in enumerate(turns) if rewards is not None]
    if not known:
        return {}, {}
    places = [n for n, _ in known]
    credit = turn_credit(
        mode,
        estimator,
        shaped[places],
        [rewards for _, rewards in known],
        groups=[members[n][0] for n in places],
        episodes=[members[n][1] for n in places],
        gamma=gamma,
        scale=scale,
    )
    metrics = {"rollout/turns_mean": credit.turns / len(known), "train/turns_alone": credit.alone / credit.turns}
    return dict(zip(places, credit.rewards, strict=True)), metrics


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
        "train/pass_rate": pass_rate(groups),
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
    metrics |= by_source(groups)
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
