"""Several reward sources as one: a row's column chooses among them, and what they give is summed by weights.

Every source is counted and logged by its name; one that fails takes the group that it was asked for with it, and no
other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.agents.failures import describe
from openrlhf.agents.rewards import RewardError, RewardResult, RewardSource
from openrlhf.agents.types import Failure


async def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class NamedSource:
    """A source among others. name: in metrics and messages, "" for one that is alone.

    close: what ends it. totals: what it counts of itself, all that came so far.
    """

    name: str
    source: RewardSource
    weight: float = 1.0
    close: Callable[[], Awaitable[None]] = _nothing
    totals: Callable[[], Mapping[str, float]] = dict


def chosen_sources(value: Any, names: Sequence[str]) -> list[str]:
    """The sources that a row's value names: a text (several: separated by commas) or a list; nothing means all.

    Raises ValueError for a name that no source has.
    """
    if value is None or value == "":
        return list(names)
    chosen = value if isinstance(value, list | tuple) else [part.strip() for part in str(value).split(",")]
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ValueError(f"{value!r} names no reward source: there are {', '.join(names)}")
    return [name for name in names if name in chosen]


class RewardSources:
    """Weighted sums of several sources, a `RewardSource` itself.

    reward and score of a sample: the exactly rounded sum of weight times what each chosen source gave. Among its
    `extra_logs` are NAME/reward, as the source gave it, and NAME/KEY for what the source itself logs.
    choose_by: the column whose value names a row's sources (`chosen_sources`); None: all of them, always.
    """

    def __init__(self, sources: Sequence[NamedSource], choose_by: str | None = None) -> None:
        self._sources = {source.name: source for source in sources}
        self._choose_by = choose_by
        self._totals: Counter[str] = Counter()

    async def score(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        """Asks all chosen sources at the same time. Raises the first's error, with its name, when all have ended."""
        asked = self._chosen(columns or {})
        calls = (self._ask(one, queries, prompts, labels, responses=responses, columns=columns) for one in asked)
        results: list[RewardResult] = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            results.append(answer)
        return _sum(asked, results, len(queries))

    def totals(self) -> dict[str, float]:
        """By NAME/WHAT, since the start: calls, samples, seconds, failures (samples that the source failed), and what
        sources count of themselves."""
        own = {_key(one, what): n for one in self._sources.values() for what, n in one.totals().items()}
        return dict(self._totals) | own

    async def close(self) -> None:
        """Ends all sources."""
        await asyncio.gather(*(one.close() for one in self._sources.values()))

    def _chosen(self, columns: Mapping[str, Sequence[Any]]) -> list[NamedSource]:
        """Those of a group, whose samples are of one row."""
        if self._choose_by is None:
            return list(self._sources.values())
        values = columns.get(self._choose_by) or [None]
        return [self._sources[name] for name in chosen_sources(values[0], list(self._sources))]

    async def _ask(self, one: NamedSource, *group: Any, **options: Any) -> RewardResult:
        count = len(group[0])
        began = time.monotonic()
        try:
            result = await one.source.score(*group, **options)
            if len(result.rewards) != count:
                raise ValueError(f"it returned {len(result.rewards)} rewards for {count} samples")
        except Exception as error:
            self._count(one, count, count, began)
            raise _named(one, error) from error
        self._count(one, count, sum(failure is not None for failure in result.failures), began)
        return result

    def _count(self, one: NamedSource, samples: int, failures: int, began: float) -> None:
        """A call that was not cancelled."""
        counts = {"calls": 1, "samples": samples, "failures": failures, "seconds": time.monotonic() - began}
        self._totals.update({_key(one, what): value for what, value in counts.items()})


def _key(one: NamedSource, what: str) -> str:
    return f"{one.name}/{what}" if one.name else what


def _named(one: NamedSource, error: Exception) -> Exception:
    if not one.name:
        return error
    if isinstance(error, RewardError):
        return type(error)(f"reward source {one.name!r}: {error}", error.traceback)
    return RewardError(f"reward source {one.name!r}: {describe(error)}")


def _sum(asked: Sequence[NamedSource], results: Sequence[RewardResult], count: int) -> RewardResult:
    pairs = list(zip(asked, results, strict=True))
    failures = [_failure(pairs, i) for i in range(count)]

    def total(values: Callable[[RewardResult], Sequence[float | None]]) -> list[float | None]:
        return [
            None if failures[i] else math.fsum(one.weight * (values(result)[i] or 0.0) for one, result in pairs)
            for i in range(count)
        ]

    return RewardResult(
        rewards=total(lambda result: result.rewards),
        scores=total(lambda result: result.scores),
        extra_logs=[_logs(pairs, i) for i in range(count)],
        failures=failures,
    )


def _failure(pairs: Sequence[tuple[NamedSource, RewardResult]], i: int) -> Failure | None:
    for one, result in pairs:
        if (failure := result.failures[i]) is not None:
            return replace(failure, message=f"reward source {one.name!r}: {failure.message}") if one.name else failure
    return None


def _logs(pairs: Sequence[tuple[NamedSource, RewardResult]], i: int) -> dict[str, float]:
    logs: dict[str, float] = {}
    for one, result in pairs:
        logs |= {_key(one, key): value for key, value in result.extra_logs[i].items()}
        reward = result.rewards[i]
        if one.name and reward is not None:
            logs[_key(one, "reward")] = reward
    return logs
