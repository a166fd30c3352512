"""How many steps a run makes: the horizon of the learning-rate schedule, and of the progress line."""

from __future__ import annotations

from openrlhf.launcher.config import TrainPPOConfig


def optimizer_step_horizon(config: TrainPPOConfig, prompts: int) -> int:
    """ceil(prompts x n / train.batch_size) x max_epochs x num_episodes, or --train.max_steps when that is given.

    Rollout batches are cut one by one, so each last, smaller mini-batch of a rollout batch is a step of its own. With
    dynamic filtering it is an upper bound.
    """
    train, n = config.train, config.rollout.n_samples_per_prompt
    if train.max_steps is not None:
        return max(train.max_steps, 1)
    whole, rest = divmod(prompts, config.rollout.batch_size)
    per_episode = whole * -(-config.rollout.batch_size * n // train.batch_size)
    if rest:
        per_episode += -(-rest * n // train.batch_size)
    return max(per_episode * train.max_epochs * train.num_episodes, 1)


def rollout_step_horizon(config: TrainPPOConfig, prompts: int) -> int:
    """ceil(prompts / rollout.batch_size) x num_episodes, or those that --train.max_steps optimiser steps take.

    With dynamic filtering it is an upper bound.
    """
    train, rollout = config.train, config.rollout
    steps = -(-prompts // rollout.batch_size) * train.num_episodes
    if train.max_steps is not None:
        each = -(-rollout.batch_size * rollout.n_samples_per_prompt // train.batch_size) * train.max_epochs
        steps = min(steps, -(-train.max_steps // each))
    return max(steps, 1)
