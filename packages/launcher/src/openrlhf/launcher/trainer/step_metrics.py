"""Metrics of a step that the trainer computes from what it holds: ages, rates, use of the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import peak_tflops
from openrlhf.launcher.plan.shape import ModelShape, read_shape
from openrlhf.launcher.samples import Group


def over_epochs(epochs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of all epochs over one rollout batch: their means, and how many steps were skipped in all."""
    keys = {key for metrics in epochs for key in metrics}
    values = {key: [metrics[key] for metrics in epochs if key in metrics] for key in keys}
    return {key: sum(v) if key.endswith("skipped_steps") else sum(v) / len(v) for key, v in values.items()}


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many weight versions the oldest token of each sample is behind `version`: mean and maximum."""
    ages = [version - s.min_version for g in groups for s in g.samples if not s.failed and s.min_version >= 0]
    if not ages:
        return {}
    return {"rollout/staleness_mean": sum(ages) / len(ages), "rollout/staleness_max": float(max(ages))}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates of a run. overlaps: whether sampling goes on beside training. flops: what the learner's devices together
    could do per second; None: not known."""

    epochs: int
    overlaps: bool
    shape: ModelShape | None = None
    flops: float | None = None

    @staticmethod
    def of(config: TrainPPOConfig) -> Throughput:
        """Of a resolved configuration. perf/mfu needs the peak of the devices and the shape of the model."""
        peak, shape = config.logger.peak_tflops or peak_tflops(), None
        if peak is not None:
            try:
                shape = read_shape(config.actor.model_name_or_path or "")
            except (ValueError, OSError):
                peak = None
        return Throughput(
            epochs=config.train.max_epochs,
            overlaps=config.train.async_enable,
            shape=shape,
            flops=None if peak is None else peak * 1e12 * config.actor.world_size,
        )

    def metrics(self, groups: Sequence[Group], seconds: Mapping[str, float]) -> dict[str, float]:
        """Tokens per second of the step and of its parts, and the share of it for which the trainer had no samples.

        seconds: `timing/...` of the step. Tokens of failed samples do not count.
        """
        alive = [s for group in groups for s in group.samples if not s.failed]
        sampled, tokens = sum(s.num_trainable for s in alive), sum(s.total_length for s in alive)
        sampling = "timing/step_total" if self.overlaps else "timing/generation"
        rates = {
            "perf/tokens_per_second": (tokens, "timing/step_total"),
            "perf/generation_tokens_per_second": (sampled, sampling),
            "perf/experience_tokens_per_second": (tokens, "timing/make_experience"),
            "perf/training_tokens_per_second": (tokens * self.epochs, "timing/ppo_train"),
        }
        found = {name: count / seconds[part] for name, (count, part) in rates.items() if seconds.get(part, 0.0) > 0}
        if seconds.get("timing/step_total", 0.0) > 0:
            found["perf/waiting_for_samples"] = seconds["timing/generation"] / seconds["timing/step_total"]
        if self.shape is not None and self.flops and seconds.get("timing/ppo_train", 0.0) > 0:
            work = sum(training_flops(self.shape, s.total_length) for s in alive) * self.epochs
            found["perf/mfu"] = work / (seconds["timing/ppo_train"] * self.flops)
        return found


def training_flops(shape: ModelShape, length: int) -> float:
    """Floating-point operations of forward and backward pass over one sample, as PaLM counts them (Chowdhery et al.,
    2022, appendix B), with causal attention: 6 per parameter of a matrix and token, 6 L q T per token for attention.

    Of experts those count that a token visits. What gradient checkpointing computes again does not.
    """
    matrices = shape.layer_matrices
    if shape.experts:
        every = 3 * shape.experts * shape.hidden * shape.intermediate
        matrices += every * shape.active_experts // shape.experts - every
    parameters = shape.layers * matrices + shape.vocab * shape.hidden
    return 6.0 * length * (parameters + shape.layers * shape.query_size * length)
