"""What counts when groups are judged: the episode, which is one sample of a prompt with all of its branches.

An agent that rewrites its history, or starts another conversation, leaves several trajectories of one episode. They are
trained on one by one, but an episode with many branches must weigh no more in a mean than one with a single branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class SampleLike(Protocol):
    """What filtering needs of a sample. score falls back to reward where it is None; 0.0 is a score.

    episode: the same number for all branches of an episode of a group; None: the sample is the whole episode.
    failure: why it failed. failure_kind: the border that it failed at, such as agent, reward, engine or timeout.
    """

    @property
    def episode(self) -> int | None: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def score(self) -> float | None: ...
    @property
    def failed(self) -> bool: ...
    @property
    def failure(self) -> str: ...
    @property
    def failure_kind(self) -> str: ...


class GroupLike(Protocol):
    """All samples of one prompt."""

    @property
    def samples(self) -> Sequence[SampleLike]: ...


S = TypeVar("S", bound=SampleLike)


def names(samples: Sequence[SampleLike]) -> list[int]:
    """Per sample of a group a number of its episode; one that is an episode by itself has a negative one."""
    return [-1 - place if s.episode is None else s.episode for place, s in enumerate(samples)]


def by_episode(samples: Sequence[S]) -> list[list[S]]:
    """The samples of a group, those of each episode together, in order of appearance."""
    found: dict[int, list[S]] = {}
    for name, sample in zip(names(samples), samples, strict=True):
        found.setdefault(name, []).append(sample)
    return list(found.values())


def failures(samples: Sequence[S]) -> list[S]:
    """The first failed branch of every episode that has one: such an episode counts as failed."""
    return [failed[0] for episode in by_episode(samples) if (failed := [s for s in episode if s.failed])]


def survivors(group: GroupLike) -> int:
    """Episodes with a branch that did not fail."""
    return sum(any(not s.failed for s in episode) for episode in by_episode(group.samples))


def group_score(group: GroupLike) -> float | None:
    """Mean score of the episodes, each the mean of its branches that did not fail; None when none carries a score."""
    means = (mean(_scores(episode)) for episode in by_episode(group.samples))
    return mean([value for value in means if value is not None])


def mean(values: Iterable[float]) -> float | None:
    """None without values."""
    known = list(values)
    return sum(known) / len(known) if known else None


def _scores(episode: Sequence[SampleLike]) -> list[float]:
    values = [s.score if s.score is not None else s.reward for s in episode if not s.failed]
    return [value for value in values if value is not None]
