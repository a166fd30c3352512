"""The ranks of one role, as the controller calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray

from openrlhf.core.config import AlgoConfig
from openrlhf.launcher.ray.calls import gather
from openrlhf.launcher.ray.learner_actor import WORK_TIMEOUT, LearnerActor
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.plan import split_over_ranks

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Refs = list[ray.ObjectRef]


@dataclass(frozen=True, kw_only=True)
class RankGroup(Generic[T]):
    """The ranks of a role, which have the methods of its class `T` (`launcher/ranks/roles.py`).

    hidden_size: that of the policy, for all roles: they must split the samples alike.
    ranks_per_sample: how many neighbouring ranks get the same samples.
    algo: what the policy learns, which decides what a reference is asked.
    truncated: whether samples are of what top-p, top-k or min-p keep: then the reference has to know what that is.
    follows: whether it is a reference that moves to the policy.
    share_prompt: whether a rank may compute the prompt of a group once.
    """

    role: str
    ranks: Sequence[Remote[T]]
    hidden_size: int
    ranks_per_sample: int = 1
    truncated: bool = False
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    follows: bool = False
    share_prompt: bool = False

    def shares(self, mini_batches: Sequence[Sequence[SampleRef]]) -> list[list[list[SampleRef]]]:
        """Per rank: its share of every mini-batch."""
        parts = len(self.ranks) // self.ranks_per_sample
        split = [
            split_over_ranks(batch, parts, hidden_size=self.hidden_size, share_prompt=self.share_prompt)
            for batch in mini_batches
        ]
        return [[shares[rank // self.ranks_per_sample] for shares in split] for rank in range(len(self.ranks))]

    def ask(self, method: Callable[Concatenate[T, P], Any], *args: P.args, **kwargs: P.kwargs) -> Refs:
        """The same call on every rank."""
        return [rank.ask(method, *args, **kwargs) for rank in self.ranks]

    @property
    def processes(self) -> list[Remote[LearnerActor]]:
        """The processes of the ranks."""
        return [Remote(rank.name, rank.actor) for rank in self.ranks]

    def ask_process(
        self, method: Callable[Concatenate[LearnerActor, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Refs:
        """The same call on the process of every rank."""
        return [process.ask(method, *args, **kwargs) for process in self.processes]

    def scatter(self, method: Callable[..., Any], per_rank: Sequence[Any], *args: Any, **kwargs: Any) -> Refs:
        """A call whose first argument each rank has its own of, perhaps as the reference of an earlier answer."""
        return [rank.ask(method, own, *args, **kwargs) for rank, own in zip(self.ranks, per_rank, strict=True)]

    async def wait(self, refs: Sequence[Any], what: str, timeout: float = WORK_TIMEOUT) -> list[Any]:
        names = [rank.name for rank in self.ranks]
        return await gather(refs, what=f"{what} ({self.role})", names=names, timeout=timeout)
