"""How many steps a run makes: the horizon of the learning-rate schedule, and of the progress line."""

from __future__ import annotations

from openrlhf.launcher.config import TrainConfig
from openrlhf.rollout.config import RolloutConfig


def optimizer_step_horizon(rollout: RolloutConfig, train: TrainConfig, prompts: int) -> int:
    """ceil(prompts x n / train.batch_size) x max_epochs x num_episodes, or --train.max_steps when that is given.

    Rollout batches are cut one by one, so each last, smaller mini-batch of a rollout batch is a step of its own. With
    dynamic filtering it is an upper bound.
    """
    n = rollout.n_samples_per_prompt
    if train.max_steps is not None:
        return max(train.max_steps, 1)
    whole, rest = divmod(prompts, rollout.batch_size)
    per_episode = whole * -(-rollout.batch_size * n // train.batch_size)
    if rest:
        per_episode += -(-rest * n // train.batch_size)
    return max(per_episode * train.max_epochs * train.num_episodes, 1)


def rollout_step_horizon(rollout: RolloutConfig, train: TrainConfig, prompts: int) -> int:
    """ceil(prompts / rollout.batch_size) x num_episodes, or those that --train.max_steps optimiser steps take.

    With dynamic filtering it is an upper bound.
    """
    steps = -(-prompts // rollout.batch_size) * train.num_episodes
    if train.max_steps is not None:
        each = -(-rollout.batch_size * rollout.n_samples_per_prompt // train.batch_size) * train.max_epochs
        steps = min(steps, -(-train.max_steps // each))
    return max(steps, 1)
