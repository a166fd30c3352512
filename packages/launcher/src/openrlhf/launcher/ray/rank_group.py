"""The ranks of one role, as the controller calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from openrlhf.launcher.ray.calls import gather
from openrlhf.launcher.ray.learner_actor import WORK_TIMEOUT
from openrlhf.launcher.trainer.plan import split_over_ranks
from openrlhf.launcher.trainer.protocols import SampleRef

Shares = list[list[SampleRef]]


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks of one role.

    hidden_size: that of the policy, for all roles: they must split the samples alike.
    tensor_parallel: how many neighbouring ranks hold one model and get the same samples.
    """

    role: str
    actors: Sequence[Any]
    hidden_size: int
    tensor_parallel: int = 1

    @property
    def names(self) -> list[str]:
        return [f"{self.role} rank {i}" for i in range(len(self.actors))]

    def shares(self, mini_batches: Sequence[Sequence[SampleRef]]) -> list[Shares]:
        """Per rank: its share of every mini-batch."""
        parts = len(self.actors) // self.tensor_parallel
        split = [split_over_ranks(batch, parts, hidden_size=self.hidden_size) for batch in mini_batches]
        return [[shares[rank // self.tensor_parallel] for shares in split] for rank in range(len(self.actors))]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """The same call on every rank."""
        return [actor.call.remote(method, *args, **kwargs) for actor in self.actors]

    def call_actor(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """A method of the actors themselves on every rank."""
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def scatter(self, method: str, per_rank: Sequence[Any]) -> list[ray.ObjectRef]:
        """A call with one argument per rank."""
        return [actor.call.remote(method, arg) for actor, arg in zip(self.actors, per_rank, strict=True)]

    async def wait(self, refs: Sequence[ray.ObjectRef], what: str, timeout: float = WORK_TIMEOUT) -> list[Any]:
        return await gather(refs, what=f"{what} ({self.role})", names=self.names, timeout=timeout)
