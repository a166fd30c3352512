"""`CurriculumSampler`: prompts chosen by a running estimate of their pass rate, the same again after a resume.

Every prompt has a Beta belief about its pass rate, which starts at Jeffreys' prior Beta(1/2, 1/2) and takes in how many
episodes of its group passed. Evidence halves with every `data.curriculum_half_life` rollout batches, so what was too
hard or too easy long ago is worth a try again. Estimates change between rollout batches only: with which ones a prompt
was chosen does not depend on the order in which groups finish.

A share of the draws follows the uniform order instead, evenly spread, so no prompt waits longer for its next try than
that order takes to come round.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.data.sampler import PromptSampler, PromptSource, order
from openrlhf.launcher.samples import SampleInfo
from openrlhf.rollout.episodes import by_episode, mean

PRIOR = 0.5
"""Passes and failures that every prompt is believed to have had before its first try."""
GUESSES = 32
"""Draws by weight before the uniform order is asked, where all that come up are under way already."""
BUCKETS = {"hard": (0.0, 0.2), "medium": (0.2, 0.8), "easy": (0.8, 1.0)}
"""Pass rates, above the first bound and up to the second one, by which metrics tell what was chosen."""
_STREAM = 0xC0DE  # keeps the random numbers of choices apart from those of the uniform order

Floats = NDArray[np.float64]


class Prompts(PromptSource, Protocol):
    """A data set that knows which of its prompts are the same row."""

    def places(self) -> tuple[list[str], NDArray[np.int32], NDArray[np.int64]]:
        """(names of the sources, source [N] and row [N] of every prompt)."""
        ...


@dataclass(kw_only=True)
class Histories:
    """What is known of N rows, an entry each. tried, passed: episodes, all of them. evidence, successes: the same, as
    far as they are not forgotten at `last`, the rollout batch that tried the row (0: none did)."""

    tried: NDArray[np.int64]
    passed: NDArray[np.int64]
    evidence: Floats
    successes: Floats
    last: NDArray[np.int32]

    @staticmethod
    def empty(size: int) -> Histories:
        """Of rows that nobody tried."""
        return Histories(
            tried=np.zeros(size, np.int64),
            passed=np.zeros(size, np.int64),
            evidence=np.zeros(size),
            successes=np.zeros(size),
            last=np.zeros(size, np.int32),
        )

    def take(
        self, rows: NDArray[np.integer[Any]], tries: Floats, passes: Floats, *, now: int, half_life: float
    ) -> None:
        """Add tries [n] and passes [n] of rows [n], which may repeat, in rollout batch `now`."""
        touched = np.unique(rows)
        kept = 0.5 ** ((now - self.last[touched]) / half_life)
        self.evidence[touched] *= kept
        self.successes[touched] *= kept
        self.last[touched] = now
        for total, more in (
            (self.tried, tries),
            (self.evidence, tries),
            (self.passed, passes),
            (self.successes, passes),
        ):
            np.add.at(total, rows, more.astype(total.dtype))

    def belief(self, *, now: int, half_life: float) -> tuple[Floats, Floats]:
        """(alpha, beta) [N] of the Beta distribution of every row's pass rate."""
        kept = 0.5 ** ((now - self.last) / half_life)
        successes, evidence = self.successes * kept, self.evidence * kept
        return successes + PRIOR, evidence - successes + PRIOR

    def pack(self) -> dict[str, str]:
        """The rows that were tried, as text for JSON."""
        rows = np.flatnonzero(self.last)
        arrays = {"rows": rows, **{name: values[rows] for name, values in vars(self).items()}}
        return {name: base64.b64encode(zlib.compress(v.tobytes(), 1)).decode() for name, v in arrays.items()}

    def unpack(self, packed: Mapping[str, str]) -> None:
        """The inverse of `pack`, on rows that nobody tried."""
        read: Callable[[str], bytes] = lambda name: zlib.decompress(base64.b64decode(packed[name]))  # noqa: E731
        rows = np.frombuffer(read("rows"), np.int64)
        for name, values in vars(self).items():
            values[rows] = np.frombuffer(read(name), values.dtype)


def window(alpha: Floats, beta: Floats, config: CurriculumConfig) -> Floats:
    """1 where the expected pass rate lies in `curriculum_window`, else 0."""
    low, high = config.curriculum_window
    estimate = alpha / (alpha + beta)
    return ((low <= estimate) & (estimate <= high)).astype(np.float64)


def prioritised(alpha: Floats, beta: Floats, config: CurriculumConfig) -> Floats:
    """The expected variance of an episode's success, E[p (1 - p)] = alpha beta / (n (n + 1)) with n = alpha + beta.

    The square of the reward's std, to which the gradient of a group is about proportional; what is not known is drawn
    more often than by p (1 - p) of the estimate.
    """
    total = alpha + beta
    return alpha * beta / (total * (total + 1))


WEIGHTS: dict[str, Callable[[Floats, Floats, CurriculumConfig], Floats]] = {
    "window": window,
    "prioritised": prioritised,
}
"""How often a prompt is drawn, by `--data.curriculum`: (alpha [N], beta [N], config) -> weights [N] of at least 0."""


class CurriculumSampler(PromptSampler):
    """Draws as many prompts per episode as the data set has, each by its weight or in the uniform order.

    A prompt under way is not drawn again before its result counts, unless all others are under way too. Rows that a
    blended data set holds several times share one history, and are drawn as many times as often.
    """

    curriculum = True

    def __init__(self, dataset: Prompts, config: CurriculumConfig, seed: int) -> None:
        self.config = config
        self._weigh = WEIGHTS[config.curriculum]
        self._sources, source, row = dataset.places()
        self._rows, self._row_of = np.unique(np.stack([source, row], 1), axis=0, return_inverse=True)
        self._row_of = self._row_of.reshape(-1).astype(np.int32)
        self.histories = Histories.empty(len(self._rows))
        self.batches = 0
        """Rollout batches whose results count."""
        self._draws = self._steps = 0  # draws in all, and steps along the uniform order
        self._under_way: dict[str, int] = {}  # group -> prompt
        self._results: list[tuple[int, int, int]] = []  # (prompt, tries, passes) that do not count yet
        self._chosen = dict.fromkeys([*BUCKETS, "new", "uniform", "all"], 0)
        self._pass: tuple[int, NDArray[np.int64]] | None = None
        self._metrics: dict[str, float] = {}
        super().__init__(dataset, seed)

    def start_episode(self, episode: int) -> None:
        """Begin an episode."""
        self.episode = episode
        self.position = 0

    def next(self, n: int) -> list[PromptItem]:
        """The next n prompts of the episode; fewer, or none, when it ends."""
        items = []
        for position in range(self.position, min(self.position + n, len(self.dataset))):
            place = self._choose()
            item = self.dataset.item(place, episode=self.episode, position=position)
            item = replace(item, group_id=f"{item.group_id}-d{position}")  # it may come again in this episode
            self._under_way[item.group_id] = place
            items.append(item)
        self.position += len(items)
        return items

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None:
        """A group is finished, whatever becomes of it. An episode passed whose mean score over its branches reaches
        `curriculum_pass`; failed branches, and episodes without others, are no tries."""
        place = self._under_way.pop(item.group_id, None)
        if place is None:
            return
        alive = ([s for s in episode if not s.failed] for episode in by_episode(samples))
        scores = (mean(v for s in own if (v := s.reward if s.score is None else s.score) is not None) for own in alive)
        known = [score for score in scores if score is not None]
        passes = sum(score >= self.config.curriculum_pass for score in known)
        self._results.append((place, len(known), passes))

    def settle(self) -> None:
        """A rollout batch is full: results count from now on."""
        chosen, self._chosen = self._chosen, dict.fromkeys(self._chosen, 0)
        self.batches += 1
        if tried := [result for result in self._results if result[1]]:
            places, tries, passes = np.array(tried).T
            counts = tries.astype(np.float64), passes.astype(np.float64)
            self.histories.take(
                self._row_of[places], *counts, now=self.batches, half_life=self.config.curriculum_half_life
            )
        self._results.clear()
        self.__dict__.pop("_estimate", None)
        self.__dict__.pop("_cumulative", None)
        tried = self.histories.last > 0
        found = {"curriculum/coverage": float(tried.mean())}
        if tried.any():
            found["curriculum/estimate_mean"] = float(self._estimate[tried].mean())
        total = chosen.pop("all")
        self._metrics = found | {f"curriculum/chosen_{name}": n / total for name, n in chosen.items() if total}

    def metrics(self) -> dict[str, float]:
        """curriculum/...: how the prompts of the newest rollout batch were chosen, and what is known of all."""
        return self._metrics

    @property
    def nbytes(self) -> int:
        """Of all arrays with an entry per prompt."""
        kept = [*vars(self.histories).values(), self._row_of, self._rows, self._cumulative, self._estimate]
        return sum(array.nbytes for array in kept) + (0 if self._pass is None else self._pass[1].nbytes)

    @cached_property
    def _estimate(self) -> Floats:
        """Expected pass rate of every row, [rows]."""
        alpha, beta = self._belief()
        return alpha / (alpha + beta)

    @cached_property
    def _cumulative(self) -> Floats:
        """Running sums of the prompts' weights, [N]."""
        return self._weigh(*self._belief(), self.config)[self._row_of].cumsum()

    def _belief(self) -> tuple[Floats, Floats]:
        return self.histories.belief(now=self.batches, half_life=self.config.curriculum_half_life)

    def _taken(self) -> set[int]:
        """Prompts whose results do not count yet, finished or not: so choices know nothing of who finished first."""
        return {*self._under_way.values(), *(place for place, _, _ in self._results)}

    def _choose(self) -> int:
        share, number = self.config.curriculum_uniform, self._draws
        self._draws += 1
        uniform = int((number + 1) * share) > int(number * share)
        place = None if uniform else self._by_weight(number)
        if place is None:
            place, uniform = self._in_order(), True
        row = int(self._row_of[place])
        self._chosen["all"] += 1
        self._chosen["uniform"] += uniform
        if not self.histories.last[row]:
            self._chosen["new"] += 1
        else:
            rate = float(self._estimate[row])
            self._chosen[next(name for name, (_, high) in BUCKETS.items() if rate <= high)] += 1
        return place

    def _by_weight(self, number: int) -> int | None:
        """A prompt that is not under way, by weight; None where none came up."""
        total = float(self._cumulative[-1])
        if total <= 0:
            return None
        taken = self._taken()
        points = np.random.default_rng([self.seed, _STREAM, number]).random(GUESSES) * total
        found = np.searchsorted(self._cumulative, points, side="right").clip(max=len(self._row_of) - 1)
        return next((place for place in found.tolist() if place not in taken), None)

    def _in_order(self) -> int:
        """The next prompt of the uniform order that is not under way; the next one where all are."""
        taken = self._taken()
        skips = len(self.dataset) if len(taken) < len(self.dataset) else 0
        while True:
            number, step = divmod(self._steps, len(self.dataset))
            self._steps += 1
            if self._pass is None or self._pass[0] != number:
                self._pass = number, order(len(self.dataset), seed=self.seed, episode=number)
            place = int(self._pass[1][step])
            if place not in taken or not skips:
                return place

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, and what it knows of every row that was tried."""
        return super().state_dict() | {
            "curriculum": {
                "batches": self.batches,
                "draws": self._draws,
                "steps": self._steps,
                "under_way": dict(self._under_way),
                "results": list(self._results),
                "chosen": dict(self._chosen),
                "histories": self.histories.pack(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped. ValueError when the prompts or the seed are not the same, or when it was
        written without a curriculum."""
        super().load_state_dict(state)
        own = state["curriculum"]
        self.batches, self._draws, self._steps = own["batches"], own["draws"], own["steps"]
        self._under_way = dict(own["under_way"])
        self._results = [(place, tries, passes) for place, tries, passes in own["results"]]
        self._chosen = dict(own["chosen"])
        self.histories.unpack(own["histories"])

    def close(self) -> None:
        """Write every row's history to `curriculum_export`: JSON lines, or Parquet where the name ends in .parquet."""
        if self.config.curriculum_export is None:
            return
        path = Path(self.config.curriculum_export)
        columns = self._columns()
        if path.suffix == ".parquet":
            from openrlhf.launcher.record.files import write_columns

            write_columns(columns, path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for values in zip(*(column.tolist() for column in columns.values()), strict=True):
                file.write(json.dumps(dict(zip(columns, values, strict=True)), ensure_ascii=False) + "\n")

    def _columns(self) -> dict[str, NDArray[Any]]:
        """dataset and row name a prompt; last_step: the rollout batch of its last try, 0 for none."""
        known = self.histories
        return {
            "dataset": np.array(self._sources)[self._rows[:, 0]],
            "row": self._rows[:, 1],
            "tries": known.tried,
            "passes": known.passed,
            "estimate": self._estimate,
            "last_step": known.last,
        }
