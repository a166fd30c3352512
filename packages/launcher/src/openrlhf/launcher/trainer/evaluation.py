"""Evaluation: pass@1 and pass@k per dataset from the rewards of k samples per prompt."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence

from openrlhf.agents.types import PromptItem
from openrlhf.agents.values import unbiased_pass_at_k
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.logging.sinks import duration
from openrlhf.launcher.logging.values import nan_mean
from openrlhf.launcher.samples import EvalRequest, Group
from openrlhf.launcher.trainer.model_rewards import RewardModel, add_rewards
from openrlhf.launcher.trainer.pipeline import Pipeline, SyncPipeline
from openrlhf.rollout import episodes

log = logging.getLogger(__name__)


TOLD = 10
"""How often an evaluation alone says how far it is."""


class ToldPipeline(SyncPipeline):
    """Says in the log how many prompts of an evaluation are done, and how long the others may take."""

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        self._all, self._done, self._began = len(items), 0, time.monotonic()
        return await super().evaluate(items, request)

    async def _run_group(self, item: PromptItem, evaluation: EvalRequest | None = None) -> Group:
        group = await super()._run_group(item, evaluation)
        self._done += 1
        if self._done * TOLD // self._all > (self._done - 1) * TOLD // self._all:
            left = (time.monotonic() - self._began) / self._done * (self._all - self._done)
            log.info("evaluation: %d of %d prompts, %s left", self._done, self._all, duration(left))
        return group


async def evaluate(
    config: TrainPPOConfig, pipeline: Pipeline, rewards: RewardModel, prompts: Sequence[PromptItem]
) -> list[Group]:
    """Every prompt's samples with the weights that the engines hold, at --eval.temperature, with their rewards."""
    request = EvalRequest(temperature=config.eval.temperature, n_samples_per_prompt=config.eval.n_samples_per_prompt)
    groups = await pipeline.evaluate(prompts, request)
    return await add_rewards(rewards, groups) if config.has_reward_model else groups


def evaluation_metrics(groups: Sequence[Group], k: int) -> dict[str, float]:
    """Metrics of one evaluation, every prompt sampled k times.

    eval_{ds}_pass1: mean reward. eval_{ds}_pass{k}: mean over prompts of the largest of its k rewards.
    eval_{ds}_pass{j}_unbiased, where every reward is 0 or 1: the combinatorial estimator for k and for the powers of 2
    below it, from all samples of a prompt. Failed samples are left out and counted. A sample with branches counts once,
    with their mean reward; lengths are those of the branches.
    """
    by_dataset: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_dataset[group.prompt.datasource].append(group)
    metrics: dict[str, float] = {}
    for name, members in sorted(by_dataset.items()):
        metrics |= _dataset_metrics(f"eval/eval_{name}", members, k)
    alive = [s for g in groups for s in g.samples if not s.failed]
    metrics["eval/eval_response_length_mean"] = nan_mean([s.num_trainable for s in alive])
    metrics["eval/eval_truncated_rate"] = nan_mean([s.truncated for s in alive])
    metrics["eval/eval_num_samples"] = float(sum(len(episodes.by_episode(g.samples)) for g in groups))
    metrics["eval/eval_failed_samples"] = float(sum(len(episodes.failures(g.samples)) for g in groups))
    return metrics


def _dataset_metrics(prefix: str, groups: Sequence[Group], k: int) -> dict[str, float]:
    rewards = [r for g in groups if (r := _episode_rewards(g))]
    alive = [s for g in groups for s in g.samples if not s.failed]
    metrics = {
        f"{prefix}_pass1": nan_mean([sum(r) / len(r) for r in rewards]),
        f"{prefix}_response_length_mean": nan_mean([s.num_trainable for s in alive]),
        f"{prefix}_truncated_rate": nan_mean([s.truncated for s in alive]),
        f"{prefix}_num_samples": float(sum(len(episodes.by_episode(g.samples)) for g in groups)),
        f"{prefix}_failed_samples": float(sum(len(episodes.failures(g.samples)) for g in groups)),
    }
    if k > 1:
        metrics[f"{prefix}_pass{k}"] = nan_mean([max(r) for r in rewards])
        if all(value in (0.0, 1.0) for r in rewards for value in r):
            for j in [*_powers_of_2_below(k), k]:
                estimates = [unbiased_pass_at_k(int(sum(r)), len(r), j) for r in rewards if len(r) >= j]
                if estimates:
                    metrics[f"{prefix}_pass{j}_unbiased"] = nan_mean(estimates)
    return metrics


def _episode_rewards(group: Group) -> list[float]:
    """The mean reward of every episode with branches that did not fail."""
    branches = (
        [s.reward for s in episode if not s.failed and s.reward is not None]
        for episode in episodes.by_episode(group.samples)
    )
    return [nan_mean(rewards) for rewards in branches if rewards]


def _powers_of_2_below(limit: int) -> list[int]:
    return [1 << i for i in range((limit - 1).bit_length())]
