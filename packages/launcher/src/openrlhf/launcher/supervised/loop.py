"""The loop of supervised and preference training, the same for all three and on every rank."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf.core.batch import Batch
from openrlhf.launcher.data.sampler import order
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.signals import StoppedAfterSave, Warned
from openrlhf.launcher.supervised.batches import Batches
from openrlhf.launcher.supervised.checkpoints import Progress, SupervisedCheckpoints
from openrlhf.launcher.supervised.task import Task
from openrlhf.launcher.supervised_config import SupervisedRun
from openrlhf.learner.learner import Learner, Metrics
from openrlhf.learner.spec import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of. evaluation: None where nothing is evaluated. reference: or a teacher."""

    task: Task
    tokenizer: Any
    learner: Learner
    reference: Learner | None
    train: Batches
    evaluation: Batches | None
    checkpoints: SupervisedCheckpoints
    logger: RunLogger


class SupervisedTrainer:
    """Trains for `--train.max_epochs`, evaluates, saves and exports. Collective over the ranks.

    warned: of this rank; one warned rank is enough.
    """

    def __init__(self, config: SupervisedRun, parts: Parts, warned: Warned) -> None:
        self.config = config
        self.parts = parts
        self.warned = warned
        self.progress = Progress()
        self.evaluation: dict[str, float] = {}
        self._evaluated_at = -1

    def run(self) -> Progress:
        """The whole run, from the newest checkpoint if that is asked for. Returns where it ended.

        Raises:
            StoppedAfterSave: it was warned.
        """
        self.parts.learner.try_export(self.config.ckpt.output_dir, self.parts.tokenizer)
        self.parts.checkpoints.check_shared()
        self.progress = self.parts.checkpoints.restore()
        if self.config.ckpt.load_enable:
            self.parts.logger.resume(self.progress.step)
        while self.progress.epoch < self.config.train.max_epochs:
            self._epoch()
        if self.parts.task.role is Role.REWARD and self._evaluated_at != self.progress.step:
            self._evaluate()  # the exported statistics are those of the exported weights
        self.parts.learner.export_hf(self.config.ckpt.output_dir, self.parts.tokenizer)
        return self.progress

    def _epoch(self) -> None:
        size, progress = len(self.parts.train.dataset), self.progress
        places = order(size, seed=self.config.train.seed, episode=progress.epoch).astype(np.int32)  # every rank has it
        began = time.perf_counter()
        for units, batch in self.parts.train.run(places, start=progress.position):
            metrics = self._step(batch)
            position = self.progress.position + len(units)
            ended = position >= size
            self.progress = Progress(
                step=self.progress.step + 1,
                epoch=self.progress.epoch + ended,
                position=0 if ended else position,
            )
            self._log(units, metrics, time.perf_counter() - began)
            self._after_step(ended=ended)
            began = time.perf_counter()

    def _step(self, batch: Batch) -> Metrics:
        lesson, reference = self.parts.task.lesson, self.parts.reference
        if lesson is not None and reference is not None:
            batch = batch.with_(teacher=reference.tell(batch, lesson))
        return self.parts.learner.update(self._with_reference(batch), self.parts.task.objective)

    def _with_reference(self, batch: Batch) -> Batch:
        reference = self.parts.reference
        if reference is None or self.parts.task.lesson is not None:
            return batch
        return batch.with_(ref_logprobs=reference.score(batch).logprobs)

    def _after_step(self, *, ended: bool) -> None:
        every = self.config.eval.steps
        if self.parts.evaluation is not None and (ended if every == -1 else self.progress.step % every == 0):
            self._evaluate()
        stop = self.parts.learner.collective.on_any_rank(self.warned.came)
        if stop or self.parts.checkpoints.due(self.progress.step):
            evaluated = self._evaluated_at == self.progress.step
            self.parts.checkpoints.save(self.progress, quality(self.evaluation) if evaluated else None)
        if stop:
            raise StoppedAfterSave(self.progress.step, resumable=not self.config.ckpt.disable_ds)

    def _evaluate(self) -> None:
        """Means over the whole evaluation data; a reward model takes note of its rewards' mean and std."""
        batches, learner, objective = self.parts.evaluation, self.parts.learner, self.parts.task.objective
        assert batches is not None, "a reward model always has evaluation data"
        sums: dict[str, tuple[float, float]] = {}
        for _, batch in batches.run(range(len(batches.dataset))):
            for name, (total, count) in learner.evaluate(self._with_reference(batch), objective).items():
                old = sums.get(name, (0.0, 0.0))
                sums[name] = (old[0] + total, old[1] + count)
        if self.parts.task.role is Role.REWARD:
            learner.set_reward_statistics(*mean_and_std(sums["reward"], sums["reward_square"]))
        self.evaluation = means(sums)
        self._evaluated_at = self.progress.step
        named = {f"eval/{name}": value for name, value in self.evaluation.items()}
        self.parts.logger.log_evaluation(self.progress.step, named)

    def _log(self, units: list[int], metrics: Metrics, seconds: float) -> None:
        tokens = int(self.parts.train.dataset.lengths[units].sum())
        values = {f"train/{name}": value for name, value in means(metrics).items()}
        values |= {"timing/step_total": seconds, "timing/tokens_per_second": tokens / seconds}
        values["train/epoch"] = self.progress.epoch + self.progress.position / len(self.parts.train.dataset)
        self.parts.logger.log_step(self.progress.step, values)


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """(sum, count) -> mean. Rewards' squares become their std, pairs of rewards also their margin."""
    values = {name: total / count for name, (total, count) in sums.items() if count > 0}
    if "reward_square" in values:
        values["reward_std"] = mean_and_std(sums["reward"], sums["reward_square"])[1]
        del values["reward_square"]
    if "chosen_reward" in values:
        values["margin"] = values["chosen_reward"] - values["reject_reward"]
    return values


def mean_and_std(sums: tuple[float, float], squares: tuple[float, float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation (at least 1e-8) from sums of values and of squares."""
    total, count = sums
    mean = total / count
    variance = (squares[0] - count * mean * mean) / max(count - 1, 1)
    return mean, max(math.sqrt(max(variance, 0.0)), 1e-8)


def quality(evaluation: Mapping[str, float]) -> float:
    """What makes a checkpoint the best: the accuracy on pairs, else a low loss."""
    return evaluation["acc"] if "acc" in evaluation else -evaluation["gpt_loss"]
