"""Rollout batches out of prompt groups: filtering, refilling, pacing, failed samples. Pure asyncio, no engines.

A group is all episodes of one prompt, rolled out by the caller's `run_group`. `GroupRunner.next_batch` keeps prompts
running until a batch of accepted groups is full; `Pacing` says how far ahead of training they may run.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from openrlhf.rollout import episodes
from openrlhf.rollout.episodes import GroupLike, by_episode, group_score, survivors
from openrlhf.rollout.failure_share import FailureShare

P = TypeVar("P")
G = TypeVar("G", bound=GroupLike)


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """Which groups make a batch.

    batch_size: accepted groups per batch (--rollout.batch_size).
    in_flight: prompts running at a time (--rollout.vllm_generate_batch_size); None: only as many as the batch still
        lacks, so that nothing is left over; so too without pacing up to batch_size. More oversamples.
    by_arrival: fill a batch with the groups that finish first (async; with pacing, the most urgent of them) instead of
        those that come first in the prompt order (sync, reproducible).
    score_range: exclusive bounds for a group's mean score (--algo.dynamic_filtering_range); None: no filter.
    min_survivors: a group with fewer episodes that did not fail is dropped: 2 for group estimators, else 1.
    max_failed_fraction: of a batch's episodes (--rollout.max_failed_fraction); above it the run ends (`FailureShare`).
    """

    batch_size: int
    in_flight: int | None = None
    by_arrival: bool = False
    score_range: tuple[float, float] | None = None
    min_survivors: int = 1
    max_failed_fraction: float = 0.1


@dataclass(kw_only=True)
class GroupStats:
    """What happened to the groups that finished for one batch. samples: episodes, whatever branches they have.
    failures: failed ones by kind, whatever became of their groups. failed_prompts: those with failed episodes, and how
    many."""

    accepted: int = 0
    rejected: int = 0
    dropped: int = 0
    samples: int = 0
    failed_samples: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    failed_prompts: list[tuple[Any, int]] = field(default_factory=list)
    mean_scores: list[float] = field(default_factory=list)

    @property
    def pass_rate(self) -> float:
        """Share of the filtered groups that passed; 1.0 when none was filtered."""
        seen = self.accepted + self.rejected
        return self.accepted / seen if seen else 1.0


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Generic[G]):
    """Accepted groups in prompt order. exhausted: the prompts ran out before the batch was full."""

    groups: list[G]
    stats: GroupStats
    exhausted: bool


class Pacing:
    """Keeps sampling at most a number of batches ahead of training, so that no token gets too old.

    Batches are numbered in the order in which they are trained on; `trained` of them have reached the engines as new
    weights. A group that starts now must be in batch `trained + max_staleness` at the latest: that is its deadline.
    Groups start only while all of them fit into the batches up to their deadlines, and a batch closes only when those
    left over still do. So the bound holds without throwing anything away.

    batch_size: groups per batch. max_staleness: how many batches may be trained between the start of a group and its
    own batch (--train.max_staleness). trained, closed: batches that were trained on, and that were filled, so far.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, trained: int = 0, closed: int | None = None) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.trained = trained
        self.closed = trained if closed is None else closed
        self.last: int | None = None
        self._advanced = asyncio.Event()

    @property
    def deadline(self) -> int:
        """Number of the last batch that a group that starts now may be in."""
        return self.trained + self.max_staleness

    def advance(self, *, last: int | None = None) -> None:
        """One more batch was trained on and its weights pushed. last: number of the last batch of the run, if known."""
        self.trained += 1
        self.limit(last)

    def limit(self, last: int | None) -> None:
        """Start nothing for batches after number `last`."""
        self.last = last
        self._advanced.set()
        self._advanced = asyncio.Event()

    def advanced(self) -> Coroutine[Any, Any, bool]:
        """A wait for the next `advance` or `limit` from now on, also when it is awaited later."""
        return self._advanced.wait()

    def close_batch(self) -> None:
        """A batch was filled."""
        self.closed += 1

    def may_start(self, outstanding: int) -> bool:
        """Whether one more group may start beside `outstanding` ones that run or wait for a batch."""
        end = self.deadline if self.last is None else min(self.deadline, self.last)
        return outstanding < (end - self.closed + 1) * self.batch_size

    def fits(self, deadlines: Iterable[int] | Mapping[int, int], *, first: int | None = None) -> bool:
        """Whether groups with these deadlines all fit into the batches from number `first` (the next one) on.

        deadlines: one per group, or how many groups have each.
        """
        start, fitting = self.closed if first is None else first, 0
        for deadline, count in sorted(Counter(deadlines).items()):
            fitting += count
            if fitting > (deadline - start + 1) * self.batch_size:
                return False
        return True


class GroupRunner(Generic[P, G]):
    """Draws prompts, runs their groups, and hands out batches.

    Groups that finish beyond what a batch needs wait in `buffer` (finished) or keep running for the next batch;
    nothing sampled is thrown away. With the defaults a batch does not depend on the order in which groups finish.
    With `pacing`, groups start only while it allows, and every group is in a batch before its deadline.
    """

    def __init__(
        self,
        prompts: Iterable[P],
        run_group: Callable[[P], Awaitable[G]],
        rules: GroupRules,
        *,
        buffer: Iterable[G] = (),
        pacing: Pacing | None = None,
        deadlines: Iterable[int] = (),
        failures: FailureShare | None = None,
        judged: Callable[[P], bool] = lambda prompt: True,
    ) -> None:
        """buffer: accepted groups of an earlier run that no batch has used yet; deadlines: theirs, with pacing.

        failures: counts on from the runner of the episode before. judged: whether failures of this prompt count there.
        """
        self.rules = rules
        self.failures = failures or FailureShare(rules.max_failed_fraction, rules.batch_size)
        self.pacing = pacing
        self._prompts: Iterator[P] = iter(prompts)
        self._run_group = run_group
        self._judged = judged
        self._dry = False
        self._drawn = 0
        # Finished, accepted groups by draw number; earlier runs' groups come before everything drawn here.
        earlier = list(buffer)
        self._accepted: dict[int, G] = {number - len(earlier): group for number, group in enumerate(earlier)}
        self._running: dict[asyncio.Task[G], int] = {}
        self._started: dict[int, P] = {}
        self._in_order = sorted(self._accepted)
        self._deadlines = {number - len(earlier): deadline for number, deadline in enumerate(deadlines)}
        self._outstanding = Counter(self._deadlines.values())  # how many groups have a deadline,
        self._waiting = self._outstanding.copy()  # and of those that are accepted
        self._finished: list[asyncio.Task[G]] = []
        self._news: asyncio.Future[None] | None = None

    @property
    def buffer(self) -> list[G]:
        """Accepted groups that no batch has used yet, in prompt order: part of a checkpoint."""
        return [self._accepted[n] for n in self._in_order]

    @property
    def buffer_deadlines(self) -> list[int]:
        """With pacing: the deadlines of `buffer`."""
        return [self._deadlines[n] for n in self._in_order] if self.pacing else []

    @property
    def running(self) -> int:
        """Groups under way."""
        return len(self._running)

    @property
    def running_prompts(self) -> list[P]:
        """The prompts of the groups under way, in order: part of a checkpoint, they are rolled out again."""
        return [self._started[n] for n in sorted(self._running.values())]

    async def next_batch(self) -> RolloutBatch[G]:
        """The next full batch, or what is left when the prompts run out (exhausted, perhaps with no group at all).

        Raises RolloutFailedError with the first failure's text when too many samples failed, and whatever
        `run_group` raises.
        """
        stats = GroupStats()
        self.failures.start_batch()
        try:
            while True:
                self._draw()
                if self._full() or not (self._running or self._held()):
                    break
                for task in sorted(await self._next_done(), key=self._running.__getitem__):
                    self._settle(task, stats)
            if self._dry and not self._running:
                self.failures.end()
        except BaseException:
            await self.stop()
            raise
        groups = [self._accepted.pop(n) for n in sorted(self._choice())]
        self._in_order = sorted(self._accepted)
        if self.pacing is not None and groups:
            self.pacing.close_batch()
            under_way = (*self._running.values(), *self._accepted)
            self._deadlines = {n: self._deadlines[n] for n in under_way}
            self._outstanding = Counter(self._deadlines.values())
            self._waiting = Counter(self._deadlines[n] for n in self._accepted)
        return RolloutBatch(groups=groups, stats=stats, exhausted=self._dry and len(groups) < self.rules.batch_size)

    async def stop(self) -> None:
        """Cancel the groups under way."""
        tasks = list(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_done(self) -> set[asyncio.Task[G]]:
        """The groups that finish next; none when pacing lets more start first."""
        if not self._finished:
            self._news = asyncio.get_running_loop().create_future()
            waits: list[asyncio.Future[Any]] = [self._news]
            if self.pacing is not None:
                waits.append(asyncio.ensure_future(self.pacing.advanced()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        done, self._finished = self._finished, []
        return {task for task in done if task in self._running}

    def _note(self, task: asyncio.Task[G]) -> None:
        """A group has finished. A callback, since a wait for all of them costs as much as there are, each time."""
        self._finished.append(task)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _held(self) -> bool:
        """Whether prompts are left that pacing does not let start yet."""
        return self.pacing is not None and not self._dry

    def _may_start(self) -> bool:
        missing = max(self.rules.batch_size - len(self._accepted), 0)
        limit = self.rules.in_flight
        if limit is None:
            wanted = missing
        else:
            wanted = min(limit, missing) if self.pacing is None and limit <= self.rules.batch_size else limit
        if len(self._running) >= wanted:
            return False
        return self.pacing is None or self.pacing.may_start(len(self._running) + len(self._accepted))

    def _draw(self) -> None:
        """Start prompts until the wanted number is running."""
        while not self._dry and self._may_start():
            try:
                prompt = next(self._prompts)
            except StopIteration:
                self._dry = True
                return
            task = asyncio.ensure_future(self._run_group(prompt))
            task.add_done_callback(self._note)
            self._running[task] = self._drawn
            self._started[self._drawn] = prompt
            if self.pacing is not None:
                self._deadlines[self._drawn] = self.pacing.deadline
                self._outstanding[self.pacing.deadline] += 1
            self._drawn += 1

    def _choice(self) -> list[int]:
        """The accepted groups that make the next batch, as far as there are."""
        size = self.rules.batch_size
        if not self.rules.by_arrival:
            return self._in_order[:size]
        if self.pacing is None:
            return list(self._accepted)[:size]
        return sorted(self._accepted, key=self._deadlines.__getitem__)[:size]  # stable: else by arrival

    def _full(self) -> bool:
        """Whether the batch is decided. In prompt order, an earlier group that still runs may yet belong to it."""
        size = self.rules.batch_size
        if len(self._accepted) < size:
            return False
        if self.pacing is not None and not self.pacing.fits(self._left_over(), first=self.pacing.closed + 1):
            return False
        if self.rules.by_arrival or not self._running:
            return True
        return self._in_order[size - 1] < next(iter(self._running.values()))  # groups start in order

    def _left_over(self) -> Counter[int]:
        """How many groups have each deadline beyond those of `_choice`."""
        left, missing = self._outstanding.copy(), self.rules.batch_size
        if self.rules.by_arrival:
            for deadline, count in sorted(self._waiting.items()):
                left[deadline] -= min(count, missing)
                missing -= min(count, missing)
        else:
            left.subtract(self._deadlines[n] for n in self._choice())
        return +left

    def _settle(self, task: asyncio.Task[G], stats: GroupStats) -> None:
        number = self._running.pop(task)
        prompt = self._started.pop(number)
        if task.cancelled():  # its error would look like the end of the run
            raise RuntimeError(f"the group of prompt {number} was cancelled from inside: {prompt!r:.200}")
        group = task.result()
        failures = episodes.failures(group.samples)
        stats.samples += len(by_episode(group.samples))
        stats.failed_samples += len(failures)
        stats.failures.update(sample.failure_kind for sample in failures)
        if failures:
            stats.failed_prompts.append((prompt, len(failures)))
        score = group_score(group)
        if score is not None:
            stats.mean_scores.append(score)
        if survivors(group) < self.rules.min_survivors:
            stats.dropped += 1
        elif self._passes(score):
            stats.accepted += 1
            self._accepted[number] = group
            bisect.insort(self._in_order, number)
            if self.pacing is not None:
                self._waiting[self._deadlines[number]] += 1
        else:
            stats.rejected += 1
        if number not in self._accepted and self.pacing is not None:
            self._outstanding[self._deadlines.pop(number)] -= 1
        if self._judged(prompt):
            self.failures.add(group.samples)

    def _passes(self, score: float | None) -> bool:
        if self.rules.score_range is None:
            return True
        low, high = self.rules.score_range
        return score is not None and low < score < high


def score_histogram(mean_scores: Sequence[float], bins: int = 10) -> str:
    """Group mean scores as one line per value range, for the warning that a filter let nothing through.

    Example: `0 .. 0.5: 3`.
    """
    if not mean_scores:
        return "no group has a score"
    low, high = min(mean_scores), max(mean_scores)
    if low == high:
        return f"{low:g}: {len(mean_scores)}"
    width = (high - low) / bins
    counts = [0] * bins
    for score in mean_scores:
        counts[min(int((score - low) / width), bins - 1)] += 1
    return "\n".join(f"{low + i * width:.3g} .. {low + (i + 1) * width:.3g}: {n}" for i, n in enumerate(counts) if n)
