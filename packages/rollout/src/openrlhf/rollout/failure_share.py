"""Ends a run in which too many samples fail (`--rollout.max_failed_fraction`). No asyncio, no engines.

The share is that of a rollout batch, or of as many groups where batches are filled from groups that finished earlier:
one failed sample is a small share of a batch, though it may be half of what finished since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from openrlhf.rollout import episodes
from openrlhf.rollout.episodes import SampleLike


class RolloutFailedError(RuntimeError):
    """Too many samples of a rollout batch failed (--rollout.max_failed_fraction)."""


class FailureShare:
    """Counts episodes and failures over stretches of at least `batch_size` groups, across batches and data passes.

    allowed: largest share of a stretch that may fail. resumed: whether whole batches were sampled before.
    """

    def __init__(self, allowed: float, batch_size: int, *, resumed: bool = False) -> None:
        self._allowed = allowed
        self._batch_size = batch_size
        self._groups = 0
        self._samples = 0
        self._failed = 0
        self._first = ""
        self._whole = 0  # episodes that a whole stretch has
        self._later = resumed  # whether a whole stretch passed before this one
        self._ended = False

    def start_batch(self) -> None:
        """Begin a new stretch, unless the present one has fewer groups than a batch."""
        self._ended = False
        if self._groups >= self._batch_size:
            self._groups = self._samples = self._failed = 0
            self._first, self._later = "", True

    def add(self, samples: Sequence[SampleLike]) -> None:
        """Count a finished group. Raises RolloutFailedError as soon as too much of a whole stretch has failed."""
        count = len(episodes.by_episode(samples))
        self._groups += 1
        self._samples += count
        self._whole = max(self._whole, self._batch_size * count)
        self.fail(episodes.failures(samples))

    def fail(self, samples: Iterable[SampleLike]) -> None:
        """Count failures, one sample each, perhaps of episodes that were counted before. Raises RolloutFailedError."""
        for sample in samples:
            self._failed += 1
            self._first = self._first or sample.failure
        self._check()

    def end(self) -> None:
        """No group follows in this episode. Raises RolloutFailedError.

        Where there never was a whole stretch, the share is that of all there was.
        """
        self._ended = True
        self._check()

    def _check(self) -> None:
        partial = self._ended and not self._later
        base = self._samples if partial else max(self._samples, self._whole)
        if self._failed > self._allowed * base:
            raise RolloutFailedError(
                f"{self._failed} of {self._samples} samples failed, more than `max_failed_fraction` "
                f"{self._allowed:g} of a rollout batch allows; the first one:\n{self._first}"
            )
