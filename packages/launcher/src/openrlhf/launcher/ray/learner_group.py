"""All learner ranks of a run behind the trainer's `Learner` protocol.

The controller sends sample references and gets scalars; log-probs, values and returns travel from rank to rank through
the object store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from openrlhf.launcher.outputs import critic_folder
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.weight_push import WeightPush
from openrlhf.launcher.trainer.protocols import SampleRef


def parts_for(rank: int, world_size: int, refs: Sequence[ray.ObjectRef]) -> Sequence[ray.ObjectRef]:
    """Which other ranks' results a rank needs: its twin's where both roles split alike, else all."""
    return [refs[rank]] if len(refs) == world_size else refs


class RayLearner:
    """The `Learner` of a run."""

    def __init__(
        self,
        *,
        policy: RankGroup,
        push: WeightPush,
        reference: RankGroup | None = None,
        critic: RankGroup | None = None,
        reward: RankGroup | None = None,
        tokenizer_path: str,
        critic_export: bool = False,
        take_turns: bool = False,
    ) -> None:
        """take_turns: critic and policy share devices, and only one of them has its training states there at a time."""
        self.policy, self.reference, self.critic, self.reward = policy, reference, critic, reward
        self._push = push
        self._critic_export = critic_export
        self._take_turns = take_turns
        self._tokenizer_path = tokenizer_path

    @property
    def groups(self) -> list[RankGroup]:
        return [g for g in (self.policy, self.reference, self.critic, self.reward) if g is not None]

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        assert self.reward is not None, "a reward role is placed when rewards come from an in-cluster model"
        async with self._push.lock if self._take_turns else self._push.alone():
            refs = self.reward.scatter("rewards", self.reward.shares([samples]))
            merged: dict[int, float] = {}
            for part in await self.reward.wait(refs, "reward forward"):
                merged.update(part)
        return [merged[s.index] for s in samples]

    async def reward_statistics(self) -> tuple[float, float] | None:
        assert self.reward is not None, "a reward role is placed when rewards come from an in-cluster model"
        return (await self.reward.wait(self.reward.call("reward_statistics"), "reward statistics"))[0]

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float) -> dict[str, float]:
        async with self._push.alone():
            return await self._prepare(mini_batches, kl_coef)

    async def _prepare(self, mini_batches: Sequence[Sequence[SampleRef]], kl_coef: float) -> dict[str, float]:
        from openrlhf.launcher.trainer.rank import combine_sums

        def scattered(group: RankGroup | None, method: str) -> list[ray.ObjectRef]:
            return [] if group is None else group.scatter(method, group.shares(mini_batches))

        refs = scattered(self.reference, "logprobs")
        values = scattered(self.critic, "values")
        world = len(self.policy.actors)
        pairs = [
            actor.merged.options(num_returns=2).remote(
                "prepare",
                shares,
                parts={
                    "refs": parts_for(rank, world, refs),
                    "values": parts_for(rank, world, values) if values else [],
                },
                kl_coef=kl_coef,
            )
            for rank, (actor, shares) in enumerate(
                zip(self.policy.actors, self.policy.shares(mini_batches), strict=True)
            )
        ]
        sums = await self.policy.wait([first for first, _ in pairs], "experience forward")
        sums = sums[:: self.policy.tensor_parallel]  # a group's ranks measured the same samples
        if self.critic is not None:
            returns = [second for _, second in pairs]
            count = len(self.critic.actors)
            sent = [
                actor.merged.remote("set_returns", parts={"returns": parts_for(rank, count, returns)})
                for rank, actor in enumerate(self.critic.actors)
            ]
            await self.critic.wait(sent, "returns")
        return combine_sums(sums)

    async def update(self, order: Sequence[int], *, kl_coef: float, freeze_actor: Sequence[bool]) -> dict[str, float]:
        from openrlhf.launcher.trainer.rank import combine_sums

        async def policy() -> list[Any]:
            refs = self.policy.call("update", list(order), kl_coef=kl_coef, freeze=list(freeze_actor))
            return await self.policy.wait(refs, "policy update")

        async def critic(group: RankGroup) -> list[Any]:
            return await group.wait(group.call("update", list(order), kl_coef=0.0), "critic update")

        async with self._push.lock:
            if self.critic is None:
                parts = [await policy()]
            elif self._take_turns:
                parts = [await critic(self.critic), await policy()]
            else:
                parts = await asyncio.gather(policy(), critic(self.critic))
        metrics: dict[str, float] = {}
        for part in parts:
            # every rank returns the same reduced sums
            metrics.update(combine_sums(part[:1]))
        return metrics

    async def push_weights(self, version: int) -> dict[str, float]:
        return await self._push.push(self.policy, version)

    async def save(self, folder: str) -> None:
        await self._each_trained("save", folder, "checkpoint")

    async def load(self, folder: str) -> None:
        await self._each_trained("load_checkpoint", folder, "resume")

    async def _each_trained(self, method: str, folder: str, what: str) -> None:
        await self.policy.wait(self.policy.call(method, f"{folder}/actor"), what)
        if self.critic is not None:
            await self.critic.wait(self.critic.call(method, f"{folder}/critic"), what)

    async def export(self, path: str, *, trial: bool = False) -> None:
        what = "trial of the export" if trial else "export"
        await self.policy.wait(self.policy.call("export", path, self._tokenizer_path, trial=trial), what)
        if self.critic is not None and self._critic_export:
            refs = self.critic.call("export", critic_folder(path), self._tokenizer_path, trial=trial)
            await self.critic.wait(refs, f"critic {what}")

    async def shutdown(self) -> None:
        """End the ranks. Their state is on disk or not wanted, so they are not asked."""
        for group in self.groups:
            for actor in group.actors:
                ray.kill(actor)
