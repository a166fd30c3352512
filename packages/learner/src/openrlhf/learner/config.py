"""The learner's sections of the command line: models, optimisers, DeepSpeed and batch sizes.

Plain dataclasses; the docstring under a field is its help text. Nothing here imports an ML library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
)
"""Learning-rate schedules: those that need nothing but the number of steps. reduce_lr_on_plateau and its like need a
metric."""

ZERO_BACKEND = "openrlhf.learner.zero.engine:build_engine"


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """AdamW, and the auxiliary group of Muon."""

    lr: float = 1e-6
    """Learning rate of AdamW (under Muon: of embeddings, head, biases and norms)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay. Biases and norms are exempt under adam, not under muon."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon, for the matrices of the hidden layers."""

    lr: float = 0.02
    """Learning rate of the matrices that Muon updates."""
    momentum: float = 0.95
    """Muon momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations. The backend does 5; any other value is an error."""
    nesterov: bool = True
    """Nesterov momentum. The backend always uses it; switching it off is an error."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimiser, schedule and clipping of one trained model."""

    optim: Literal["adam", "muon"] = "adam"
    """Optimiser: adam (AdamW) or muon."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    lr_scheduler: str = "cosine_with_min_lr"
    """Schedule, by its Hugging Face name (linear, cosine, constant, constant_with_warmup, ...)."""
    lr_warmup_ratio: float = 0.03
    """Share of the optimiser steps spent warming up, rounded up; the last step is always beyond the warm-up."""
    min_lr_ratio: float = 0.1
    """Final share of the learning rate. Used by cosine_with_min_lr and cosine_warmup_with_min_lr only."""
    max_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down; 0 disables. Under muon it acts on the raw gradient."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A trained model."""

    model_name_or_path: str | None = None
    """Hugging Face model: a local folder or a hub name."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass to save memory."""
    gradient_checkpointing_reentrant: bool = False
    """Use the reentrant variant of gradient checkpointing. Not with a balance loss (aux_loss_coef), which it does not
    train."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: int = 0
    """Adapter rank; 0 trains the full weights."""
    alpha: int = 16
    """Adapter scale: what an adapter adds is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter: ends of their names, or all-linear (every linear layer but the head)."""
    dropout: float = 0.0
    """Adapter dropout, in training only."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA), so that a higher rank learns no slower."""
    dora: bool = False
    """Train the length of every row beside its direction (DoRA). Not with --ds.zero_stage 3."""
    save_merged: bool = False
    """Export the whole model with the adapters merged into it, instead of the adapter alone."""


@dataclass(frozen=True, kw_only=True)
class DsConfig:
    """DeepSpeed and how models are loaded."""

    zero_stage: int = 2
    """ZeRO stage, 0 to 3."""
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Parameter dtype. auto: bf16 on GPUs, fp32 on a CPU."""
    attn_implementation: str = "auto"
    """Hugging Face attention backend. auto: flash_attention_2 on GPUs; sdpa on a CPU, in fp32, and where flash-attn is
    not installed."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = None
    """Hugging Face kernel for mixture-of-experts layers; none leaves the choice to transformers."""
    use_liger_kernel: bool = False
    """Liger's fused kernels (GPU only)."""
    adam_offload: bool = False
    """Keep the optimiser state in host memory."""
    zpg: int = 1
    """ZeRO++ hierarchical partition size."""
    deepcompile: bool = False
    """DeepSpeed's DeepCompile for the trained models."""
    overlap_comm: bool = False
    """Overlap gradient reduction with the backward pass."""
    grad_accum_dtype: str | None = None
    """Dtype in which DeepSpeed accumulates gradients; none keeps DeepSpeed's own."""
    enable_sleep: bool = False
    """Move optimiser states, fp32 weights and gradients to host memory between training phases."""
    tensor_parallel_size: int = 1
    """Tensor parallel degree (DeepSpeed AutoTP)."""
    packing_samples: bool = False
    """Concatenate samples instead of padding them."""
    load_in_4bit: bool = False
    """Load the weights in 4 bit."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    ring_attn_size: int = 1
    """Sequence parallelism: so many neighbouring ranks work on the same samples, each on a part of their tokens. Needs
    --ds.packing_samples."""
    ring_attn_head_stride: int = 1
    """Key heads per rank that the ranks of a sequence group exchange at a time. More are fewer messages and more
    memory."""
    value_head_prefix: str = "score"
    """Attribute name of the scalar head of critics and reward models. A name stored in the model's config wins."""
    use_universal_ckpt: bool = False
    """Load the checkpoint as a DeepSpeed universal checkpoint, which fits any number of ranks."""
    backend: str = ZERO_BACKEND
    """Function that makes the training engines, as module:function. Another backend than DeepSpeed is chosen here; it
    is given the other --ds.* options."""

    @property
    def ranks_per_sample(self) -> int:
        """How many neighbouring ranks are given the same samples."""
        return self.tensor_parallel_size * self.ring_attn_size


@dataclass(frozen=True, kw_only=True)
class TrainBatchConfig:
    """How many samples a step takes, in what portions, and what guards it."""

    max_epochs: int = 1
    """Passes over each rollout batch (supervised: over the dataset)."""
    micro_batch_size: int = 1
    """Samples per rank and forward pass. Not used with --train.dynamic_batch_enable."""
    batch_size: int = 128
    """Samples per optimiser step, over all ranks."""
    dynamic_batch_enable: bool = False
    """Fill forward passes by token count instead of sample count; implies --ds.packing_samples, except
    where prompts have images: their rows are padded."""
    max_tokens_per_gpu: int = 16192
    """Token budget per device of a forward pass with --train.dynamic_batch_enable. The devices of a tensor-parallel
    or sequence group (--ds.tensor_parallel_size, --ds.ring_attn_size) work on one forward pass, with the budget of all
    of them."""
    share_prompt: Literal["auto", "on", "off"] = "auto"
    """Compute what samples of a micro-batch have in common at their beginning (the prompt of a group, the first turns)
    once, in training and for log-probs and values. The loss and its gradient stay what they are but for rounding. auto:
    where the model allows it (no recurrent layers, no images) and a fifth of the tokens is saved."""
    seed: int = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Use deterministic kernels, in the engines too: the same command twice gives the same numbers, bit for bit."""
    enable_ema: bool = False
    """Keep an exponential moving average of the weights, exported beside the live ones."""
    ema_beta: float = 0.992
    """Decay of the moving average per optimiser step."""
    max_skipped_steps: int = 10
    """The run ends after this many optimiser steps in a row that were skipped because of a non-finite loss or
    gradient."""
