"""A policy loss of one's own: PPO's, written out. `--actor.loss_path examples/python/policy_loss.py`.

The run is bit for bit the one without the flag. What every such function has to keep is tried before the run starts:
it returns a SUM over the units of its micro-batch with their count, so that the parts of a step add up however it is
split, and nothing that it computes may come from several rows at once.
"""

import torch

from openrlhf.core.losses.aggregate import aggregate, loss_count
from openrlhf.core.losses.output import LossOutput


def policy_loss(*, logprobs, old_logprobs, advantages, action_mask, config, agg_constant, **others):
    """All tensors [B, T]; `config` holds the flags of `--actor.*`, `others` what is not needed here."""
    zero = torch.zeros((), device=logprobs.device)
    log_ratio = torch.where(action_mask, logprobs, zero) - torch.where(action_mask, old_logprobs, zero)
    ratio = log_ratio.clamp(-20, 20).exp()
    low, high = config.clip
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    token_loss = -torch.minimum(unclipped, clipped)
    tokens = float(action_mask.sum())
    total = aggregate(token_loss, action_mask, config.loss_agg_mode, agg_constant)
    count = loss_count(action_mask, config.loss_agg_mode)
    return LossOutput(
        total=total,
        count=count,
        metrics={
            "policy_loss": (total.detach(), count),
            "ppo_clip_ratio": ((clipped < unclipped)[action_mask].float().sum(), tokens),
            "ppo_kl": (-log_ratio.detach().sum(), tokens),
        },
    )
