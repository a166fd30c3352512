"""The tokens that min-p, top-k and top-p leave of a distribution, as vLLM's sampler cuts it.

A policy that samples from a truncated distribution has, for every token, the probability of that distribution:
softmax over the kept set alone. Log-probs over it: `kept` of the functions in `core/logprobs.py`.

Which set: of the log-probs that the batch is sampled with, not of those that are being trained. The set stays while
the policy changes, so that old and new policy, and the reference, share their support and every ratio and KL is one of
distributions over the same tokens ("keep sampling mask", DeepSeek-V3.2, 2025, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.core.config import Truncation


class KeptTokens(NamedTuple):
    """The kept sets of N distributions.

    counts [N] int64: their sizes; 0 stands for all tokens. ids [counts.sum()] int32: their tokens, one set behind the
    other.
    """

    counts: Tensor
    ids: Tensor

    @classmethod
    def whole(cls, n: int) -> KeptTokens:
        """All tokens, n times."""
        return cls(torch.zeros(n, dtype=torch.long), torch.zeros(0, dtype=torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """The sets of all parts, in order."""
        return cls(torch.cat([p.counts for p in parts]), torch.cat([p.ids for p in parts])) if parts else cls.whole(0)

    def split(self, sizes: Sequence[int]) -> list[KeptTokens]:
        """The inverse of `joined`: so many sets for each part. Those beyond belong to none."""
        counts = self.counts[: sum(sizes)].split(list(sizes))
        ids = self.ids[: int(self.counts[: sum(sizes)].sum())].split([int(c.sum()) for c in counts])
        return [KeptTokens(*part) for part in zip(counts, ids, strict=True)]

    def to(self, device: torch.device | str) -> KeptTokens:
        return KeptTokens(self.counts.to(device), self.ids.to(device))


def kept_mask(logits: Tensor, truncation: Truncation) -> Tensor:
    """Which tokens are kept: bool [N, V] of tempered logits [N, V], which are overwritten.

    min-p, then top-k, then top-p of what is left, with the operations of vLLM's sampler in PyTorch (`Sampler.sample`,
    0.32), so that the same logits give the same set. min-p keeps tokens with at least that share of the largest
    probability. top-k keeps all that equal the k-th largest logit. top-p drops from below while the dropped
    probability is at most 1 - p; of equal logits at this border it keeps those that come later in the order of `sort`,
    and one token always. A token with logit -inf is never kept.
    """
    minus_infinity, vocab = float("-inf"), logits.shape[-1]
    if truncation.min_p > 0:
        probabilities = logits.softmax(-1)
        least = probabilities.amax(-1, keepdim=True).mul_(truncation.min_p)
        logits.masked_fill_(probabilities < least, minus_infinity)
    k = min(truncation.top_k, vocab) if truncation.top_k > 0 else vocab
    if truncation.top_p < 1:
        values, order = logits.sort(dim=-1)
        values.masked_fill_(values < values[:, vocab - k, None], minus_infinity)
        dropped = values.softmax(-1).cumsum(-1) <= 1 - torch.tensor(truncation.top_p, dtype=logits.dtype)
        dropped[:, -1] = False
        logits.scatter_(-1, order, values.masked_fill_(dropped, minus_infinity))
    elif k < vocab:
        logits.masked_fill_(logits < logits.topk(k).values[:, -1:], minus_infinity)
    return logits != minus_infinity


def collect_kept(chunks: Iterable[Tensor], targets: Tensor, truncation: Truncation) -> tuple[KeptTokens, Tensor]:
    """Kept sets of N distributions, given as chunks of tempered logits [C, V] in order, which are overwritten.

    targets [N]: the sampled tokens. One that is outside of its set (another rounding, or older weights, in the engine
    that sampled it) has no probability there; it is added to the set. Second result: bool [N], where that was so.
    """
    counts: list[Tensor] = []
    ids: list[Tensor] = []
    outside: list[Tensor] = []
    start = 0
    for logits in chunks:
        target = targets[start : start + len(logits), None]
        mask = kept_mask(logits, truncation)
        outside.append(~mask.gather(1, target)[:, 0])
        mask.scatter_(1, target, True)
        counts.append(mask.sum(-1))
        ids.append(mask.nonzero()[:, 1].to(torch.int32))
        start += len(logits)
    return KeptTokens(torch.cat(counts), torch.cat(ids)), torch.cat(outside)


class KeptTiles:
    """Hides in a tile of logits what a `KeptTokens` [N] does not keep. Its tensors lie where the logits do."""

    def __init__(self, kept: KeptTokens) -> None:
        self._whole = kept.counts == 0
        self._row = torch.repeat_interleave(torch.arange(len(kept.counts), device=kept.ids.device), kept.counts)
        self._ids = kept.ids.long()
        self._ends = [0, *kept.counts.cumsum(0).tolist()]

    def hide_(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        """Set the other logits of the tile [rows, columns] to -inf, in place."""
        own = slice(self._ends[rows.start], self._ends[rows.stop])
        height, width = logits.shape
        column = self._ids[own] - columns.start
        place = (self._row[own] - rows.start) * width + column
        place = torch.where((column >= 0) & (column < width), place, height * width)  # one place behind the tile
        hidden = torch.ones(height * width + 1, dtype=torch.bool, device=logits.device).index_fill_(0, place, False)
        hidden = hidden[:-1].view(height, width) & ~self._whole[rows, None]
        return logits.masked_fill_(hidden, float("-inf"))
