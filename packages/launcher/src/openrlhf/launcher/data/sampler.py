"""`PromptSampler`: the order in which prompts are drawn, and the place where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from openrlhf.agents.types import PromptItem


class PromptSource(Protocol):
    """What a sampler draws from."""

    def __len__(self) -> int: ...

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem: ...


def order(size: int, *, seed: int, episode: int) -> np.ndarray:
    """The order of the prompts in one episode, [size] int64: a permutation that depends on nothing else."""
    return np.random.default_rng([seed, episode]).permutation(size)


class PromptSampler:
    """Draws every prompt once per episode, in the order of (seed, episode).

    Example::

        sampler = PromptSampler(dataset, seed=42)
        for episode in range(num_episodes):
            sampler.start_episode(episode)   # not after load_state_dict, which knows the episode
            while prompts := sampler.next(rollout_batch_size):   # fewer at the end of the episode
                ...
    """

    def __init__(self, dataset: PromptSource, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.start_episode(0)

    def start_episode(self, episode: int) -> None:
        """Begin an episode at its first prompt."""
        self.episode = episode
        self.position = 0
        self._order = order(len(self.dataset), seed=self.seed, episode=episode)

    def next(self, n: int) -> list[PromptItem]:
        """The next n prompts of the episode; fewer, or none, when it ends."""
        places = range(self.position, min(self.position + n, len(self.dataset)))
        items = [self.dataset.item(int(self._order[p]), episode=self.episode, position=p) for p in places]
        self.position += len(items)
        return items

    def state_dict(self) -> dict[str, int]:
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
        self.start_episode(int(state["episode"]))
        self.position = int(state["position"])
