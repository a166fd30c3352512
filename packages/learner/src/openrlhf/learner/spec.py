"""`LearnerSpec`: everything one learner rank has to know about its model and its optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from openrlhf.core.config import NO_TRUNCATION, Truncation
from openrlhf.learner.config import DsConfig, ModelConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.constraints import (
    Conflict,
    balance_conflicts,
    ds_conflicts,
    optim_conflicts,
    sequence_conflicts,
)


class Role(StrEnum):
    """What a model is for. Policy and reference have a language-model head, the others a scalar one."""

    POLICY = "policy"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"

    @property
    def is_language_model(self) -> bool:
        return self in (Role.POLICY, Role.REFERENCE)


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """One model of one role, with every option resolved (`ds.param_dtype` and `ds.attn_implementation` are not auto).

    optim: None freezes the model (inference only).
    temperature, truncation: log-probs and entropy are those of logits / temperature, and of what truncation leaves.
    max_optimizer_steps: horizon of the learning-rate schedule.
    score_micro_batch_size, score_max_tokens: samples, or with dynamic batching tokens, per forward pass of `score`.
    aux_loss_coef: coefficient of the mixture-of-experts balance loss; 0 does not compute it.
    freeze_visual_encoder: train only the language model and its head.
    suppressed_token_ids: tokens that sampling never gives (those that stand for images); they have no probability here
    either.
    follow_alpha: share by which a frozen model moves towards another one each time (`following`); None: it never does.
    offload: keep a frozen model in host memory between calls.
    shares_device: engines or other roles have processes on the same device.

    Example: LearnerSpec(role=Role.POLICY, model_path="m", ds=DsConfig(param_dtype="fp32", attn_implementation="sdpa"),
    optim=OptimConfig())
    """

    role: Role
    model_path: str
    ds: DsConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig | None = None
    batch: TrainBatchConfig = field(default_factory=TrainBatchConfig)
    temperature: float = 1.0
    truncation: Truncation = NO_TRUNCATION
    max_optimizer_steps: int = 1
    score_micro_batch_size: int = 1
    score_max_tokens: int | None = None
    aux_loss_coef: float = 0.0
    freeze_visual_encoder: bool = False
    suppressed_token_ids: tuple[int, ...] = ()
    follow_alpha: float | None = None
    offload: bool = False
    shares_device: bool = False

    def __post_init__(self) -> None:
        for name, value in (("param_dtype", self.ds.param_dtype), ("attn_implementation", self.ds.attn_implementation)):
            if value == "auto":
                raise ValueError(f"LearnerSpec needs a resolved `ds.{name}`, got 'auto'")
        if self.temperature <= 0:
            raise ValueError(f"`temperature` must be > 0 to train, got {self.temperature!r}")
        if self.ds.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"`ds.zero_stage` must be 0, 1, 2 or 3, got {self.ds.zero_stage!r}")
        for conflict in self._conflicts():
            said = " and ".join(f"`{name}` {attrgetter(name)(self)!r}" for name in conflict.names)
            raise ValueError(f"{said}: {conflict.problem}. Fix: {conflict.fix}")
        if self.ds.ring_attn_size > 1 and self.truncation.active:
            raise ValueError(
                f"`ds.ring_attn_size` {self.ds.ring_attn_size!r}: the tokens that sampling keeps are found in whole "
                "rows. Fix: `ds.ring_attn_size` 1"
            )
        if self.optim is not None and self.max_optimizer_steps < 1:
            raise ValueError(f"max_optimizer_steps must be at least 1, got {self.max_optimizer_steps!r}")

    def _conflicts(self) -> Iterator[Conflict]:
        yield from ds_conflicts(self.ds, trained=self.trained)
        yield from sequence_conflicts(self.ds)
        if self.optim is not None:
            yield from optim_conflicts(self.optim, self.ds)
            yield from balance_conflicts(self.model, self.aux_loss_coef)

    @property
    def trained(self) -> bool:
        return self.optim is not None

    @property
    def packed(self) -> bool:
        """Whether the samples of a micro-batch share one row; else each has its own, padded to the longest."""
        return self.ds.packing_samples

    @property
    def tensor_parallel(self) -> bool:
        """Whether the hidden layers are cut over ranks."""
        return self.ds.tensor_parallel_size > 1

    @property
    def zero3(self) -> bool:
        """Whether parameters are partitioned. A frozen model needs DeepSpeed for nothing else."""
        return self.ds.zero_stage == 3
