"""The alarms: a row each, with the flags to turn. A check is a pure function of the last steps.

It gets the steps that are remembered, the newest last, and gives the evidence, or None where nothing is wrong. Limits
are wide: an alarm that cries at a healthy run is switched off and never read again. What a solved task looks like (all
groups right, all answers alike, low entropy) is no alarm: that is told from a sick run by the rewards seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from openrlhf.launcher.health.observation import Observation

Seen = Sequence[Observation]

REMEMBERED = 20
"""Steps that a check may look at."""
TREND = 12
"""Steps from which on a trend is judged."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the configuration says of a healthy run. rewards: whether it learns from rewards. best: the highest reward
    of the run so far, where rewards have varied; nothing beats it. start: (entropy, reward) of the first steps.
    closest: the lowest KL to the reference of the run so far."""

    max_norm: float
    rewards: bool = True
    groups: bool = True
    best: float = float("inf")
    start: tuple[float, float] | None = None
    closest: float = 0.0


Check = Callable[[Seen, Expected], str | None]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """fix: the flags to turn. steps: so many in a row must look so."""

    check: Check
    fix: str
    steps: int = 1


def _metric(seen: Seen, name: str) -> float | None:
    return seen[-1].metrics.get(name)


def no_reward_variance(seen: Seen, expected: Expected) -> str | None:
    """Every group has one reward: nothing is learned."""
    now = seen[-1]
    if not expected.rewards or not len(now.rewards) or _solved(now, expected):
        return None
    alike = all(g.constant for g in now.groups) if expected.groups else not now.varies
    return f"all samples of every prompt got the same reward (mean {now.reward:.4g})" if alike else None


def _solved(now: Observation, expected: Expected) -> bool:
    """Whether what is constant is as good as anything that was seen in the run."""
    return bool(np.mean(now.rewards >= expected.best) >= 0.9)


def zero_advantages(seen: Seen, expected: Expected) -> str | None:
    """Most groups have one reward, and not the best one."""
    groups = seen[-1].groups
    if not expected.rewards or not expected.groups or not groups:
        return None
    share = np.mean([g.constant and g.best < expected.best for g in groups])
    return f"{share:.0%} of the prompts got one reward for all samples, and teach nothing" if share >= 0.8 else None


def all_truncated(seen: Seen, expected: Expected) -> str | None:
    """Hardly an answer comes to its end."""
    share = _metric(seen, "train/truncated")
    return f"{share:.0%} of the samples were cut off" if share is not None and share >= 0.9 else None


def identical_answers(seen: Seen, expected: Expected) -> str | None:
    """The samples of a prompt are copies of each other, and not because the task is solved."""
    groups = seen[-1].groups
    unsolved = [g for g in groups if not (g.constant and g.best >= expected.best)]
    if len(unsolved) < max(len(groups) / 4, 1):
        return None
    share = np.mean([g.same_answer for g in unsolved])
    return f"{share:.0%} of the unsolved prompts got the same answer in all samples" if share >= 0.8 else None


def constant_reward_without_labels(seen: Seen, expected: Expected) -> str | None:
    """The reward function has nothing to compare with."""
    now = seen[-1]
    if not expected.rewards or now.varies or not now.unlabelled or not len(now.rewards):
        return None
    return f"every reward is {now.reward:.4g}, and every label is empty"


def length_growth(seen: Seen, expected: Expected) -> str | None:
    """Answers become longer and not better."""
    if len(seen) < TREND or not expected.rewards:
        return None
    lengths = np.array([s.lengths.mean() if len(s.lengths) else np.nan for s in seen])
    rewards = np.array([s.reward for s in seen])
    if not np.isfinite(lengths).all() or not np.isfinite(rewards).all():
        return None
    quarter = len(seen) // 4
    before, after = lengths[:quarter].mean(), lengths[-quarter:].mean()
    gain = rewards[-quarter:].mean() - rewards[:quarter].mean()
    spread = max(float(np.mean([s.rewards.std() for s in seen])), 1e-12)
    rising = np.corrcoef(np.arange(len(seen)), lengths)[0, 1] if lengths.std() > 0 else 0.0
    if after < 1.5 * before or rising < 0.8 or gain > 0.1 * spread:
        return None
    return f"answers grew from {before:.4g} to {after:.4g} tokens in {len(seen)} steps, the reward by {gain:.3g}"


def entropy_collapse(seen: Seen, expected: Expected) -> str | None:
    """The policy has become certain without becoming better."""
    now = seen[-1].entropy
    if now is None or expected.start is None or not expected.rewards:
        return None
    entropy, reward = expected.start
    spread = max(float(np.mean([s.rewards.std() for s in seen if len(s.rewards)] or [0.0])), 1e-12)
    if entropy <= 0.02 or now > 0.1 * entropy or seen[-1].reward > reward + 0.1 * spread:
        return None
    return f"the entropy fell from {entropy:.3g} to {now:.3g} nats per token, the reward is {seen[-1].reward:.3g}"


def kl_runaway(seen: Seen, expected: Expected) -> str | None:
    """The policy leaves the reference. One that began far from it, as from a teacher, and comes closer does not."""
    kl = _metric(seen, "train/kl")
    if kl is None or kl < 1.0 or kl < 2.0 * expected.closest:
        return None
    return f"the KL to the reference is {kl:.3g} nats per token, and was {expected.closest:.3g}"


def engine_trainer_drift(seen: Seen, expected: Expected) -> str | None:
    """Engine and trainer disagree about the log-probs of the same tokens."""
    apart = _metric(seen, "train/logprobs_diff")
    if apart is None or apart < 0.15:
        return None
    return f"log-probs of engine and trainer differ by {apart:.3g} per token on average"


def gradient_zero(seen: Seen, expected: Expected) -> str | None:
    """Steps without any effect."""
    return "the gradient's norm is 0" if _metric(seen, "train/actor_grad_norm") == 0.0 else None


def gradient_not_finite(seen: Seen, expected: Expected) -> str | None:
    """Steps that were skipped."""
    skipped, norm = _metric(seen, "train/skipped_steps"), _metric(seen, "train/actor_grad_norm")
    if skipped:
        return f"{skipped:g} optimiser steps were skipped: the loss or the gradient was not finite"
    return None if norm is None or isfinite(norm) else f"the gradient's norm is {norm}"


def gradient_always_clipped(seen: Seen, expected: Expected) -> str | None:
    """The clipping decides the length of every step."""
    norm = _metric(seen, "train/actor_grad_norm")
    if norm is None or not isfinite(norm) or not 0 < 10 * expected.max_norm < norm:
        return None
    return f"the gradient's norm is {norm:.3g}, and is clipped to {expected.max_norm:g}"


def learning_rate_zero(seen: Seen, expected: Expected) -> str | None:
    """Steps of no length."""
    return "the learning rate is 0" if _metric(seen, "train/actor_lr") == 0.0 else None


def filter_waste(seen: Seen, expected: Expected) -> str | None:
    """Most of what is sampled is thrown away."""
    rate = _metric(seen, "train/dynamic_filtering_pass_rate")
    if rate is None or rate >= 20.0:
        return None
    return f"{rate:.3g} % of the sampled prompts pass the filter, the others were sampled in vain"


def reward_by_source(seen: Seen, expected: Expected) -> str | None:
    """The data source alone decides the reward: it is graded wrongly, or much too hard or easy."""
    now = seen[-1]
    names = sorted(set(now.sources))
    if len(names) < 2 or not now.varies:
        return None
    sources = np.array(now.sources)
    parts = {name: now.rewards[sources == name] for name in names}
    if min(map(len, parts.values())) < 4:
        return None
    between = sum(len(own) * (own.mean() - now.reward) ** 2 for own in parts.values()) / len(now.rewards)
    if between < 0.9 * now.rewards.var():
        return None
    low, high = (f(names, key=lambda name: parts[name].mean()) for f in (min, max))
    return f"rewards differ by source alone: {parts[low].mean():.3g} for {low!r}, {parts[high].mean():.3g} for {high!r}"


def stale_samples(seen: Seen, expected: Expected) -> str | None:
    """What is trained on was sampled long ago."""
    age = _metric(seen, "rollout/staleness_mean")
    return f"samples are {age:.3g} weight versions old on average" if age is not None and age >= 4.0 else None


def reward_is_length(seen: Seen, expected: Expected) -> str | None:
    """The reward says nothing but how long the answer is."""
    now = seen[-1]
    values, counts = np.unique(now.lengths, return_counts=True)
    if not expected.rewards or not now.varies or np.sum(counts >= 2) < 4 or counts.max() > 0.7 * counts.sum():
        return None
    inside = sum(float(np.ptp(now.rewards[now.lengths == value])) for value in values)
    lowest, highest = now.rewards.min(), now.rewards.max()
    middle = np.mean((now.rewards > lowest) & (now.rewards < highest))
    balanced = middle > 0.3 or 0.2 <= np.mean(now.rewards == highest) <= 0.8
    line = np.corrcoef(now.lengths, now.rewards)[0, 1]
    if not (inside <= 1e-9 * (highest - lowest) and balanced) and abs(line) < 0.995:
        return None
    return f"the length alone tells the reward (correlation {line:.3g} over {len(values)} lengths)"


def environment_fails(seen: Seen, expected: Expected) -> str | None:
    """One environment of several never comes to an end, and was not switched off for it."""
    metrics, end = seen[-1].metrics, "/failed_share"
    failing = [k.removesuffix(end) for k, v in metrics.items() if k.endswith(end) and v == 1.0]
    failing = [name for name in failing if not metrics.get(f"{name}/off")]
    return f"every episode of the last groups failed: {', '.join(failing)}" if failing else None


ALARMS: dict[str, Alarm] = {
    "no_reward_variance": Alarm(
        check=no_reward_variance,
        steps=3,
        fix="the reward function (--reward.remote_url), --data.label_key, --rollout.temperature, other prompts",
    ),
    "zero_advantages": Alarm(
        check=zero_advantages,
        steps=4,
        fix="--algo.dynamic_filtering_enable, --rollout.n_samples_per_prompt, easier or harder prompts",
    ),
    "all_truncated": Alarm(
        check=all_truncated, steps=3, fix="--rollout.max_new_tokens, --data.max_len, --data.apply_chat_template"
    ),
    "identical_answers": Alarm(
        check=identical_answers, steps=3, fix="--rollout.temperature, --rollout.top_k, --rollout.top_p"
    ),
    "constant_reward_without_labels": Alarm(
        check=constant_reward_without_labels, steps=2, fix="--data.label_key, the reward function (--reward.remote_url)"
    ),
    "length_growth": Alarm(
        check=length_growth, fix="--reward.overlong_buffer_len, --actor.loss_agg_mode, --algo.kl.init_coef"
    ),
    "entropy_collapse": Alarm(
        check=entropy_collapse,
        steps=2,
        fix="--actor.entropy_coef, --actor.eps_clip_low_high, --actor.adam.lr, --rollout.temperature",
    ),
    "kl_runaway": Alarm(check=kl_runaway, steps=2, fix="--algo.kl.init_coef, --actor.adam.lr"),
    "engine_trainer_drift": Alarm(
        check=engine_trainer_drift,
        steps=2,
        fix="--algo.advantage.is_correction_enable, --vllm.dtype, --train.max_staleness",
    ),
    "gradient_zero": Alarm(
        check=gradient_zero, steps=3, fix="the rewards, --critic.freezing_steps, --actor.policy_loss_type"
    ),
    "gradient_not_finite": Alarm(
        check=gradient_not_finite, steps=3, fix="--actor.adam.lr, --ds.param_dtype, --actor.max_norm, the rewards"
    ),
    "gradient_always_clipped": Alarm(
        check=gradient_always_clipped, steps=5, fix="--actor.adam.lr, --actor.max_norm, --reward.clip_range"
    ),
    "learning_rate_zero": Alarm(
        check=learning_rate_zero, steps=3, fix="--actor.adam.lr, --actor.lr_warmup_ratio, --train.num_episodes"
    ),
    "filter_waste": Alarm(
        check=filter_waste, steps=3, fix="--algo.dynamic_filtering_range, --rollout.n_samples_per_prompt, other prompts"
    ),
    "reward_by_source": Alarm(
        check=reward_by_source, steps=3, fix="--data.prompt_probs, the grader of that source (--reward.remote_url)"
    ),
    "stale_samples": Alarm(check=stale_samples, steps=3, fix="--train.max_staleness, --train.async_queue_size"),
    "environment_fails": Alarm(
        check=environment_fails, fix="the agent of that environment, max_failure_share in --train.agent_func_path"
    ),
    "reward_is_length": Alarm(check=reward_is_length, steps=3, fix="the reward function (--reward.remote_url)"),
}
"""Name -> alarm."""
