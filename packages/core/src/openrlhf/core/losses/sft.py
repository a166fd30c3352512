"""Supervised loss: negative log-likelihood of the target tokens."""

from __future__ import annotations

from torch import Tensor

from openrlhf.core.losses.output import LossOutput
from openrlhf.core.masks import check_rows, masked_sum


def sft_loss(*, logprobs: Tensor, loss_mask: Tensor) -> LossOutput:
    """Sum of -logprobs over loss_mask (assistant tokens), counted in tokens. Both [B, T], loss_mask bool.

    Metric: gpt_loss, the mean negative log-likelihood per token.
    """
    check_rows(loss_mask, logprobs=logprobs)
    total, count = -masked_sum(logprobs, loss_mask), float(loss_mask.sum())
    return LossOutput(total=total, count=count, metrics={"gpt_loss": (total.detach(), count)})
