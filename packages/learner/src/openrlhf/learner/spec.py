"""`LearnerSpec`: everything one learner rank has to know about its model and its optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from openrlhf.learner.config import DsConfig, ModelConfig, OptimConfig, TrainBatchConfig


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
    temperature: log-probs and entropy are those of logits / temperature.
    max_optimizer_steps: horizon of the learning-rate schedule.
    score_micro_batch_size, score_max_tokens: samples, or with dynamic batching tokens, per forward pass of `score`.
    aux_loss_coef: coefficient of the mixture-of-experts balance loss; 0 does not compute it.
    freeze_visual_encoder: train only the language model and its head.
    suppressed_token_ids: tokens that sampling never gives (those that stand for images); they have no probability here
    either.
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
    max_optimizer_steps: int = 1
    score_micro_batch_size: int = 1
    score_max_tokens: int | None = None
    aux_loss_coef: float = 0.0
    freeze_visual_encoder: bool = False
    suppressed_token_ids: tuple[int, ...] = ()
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
        if self.ds.load_in_4bit and self.trained and self.ds.lora.rank == 0:
            raise ValueError("`ds.load_in_4bit`: 4-bit weights cannot be trained, add `ds.lora.rank` 16")
        if self.ds.load_in_4bit and self.zero3:
            raise ValueError("`ds.load_in_4bit`: `ds.zero_stage` 3 cannot partition 4-bit weights, use 2")
        if self.ds.ring_attn_size > 1:
            raise ValueError(f"`ds.ring_attn_size` {self.ds.ring_attn_size!r} is not supported: leave it at 1")
        if self.ds.param_dtype == "fp16" and self.ds.zero_stage == 0:
            raise ValueError("`ds.param_dtype` 'fp16' needs loss scaling, which `ds.zero_stage` 0 lacks: use 1, 2 or 3")
        self._check_accumulation()
        if self.tensor_parallel:
            self._check_tensor_parallel()
        reentrant = self.model.gradient_checkpointing_enable and self.model.gradient_checkpointing_reentrant
        if self.trained and reentrant and self.aux_loss_coef > 0:
            raise ValueError(
                f"`model.gradient_checkpointing_reentrant` with `aux_loss_coef` {self.aux_loss_coef!r}: the reentrant "
                "form keeps no gradient of the routers' logits, so the balance loss would be shown and not trained; "
                "leave `model.gradient_checkpointing_reentrant` out"
            )
        if self.optim is not None and self.max_optimizer_steps < 1:
            raise ValueError(f"max_optimizer_steps must be at least 1, got {self.max_optimizer_steps!r}")

    def _check_accumulation(self) -> None:
        """DeepSpeed has an optimiser of its own for this, which takes steps with gradients that are not finite."""
        ds = self.ds
        wide = ds.param_dtype == "bf16" and ds.grad_accum_dtype == "fp32"
        if self.trained and wide and ds.zero_stage == 1 and not ds.adam_offload:
            raise ValueError(
                "`ds.grad_accum_dtype` 'fp32' with `ds.param_dtype` 'bf16' does not work with `ds.zero_stage` 1: use 2"
            )

    def _check_tensor_parallel(self) -> None:
        flag = f"`ds.tensor_parallel_size` {self.ds.tensor_parallel_size!r}"
        if self.zero3:
            raise ValueError(f"{flag} does not work with `ds.zero_stage` 3, which cuts all parameters: leave one out")
        if self.optim is not None and self.optim.optim == "muon":
            raise ValueError(f"{flag} does not work with `optim.optim` muon, which needs whole matrices: use adam")
        if self.ds.lora.rank > 0 or self.ds.load_in_4bit:
            raise ValueError(f"{flag} does not work with `ds.lora.rank` or `ds.load_in_4bit`: leave one of them out")

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
