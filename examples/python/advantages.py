"""Advantages of one's own: `--algo.advantage.path examples/python/advantages.py`.

Discounted returns, for an estimator that has no gamma of its own. What comes in are the rewards of the tokens after the
baseline, 0 on all but the last where there is no KL penalty. Each row stands for itself: whitening over the whole
rollout batch is the estimator's part, not this one's.
"""

import torch


def compute_advantages(*, token_rewards, action_mask, values, gamma, lambd):
    """[B, T] each -> advantages and returns [B, T], 0 where not action_mask. `values` is None without a critic."""
    rewards = torch.where(action_mask, token_rewards.double(), 0.0)
    left = action_mask.flip(-1).cumsum(-1).flip(-1)  # trainable tokens from here on, this one included
    weighted = rewards * gamma ** (-left.double())  # of a reward that far from the end
    returns = torch.where(action_mask, weighted.flip(-1).cumsum(-1).flip(-1) * gamma ** left.double(), 0.0)
    return returns, returns
