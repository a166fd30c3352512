"""Engines, agents and, where one gives the rewards, a reward model on a connected Ray: an evaluation alone."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.launcher.config import EvaluationConfig
from openrlhf.launcher.data.sampler import PromptSampler
from openrlhf.launcher.preflight import Prepared
from openrlhf.launcher.ranks.roles import RewardRank
from openrlhf.launcher.ray.cluster import Cluster
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.engine_watch import INTERVAL, EngineWatch
from openrlhf.launcher.ray.learner_group import score_rewards
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.start import start_workers
from openrlhf.launcher.samples import Group, SampleRef
from openrlhf.launcher.trainer.evaluation import ToldPipeline, evaluate
from openrlhf.launcher.trainer.model_rewards import reward_stream
from openrlhf.learner.spec import Role


class RewardRanks:
    """The reward model's ranks, and nothing else of a `Learner`."""

    def __init__(self, reward: RankGroup[RewardRank] | None, fleet: EngineFleet) -> None:
        self._reward, self._fleet = reward, fleet

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        assert self._reward is not None, "a reward role is placed when rewards come from an in-cluster model"
        async with self._fleet.lock:  # no engine is restarted meanwhile, with which it may share a device
            return await score_rewards(self._reward, samples)


async def sample_evaluation(config: EvaluationConfig, prepared: Prepared, cluster: Cluster) -> list[Group]:
    """The evaluation's samples with their rewards, of the model that the engines load."""
    workers = await start_workers(config, prepared, cluster)
    fleet, rollout = workers.fleet, workers.rollout
    rewards = RewardRanks(workers.groups.get(Role.REWARD), fleet)

    async def recover() -> None:
        """Engines that are started again load the model anew."""
        async with fleet.lock:
            await fleet.revive()
            await fleet.announce()

    rollout.watch = EngineWatch(fleet, recover, rollout, list(workers.groups.values()), INTERVAL)
    rollout.watch.start()
    prompts = PromptSampler(prepared.prompts, config.train.seed)
    pipeline = ToldPipeline(config, rollout, prompts, reward_stream(config, rewards))
    try:
        return await evaluate(config, pipeline, rewards, prepared.eval_prompts)
    finally:
        await pipeline.close()
        await rollout.shutdown()
        for group in workers.groups.values():
            for rank in group.ranks:
                rank.kill()
