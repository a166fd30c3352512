"""`PromptSampler`: the order in which prompts are drawn, and the place where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import SampleInfo


class PromptSource(Protocol):
    """What a sampler draws from."""

    def __len__(self) -> int: ...

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem: ...


def order(size: int, *, seed: int, episode: int, strata: np.ndarray | None = None) -> np.ndarray:
    """The order of the prompts in one episode, [size] int64: a permutation that depends on nothing else.

    strata: [size] int, kinds of prompts that are dealt evenly over the episode: of the first n prompts, whatever n is,
    each kind has its share, to less than one prompt.
    """
    rng = np.random.default_rng([seed, episode])
    shuffled = rng.permutation(size)
    if strata is None:
        return shuffled
    kinds, counts = np.unique(strata, return_counts=True)
    places, found = dealt(tuple(counts.tolist())), np.empty_like(shuffled)
    for number, kind in enumerate(kinds):
        found[places == number] = shuffled[strata[shuffled] == kind]
    return found


@lru_cache(maxsize=2)
def dealt(counts: tuple[int, ...]) -> np.ndarray:
    """[sum of counts] int32: which kind comes at each place, so that of the first n each has n times its share, to
    less than one (Tijdeman, "The chairman assignment problem", 1980).

    Of the kinds that are owed enough comes the one that would be owed a whole place first.
    """
    size, slack = sum(counts), max(2 * len(counts) - 2, 1)
    places, given = np.empty(size, dtype=np.int32), [0] * len(counts)
    for n in range(size):
        owed = [(n + 1) * count - size * had for count, had in zip(counts, given, strict=True)]  # in parts of a place
        due = [k for k, part in enumerate(owed) if slack * part >= size]
        places[n] = chosen = min(due, key=lambda k: ((slack - 1) * size - slack * owed[k]) / counts[k])
        given[chosen] += 1
    return places


class PromptSampler:
    """Draws every prompt once per episode, in the order of (seed, episode).

    Example::

        sampler = PromptSampler(dataset, seed=42)
        for episode in range(num_episodes):
            sampler.start_episode(episode)   # not after load_state_dict, which knows the episode
            while prompts := sampler.next(rollout_batch_size):   # fewer at the end of the episode
                ...
    """

    curriculum = False
    """Whether prompts are chosen by what is known of them."""

    def __init__(self, dataset: PromptSource, seed: int, *, strata: np.ndarray | None = None) -> None:
        """strata: see `order`."""
        self.dataset = dataset
        self.seed = seed
        self._strata = strata
        self.start_episode(0)

    def start_episode(self, episode: int) -> None:
        """Begin an episode at its first prompt."""
        self.episode = episode
        self.position = 0
        self._order = order(len(self.dataset), seed=self.seed, episode=episode, strata=self._strata)

    def next(self, n: int) -> list[PromptItem]:
        """The next n prompts of the episode; fewer, or none, when it ends."""
        places = range(self.position, min(self.position + n, len(self.dataset)))
        items = [self.dataset.item(int(self._order[p]), episode=self.episode, position=p) for p in places]
        self.position += len(items)
        return items

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None:
        """A group of a prompt that was drawn here is finished."""

    def judged(self, item: PromptItem) -> bool:
        """Whether failures of this prompt count as those of the run."""
        return True

    def failing(self) -> dict[str, float]:
        """Environment -> share of the episodes of its last groups that failed, of those where some did."""
        return {}

    def metrics(self) -> dict[str, float]:
        """What there is to tell of the prompts at the end of a step."""
        return {}

    def settle(self) -> None:
        """A rollout batch is full."""

    def close(self) -> None:
        """The run is over."""

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands: episode, position, and what they depend on."""
        return {"episode": self.episode, "position": self.position, "seed": self.seed, "size": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped. ValueError when the prompts or the seed are not the same."""
        for key, here, flag in (
            ("size", len(self.dataset), "--data.prompt_dataset"),
            ("seed", self.seed, "--train.seed"),
        ):
            if state[key] != here:
                raise ValueError(f"the checkpoint was written with {key} {state[key]} ({flag}), this run has {here}")
        if ("curriculum" in state) != self.curriculum:
            was = "without" if self.curriculum else "with"
            raise ValueError(
                f"the checkpoint was written {was} a curriculum: resume with the --data.curriculum of then"
            )
        self.start_episode(int(state["episode"]))
        self.position = int(state["position"])
