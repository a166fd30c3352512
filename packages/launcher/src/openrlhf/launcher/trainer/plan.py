"""Which sample goes into which optimiser step and onto which rank: pure functions of lengths and a seed.

Nothing sampled is lost: the last mini-batch may be smaller than train.batch_size, and a rank with nothing to do
takes part with an empty share.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import TypeVar

from openrlhf.launcher.samples import SampleRef
from openrlhf.learner.batching import sample_cost

T = TypeVar("T")


def cut_mini_batches(samples: Sequence[SampleRef], *, batch_size: int, seed: int, step: int) -> list[list[SampleRef]]:
    """Shuffle the rollout batch with (seed, step) and cut it in mini-batches of `batch_size` samples.

    The last one may be smaller. From the second epoch on the members are others, see `epoch_seed`.
    """
    order = list(samples)
    random.Random(f"mini-batches {seed} {step}").shuffle(order)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def epoch_order(num_mini_batches: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """The order of the mini-batches in one epoch; the first epoch keeps the order of the cut."""
    order = list(range(num_mini_batches))
    if epoch > 0:
        random.Random(f"epoch {seed} {step} {epoch}").shuffle(order)
    return order


def epoch_seed(num_mini_batches: int, *, seed: int, step: int, epoch: int) -> str | None:
    """What decides which samples share a mini-batch in this epoch; None: those of the cut, as in the first epoch."""
    return f"members {seed} {step} {epoch}" if epoch > 0 and num_mini_batches > 1 else None


def split_over_ranks(samples: Sequence[SampleRef], ranks: int, *, hidden_size: int) -> list[list[SampleRef]]:
    """Balance one mini-batch over ranks: longest first onto the rank with the least work; equal counts where possible.

    hidden_size: the model's, for the cost of a sample (`learner.batching.sample_cost`).
    Every rank gets floor(n / ranks) or ceil(n / ranks) samples, so a rank gets none only when there are fewer
    samples than ranks.
    """
    limit = -(-len(samples) // ranks)
    shares: list[list[SampleRef]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    spare = len(samples) - (limit - 1) * ranks  # how many ranks may hold `limit` samples
    for sample in sorted(samples, key=lambda s: (-s.length, s.index)):
        while True:
            load, rank = heapq.heappop(heap)
            size = len(shares[rank])
            if size < limit - 1 or (size == limit - 1 and spare > 0):
                break
        if size == limit - 1:
            spare -= 1
        shares[rank].append(sample)
        heapq.heappush(heap, (load + sample_cost(sample.length, hidden_size), rank))
    return [sorted(share, key=lambda s: s.index) for share in shares]
