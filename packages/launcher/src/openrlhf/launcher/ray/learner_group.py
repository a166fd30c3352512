"""All learner ranks of a run behind the trainer's `Learner` protocol.

The controller sends sample references and gets scalars; log-probs, values and returns travel from rank to rank through
the object store, and a prepared batch stays in the rank that will train on it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openrlhf.launcher.outputs import critic_folder
from openrlhf.launcher.ranks.batches import combine_sums
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, ReferenceRank, RewardRank, TrainedRank
from openrlhf.launcher.ray.calls import gather
from openrlhf.launcher.ray.learner_actor import WORK_TIMEOUT, LearnerActor
from openrlhf.launcher.ray.rank_group import RankGroup, Refs
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.protocols import Prepared
from openrlhf.learner.folders.shared import together

REFERENCE = "ref"
"""Where a checkpoint has a reference that moves."""
BUCKET_BYTES = 256 * 2**20
"""About so much of the policy goes to a reference at once."""


Shares = Sequence[Sequence[Sequence[SampleRef]]]
"""Per rank: its share of every mini-batch."""


def parts_for(own: Shares, others: Shares, refs: Refs) -> list[Refs]:
    """Per rank of a role which results of another role's ranks it needs: its twin's where both split alike.

    Else those of the ranks that have its samples, of one of them where it has none.
    """
    if len(own) == len(others):
        return [[ref] for ref in refs]
    holder: dict[int, int] = {}
    for rank, share in enumerate(others):
        for sample in itertools.chain(*share):
            holder.setdefault(sample.index, rank)
    needed = [sorted({holder[sample.index] for sample in itertools.chain(*share)}) or [0] for share in own]
    return [[refs[rank] for rank in ranks] for ranks in needed]


async def score_rewards(reward: RankGroup[RewardRank], samples: Sequence[SampleRef]) -> list[float]:
    """The raw reward of each sample, in order."""
    merged: dict[int, float] = {}
    for part in await reward.wait(reward.scatter(RewardRank.rewards, reward.shares([samples])), "reward forward"):
        merged.update(part)
    return [merged[s.index] for s in samples]


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """A prepared batch as it lies in the ranks: a reference per rank of what stands for its share."""

    policy: Refs
    critic: Refs


class Push(Protocol):
    """How the policy's weights get to the engines. lock: of the devices that both use."""

    lock: asyncio.Lock

    def alone(self) -> AbstractAsyncContextManager[Any]: ...

    async def push(self, policy: RankGroup[PolicyRank], version: int) -> dict[str, float]: ...


class RayLearner:
    """The `Learner` of a run."""

    def __init__(
        self,
        *,
        policy: RankGroup[PolicyRank],
        push: Push,
        reference: RankGroup[ReferenceRank] | None = None,
        critic: RankGroup[CriticRank] | None = None,
        reward: RankGroup[RewardRank] | None = None,
        tokenizer_path: str,
        critic_export: bool = False,
        take_turns: bool = False,
    ) -> None:
        """reference: the policy's own ranks where it is the policy without its adapters.

        take_turns: critic and policy share devices, and only one of them has its training states there at a time.
        """
        self.policy, self.reference, self.critic, self.reward = policy, reference, critic, reward
        self._push = push
        self._critic_export = critic_export
        self._take_turns = take_turns
        self._tokenizer_path = tokenizer_path
        self._layer_there = False

    @property
    def groups(self) -> list[RankGroup[Any]]:
        there = (self.policy, self.reference, self.critic, self.reward)
        return list({id(group): group for group in there if group is not None}.values())

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        async with self._push.lock if self._take_turns else self._push.alone():
            return await score_rewards(self._reward_ranks(), samples)

    async def reward_statistics(self) -> tuple[float, float] | None:
        reward = self._reward_ranks()
        return (await reward.wait(reward.ask(RewardRank.statistics), "reward statistics"))[0]

    def _reward_ranks(self) -> RankGroup[RewardRank]:
        assert self.reward is not None, "a reward role is placed when rewards come from an in-cluster model"
        return self.reward

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        async with self._push.alone():
            return await self._prepare(mini_batches, kl_coef, step)

    async def _prepare(self, mini_batches: Sequence[Sequence[SampleRef]], kl_coef: float, step: int) -> Prepared:
        policy, critic, reference = self.policy, self.critic, self.reference
        valued: list[Any] = []
        critics: Shares = []
        cut = policy.shares(mini_batches)
        own: list[Any] = list(cut)
        parts: dict[str, list[Refs]] = {}
        told: list[Refs] = [[] for _ in own]
        layer: Refs = []
        if reference is not None:
            shares = reference.shares(mini_batches)
            kept: list[Any] = [None] * len(shares)
            if policy.truncated:
                own = policy.scatter(PolicyRank.sampled, own)
                kept = parts_for(shares, cut, policy.scatter(PolicyRank.kept, own))
            algo = reference.algo
            if algo.ref_logprobs:
                scored = [
                    rank.ask(ReferenceRank.logprobs, share, sets)
                    for rank, share, sets in zip(reference.ranks, shares, kept, strict=True)
                ]
                parts["ref_logprobs"] = parts_for(cut, shares, scored)
            if algo.distill.divergence is not None:
                told = parts_for(cut, shares, reference.scatter(ReferenceRank.tell, shares))
                if not algo.distill.top_k and not self._layer_there:
                    layer = reference.ask(ReferenceRank.output_layer)[:1]
        if critic is not None:
            critics = critic.shares(mini_batches)
            valued = critic.scatter(CriticRank.values, critics)
            parts["values"] = parts_for(cut, critics, critic.scatter(CriticRank.read, valued))
        prepared = [
            rank.ask(
                PolicyRank.prepare,
                share,
                scores={name: refs[number] for name, refs in parts.items()},
                kl_coef=kl_coef,
                told=told[number],
                layer=layer,
                step=step,
            )
            for number, (rank, share) in enumerate(zip(policy.ranks, own, strict=True))
        ]
        sums = await policy.wait(policy.scatter(PolicyRank.metrics, prepared), "experience forward")
        self._layer_there = True
        sums = sums[:: policy.ranks_per_sample]  # a group's ranks measured the same samples
        if critic is not None:
            returns = parts_for(critics, cut, policy.scatter(PolicyRank.returns, prepared))
            valued = [
                rank.ask(CriticRank.prepare, own, returns=refs)
                for rank, own, refs in zip(critic.ranks, valued, returns, strict=True)
            ]
            await critic.wait(valued, "returns")
        return Prepared(handle=OnRanks(policy=prepared, critic=valued), metrics=combine_sums(sums))

    async def update(
        self,
        prepared: Prepared,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze_actor: Sequence[bool],
        members: str | None = None,
    ) -> dict[str, float]:
        shares: OnRanks = prepared.handle
        options: dict[str, Any] = {"members": members}

        async def policy() -> list[Any]:
            own = options | {"kl_coef": kl_coef, "freeze": list(freeze_actor)}
            refs = self.policy.scatter(PolicyRank.update, shares.policy, list(order), **own)
            return await self.policy.wait(refs, "policy update")

        async def critic(group: RankGroup[CriticRank]) -> list[Any]:
            return await group.wait(
                group.scatter(CriticRank.update, shares.critic, list(order), **options), "critic update"
            )

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

    async def sync_reference(self) -> None:
        policy, reference = self.policy, self.reference
        assert reference is not None, "only a run with a reference syncs it"
        async with self._push.lock:
            opened = await policy.wait(policy.ask_process(LearnerActor.open_stream, BUCKET_BYTES), "reference sync")
            for _ in range(opened[0]):
                first, *others = policy.ask_process(LearnerActor.next_bucket)
                taken = reference.ask(ReferenceRank.follow, [first])
                names = [rank.name for rank in (*policy.ranks[1:], *reference.ranks)]
                await gather([*others, *taken], what="reference sync", names=names, timeout=WORK_TIMEOUT)

    async def blind_to(self, path: str) -> list[str]:
        writers = [group for group, _ in self._trained("")]
        if self.reference is not None and self._follows:
            writers.append(self.reference)
        asked = [group.wait(group.ask_process(LearnerActor.blind_to, path), "look at a folder") for group in writers]
        return sorted({name for found in await asyncio.gather(*asked) for name in found if name is not None})

    async def save(self, folder: str) -> dict[str, int]:
        written: dict[str, int] = {}
        for group, path in self._trained(folder):
            seen = await group.wait(group.ask(TrainedRank.save, path), "checkpoint")
            written |= together(seen, Path(path).name)
        if self._follows and self.reference is not None:
            refs = self.reference.ask(ReferenceRank.save_followed, f"{folder}/{REFERENCE}")
            written |= together(await self.reference.wait(refs, "checkpoint"), REFERENCE)
        return written

    async def load(self, folder: str) -> None:
        saved = (Path(folder) / REFERENCE).is_dir()
        if saved is not self._follows:
            raise ValueError(
                f"the checkpoint {folder!r} was written {'with' if saved else 'without'} --ref.sync_steps: "
                f"{'give' if saved else 'leave out'} the flag"
            )
        for group, path in self._trained(folder):
            await group.wait(group.ask(TrainedRank.load_checkpoint, path), "resume")
        if self.reference is not None and saved:
            refs = self.reference.ask(ReferenceRank.load_followed, f"{folder}/{REFERENCE}")
            await self.reference.wait(refs, "resume")

    @property
    def _follows(self) -> bool:
        """Whether the reference moves in this run."""
        return self.reference is not None and self.reference.follows

    def _trained(self, folder: str) -> list[tuple[RankGroup[Any], str]]:
        """The models that train, each with its place in a checkpoint."""
        critic = [] if self.critic is None else [(self.critic, f"{folder}/critic")]
        return [(self.policy, f"{folder}/actor"), *critic]

    async def export(self, path: str, *, trial: bool = False) -> None:
        what = "trial of the export" if trial else "export"
        refs = self.policy.ask(PolicyRank.export, path, self._tokenizer_path, trial=trial)
        await self.policy.wait(refs, what)
        if self.critic is not None and self._critic_export:
            refs = self.critic.ask(CriticRank.export, critic_folder(path), self._tokenizer_path, trial=trial)
            await self.critic.wait(refs, f"critic {what}")

    async def shutdown(self) -> None:
        """End the ranks. Their state is on disk or not wanted, so they are not asked."""
        for group in self.groups:
            for rank in group.ranks:
                rank.kill()
