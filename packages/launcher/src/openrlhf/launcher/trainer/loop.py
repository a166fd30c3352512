"""The trainer: take a rollout batch from the pipeline, shape, learn, push, one batch after the other.

Written against `Rollout` and `Learner`; it holds scalars and handles only, so the whole loop also runs with fakes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from openrlhf.agents.spans import span
from openrlhf.agents.types import PromptItem
from openrlhf.core.kl import KLController
from openrlhf.core.rewards import RunningRewardNorm
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.health.observation import observe
from openrlhf.launcher.health.watch import health_watch
from openrlhf.launcher.logging.values import sum_metrics
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.samples import Group
from openrlhf.launcher.saved import RUN
from openrlhf.launcher.signals import StoppedAfterSave, StoppedByAlarm
from openrlhf.launcher.trainer.asynchronous import AsyncPipeline
from openrlhf.launcher.trainer.checkpoints import Checkpoints
from openrlhf.launcher.trainer.evaluation import evaluate, evaluation_metrics
from openrlhf.launcher.trainer.model_rewards import add_rewards, reward_stream
from openrlhf.launcher.trainer.pipeline import Pipeline, SyncPipeline, late_failures
from openrlhf.launcher.trainer.plan import cut_mini_batches, epoch_order, epoch_seed
from openrlhf.launcher.trainer.protocols import Learner, MetricSink, Prepared, PromptSource, Rollout
from openrlhf.launcher.trainer.shaping import ShapedBatch, shape_groups
from openrlhf.launcher.trainer.step_metrics import Throughput, over_epochs, staleness
from openrlhf.launcher.trainer.untrained import Collected, Untrained

log = logging.getLogger(__name__)

LOGGED_SAMPLES = 2
"""Samples of the first group that are logged as text."""


@dataclass
class TrainerState:
    """What a checkpoint holds of the trainer itself. step counts rollout batches."""

    step: int = 0
    optimizer_steps: int = 0
    version: int = 0
    episode: int = 0


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """How a run ended."""

    steps: int
    optimizer_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What the trainer drives."""

    rollout: Rollout
    learner: Learner
    prompts: PromptSource
    sink: MetricSink
    eval_prompts: list[PromptItem] = field(default_factory=list)
    config_toml: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    start_metrics: dict[str, float] = field(default_factory=dict)
    """Logged with the first step of this run."""
    record: RunRecord | None = None
    pipeline: Pipeline | None = None
    """Where batches come from; None: they are sampled, as the configuration says."""
    clock: Callable[[], float] = time.perf_counter


class NoOptimizerStepError(RuntimeError):
    """The run ended without having trained on anything."""


class Trainer:
    """Runs all episodes."""

    def __init__(self, config: TrainPPOConfig, parts: TrainerParts) -> None:
        self.config = config
        self.parts = parts
        self.record = parts.record
        self.state = TrainerState()
        self.kl = KLController(config.algo.kl)
        self.norm = RunningRewardNorm() if config.reward.normalize_enable else None
        self.pipeline = parts.pipeline or self._sampling()
        self.metrics: dict[str, float] = {}
        self._start_metrics = parts.start_metrics
        self.evaluation: dict[str, float] = {}
        self.evaluated_at = -1
        self.checkpoints = Checkpoints(
            config.ckpt, parts.rollout, parts.learner, config_toml=parts.config_toml, sources=parts.sources
        )
        self._throughput = Throughput.of(config)
        self._health = health_watch(config)
        self._alarms: list[str] = []
        self._stop = False
        self._evaluation: asyncio.Task[None] | None = None

    def _sampling(self) -> Pipeline:
        config, parts = self.config, self.parts
        kind = AsyncPipeline if config.train.async_enable else SyncPipeline
        return kind(config, parts.rollout, parts.prompts, reward_stream(config, parts.learner))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer itself, as JSON values."""
        return self._recorded() | {
            "health": None if self._health is None else self._health.state_dict(),
            "prompts": self.parts.prompts.state_dict(),
            RUN: self.parts.sink.run_id,
        }

    def _recorded(self) -> dict[str, Any]:
        """What a record holds of the trainer's state before a step."""
        self.state.episode = self.pipeline.episode
        return {
            "state": asdict(self.state),
            "kl": self.kl.state_dict(),
            "reward_norm": None if self.norm is None else self.norm.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], untrained: Untrained) -> None:
        """The inverse of `state_dict`. untrained: samples of then. Raises ValueError when the run is another one."""
        self.parts.prompts.load_state_dict(state["prompts"])
        self.state = TrainerState(**state["state"])
        self.pipeline.resume(self.state.episode, self.state.step, untrained)
        self.kl.load_state_dict(state["kl"])
        if self._health is not None and state.get("health") is not None:
            self._health.load_state_dict(state["health"], anew=self.config.logger.health == "stop")
        if self.norm is not None:
            if state["reward_norm"] is None:
                raise ValueError("the checkpoint was written without --reward.normalize_enable: leave the flag out")
            self.norm.load_state_dict(state["reward_norm"])

    def stop_after_step(self) -> None:
        """Save and end the run after the step that is under way: a job scheduler's warning."""
        self._stop = True

    async def run(self) -> RunSummary:
        """Train until the prompts of all episodes are used or --train.max_steps is reached, then export.

        Raises NoOptimizerStepError when nothing was trained on, StoppedAfterSave after `stop_after_step`.
        """
        await self.parts.learner.export(self.config.ckpt.output_dir, trial=True)
        if not await self._resume():
            await self._start_reward_norm()
            self.pipeline.start()
        if self.config.ckpt.load_enable:
            self.parts.sink.resume(self.state.step)
            if self.record is not None:
                self.record.resume(self.state.step)
        await self.parts.learner.push_weights(self.state.version)
        self.pipeline.limit(self._last_batch())
        try:
            if self.config.eval.at_start and self.state.step == 0:
                await self._start_evaluation()
            await self._steps()
            await self._finish()
        finally:
            if self._evaluation is not None:
                self._evaluation.cancel()
            await self.pipeline.close()
            self.parts.prompts.close()
        return RunSummary(
            steps=self.state.step,
            optimizer_steps=self.state.optimizer_steps,
            metrics=self.metrics,
            evaluation=self.evaluation,
        )

    async def _resume(self) -> bool:
        """Go on from a checkpoint, if there is one and it is asked for."""
        await self.checkpoints.check_shared()
        checkpoint = self.checkpoints.newest()
        if checkpoint is None:
            return False
        self.load_state_dict(*await self.checkpoints.read(checkpoint))
        await self.parts.learner.load(str(checkpoint))
        log.info("resumed from %s", checkpoint)
        return True

    async def _save(self, metric: float | None) -> None:
        state, untrained = self.state_dict(), self.pipeline.untrained()
        await self.checkpoints.save(self.state.step, state, untrained, metric=metric)

    def _metric(self) -> float | None:
        """The metric by which checkpoints are judged, where this step was evaluated."""
        return self.checkpoints.metric_of(self.evaluation) if self.evaluated_at == self.state.step else None

    async def _start_reward_norm(self) -> None:
        """Start the running normalisation from the mean and std in the reward model's configuration, if it has them."""
        if self.norm is None or not self.config.has_reward_model:
            return
        stored = await self.parts.learner.reward_statistics()
        if stored is not None:
            self.norm = RunningRewardNorm.from_stored(*stored)

    async def _finish(self) -> None:
        await self._evaluated()
        if self.state.optimizer_steps == 0:
            raise NoOptimizerStepError(
                "the run made no optimiser step: every sample failed or was filtered out "
                f"({self.pipeline.describe()}); look at the scores, --algo.dynamic_filtering_range "
                f"{self.config.algo.dynamic_filtering_range!r} and the reward function"
            )
        if self._evaluates() and self.evaluated_at != self.state.step:
            await self._evaluate()
        await self.parts.learner.export(self.config.ckpt.output_dir)

    async def _steps(self) -> None:
        while not self._finished():
            with span("step", step=self.state.step + 1):
                phases: dict[str, float] = {}
                with self._timed(phases, "generation"):
                    collected = await self.pipeline.next()
                if collected is None:
                    return
                await self._train_on(collected, phases)
            if self._evaluates() and self.state.step % self.config.eval.steps == 0:
                await self._start_evaluation()
            sick = self._alarms and self.config.logger.health == "stop"
            if self._stop or sick:
                await self._evaluated()
                await self._save(self._metric())
                resumable = not self.config.ckpt.disable_ds
                if sick:
                    raise StoppedByAlarm(self.state.step, self._alarms, resumable=resumable)
                raise StoppedAfterSave(self.state.step, resumable=resumable)
            if self.checkpoints.enabled and self.checkpoints.due(self.state.step, metric := self._metric()):
                await self._save(metric)

    async def _train_on(self, collected: Collected, phases: dict[str, float]) -> None:
        began = self.parts.clock() - phases["timing/generation"]
        number = self.state.step + 1
        before = self._recorded()
        with self._timed(phases, "make_experience"):
            groups = await self._rewarded(collected.groups)
            failed = self.pipeline.fail(late_failures(collected.groups, groups))
            shaped = self._shape(groups)
            mini_batches = cut_mini_batches(
                shaped.samples,
                batch_size=self.config.train.batch_size,
                seed=self.config.train.seed,
                step=self.state.step,
            )
            metrics = sum_metrics(shaped.metrics, collected.metrics, failed)
            metrics |= staleness(collected.groups, self.state.version)
            if self.record is not None:
                sampling = sum_metrics(collected.metrics, failed)
                self.record.batch(number, groups, shaped.samples, before=before, sampling=sampling)
            prepared = None
            if mini_batches:
                prepared = await self.parts.learner.prepare(mini_batches, kl_coef=self.kl.value, step=number)
                metrics |= prepared.metrics
        self.state.step = number
        if prepared is not None:
            with self._timed(phases, "ppo_train"):
                metrics |= await self._learn(prepared, len(mini_batches))
            self.state.version += 1
            await self._evaluated()
            with self._timed(phases, "broadcast"):
                async with self.pipeline.pushing():
                    metrics |= await self.parts.learner.push_weights(self.state.version)
            if "train/kl" in metrics:
                self.kl.update(metrics["train/kl"], len(shaped.samples))
        else:
            log.warning("step %d: nothing to train on, every sample failed or its group was dropped", self.state.step)
        if self.config.ref.sync_steps and self.state.step % self.config.ref.sync_steps == 0:
            with self._timed(phases, "reference_sync"):
                await self.parts.learner.sync_reference()
        self.pipeline.trained(self._last_batch())
        metrics |= phases | {
            "timing/step_total": self.parts.clock() - began,
            "train/kl_coef": self.kl.value,
            "train/optimizer_steps": float(self.state.optimizer_steps),
        }
        metrics |= self._throughput.metrics(groups, metrics) | await self.parts.rollout.worker_metrics()
        metrics |= self.pipeline.queue()
        self._examine(groups, metrics)
        self.metrics = metrics
        self._log_step(metrics | self._start_metrics)
        self._start_metrics = {}
        if self.state.step % self.config.logger.logging_steps == 0:
            samples = await self.parts.rollout.read_samples(collected.groups[0], LOGGED_SAMPLES)
            self.parts.sink.log_samples(self.state.step, samples)

    def _examine(self, groups: list[Group], metrics: dict[str, float]) -> None:
        """Tell which alarms come and go with this step."""
        if self._health is None:
            return
        for news in self._health.see(observe(self.state.step, groups, metrics)):
            log.warning("%s", news)
            if news.state == "raised":
                self._alarms.append(news.name)
            if self.record is not None:
                self.record.alarm(news.row())
        metrics["health/alarms"] = float(len(self._health.active))

    def _log_step(self, metrics: dict[str, float]) -> None:
        self.parts.sink.log_step(self.state.step, metrics)
        if self.record is not None:
            self.record.metrics(self.state.step, metrics)

    def _shape(self, groups: list[Group]) -> ShapedBatch:
        config = self.config
        return shape_groups(
            groups,
            estimator=config.algo.advantage.estimator,
            shaping=config.reward,
            max_response_len=config.rollout.max_new_tokens or config.data.max_len,
            norm=self.norm,
            turn_rewards=config.algo.turn_rewards,
            turn_gamma=config.algo.turn_gamma,
        )

    async def _rewarded(self, groups: list[Group]) -> list[Group]:
        """Rewards of an in-cluster model for samples that were not scored while others were sampled."""
        return await add_rewards(self.parts.learner, groups) if self.config.has_reward_model else groups

    async def _learn(self, prepared: Prepared, num_mini_batches: int) -> dict[str, float]:
        """All epochs over a batch, at most up to --train.max_steps."""
        train, metrics = self.config.train, []
        for epoch in range(train.max_epochs):
            number: dict[str, int] = {"seed": train.seed, "step": self.state.step, "epoch": epoch}
            order, members = epoch_order(num_mini_batches, **number), epoch_seed(num_mini_batches, **number)
            if train.max_steps is not None:
                order = order[: max(train.max_steps - self.state.optimizer_steps, 0)]
            if not order:
                break
            first = self.state.optimizer_steps
            freeze = [first + i < self.config.critic.freezing_steps for i in range(len(order))]
            options = {"kl_coef": self.kl.value, "freeze_actor": freeze, "members": members}
            metrics.append(await self.parts.learner.update(prepared, order, **options))
            self.state.optimizer_steps += len(order)
        return over_epochs(metrics)

    async def _start_evaluation(self) -> None:
        """Evaluate the present weights: in the asynchronous pipeline beside the next step, up to its weight push.

        A checkpoint that is to know the metric waits for it; sampling goes on meanwhile.
        """
        self._evaluation = asyncio.create_task(self._evaluate(), name=f"evaluation {self.state.step}")
        await asyncio.sleep(0)  # so that it notes the step
        awaited = self.checkpoints.enabled and self.config.ckpt.best_metric_key != "none"
        if awaited or not self.config.train.async_enable:
            await self._evaluated()

    async def _evaluated(self) -> None:
        """Until the evaluation under way, if there is one, is over."""
        task, self._evaluation = self._evaluation, None
        if task is not None:
            await task

    async def _evaluate(self) -> None:
        step = self.state.step
        began = self.parts.clock()
        groups = await evaluate(self.config, self.pipeline, self.parts.learner, self.parts.eval_prompts)
        metrics = evaluation_metrics(groups, self.config.eval.n_samples_per_prompt)
        metrics["timing/evaluation"] = self.parts.clock() - began
        self.evaluation, self.evaluated_at = metrics, step
        self.parts.sink.log_evaluation(step, metrics)
        if self.record is not None:
            self.record.evaluation(step, metrics)

    def _evaluates(self) -> bool:
        return bool(self.parts.eval_prompts) and self.config.eval.steps > 0

    def _last_batch(self) -> int | None:
        """Number of the rollout batch with which --train.max_steps is reached, if no sample fails until then."""
        train, rollout = self.config.train, self.config.rollout
        if train.max_steps is None:
            return None
        mini_batches = -(-rollout.batch_size * rollout.n_samples_per_prompt // train.batch_size)
        left = max(train.max_steps - self.state.optimizer_steps, 0)
        return self.state.step - 1 - (-left // (mini_batches * train.max_epochs))

    def _finished(self) -> bool:
        limit = self.config.train.max_steps
        return limit is not None and self.state.optimizer_steps >= limit

    @contextmanager
    def _timed(self, phases: dict[str, float], name: str) -> Iterator[None]:
        began = self.parts.clock()
        try:
            with span(name):
                yield
        finally:
            phases[f"timing/{name}"] = self.parts.clock() - began
