"""The command lines of supervised and preference training, of the reward server and of the LoRA merger.

As in `config.py`, every field is a flag and its docstring the help text. One learner, one set of sections: a trainer
that does not use a flag of a shared section hides it (`commands.py`), so that it is refused and not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openrlhf.core.config import DistillConfig
from openrlhf.launcher.config import LoggerConfig, SaveConfig, WandbConfig
from openrlhf.learner.config import AdamConfig, DsConfig, ModelConfig, OptimConfig, TrainBatchConfig


@dataclass(frozen=True, kw_only=True)
class SupervisedModelConfig(ModelConfig):
    """The trained model."""

    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models. 0: off."""


@dataclass(frozen=True, kw_only=True)
class SftModelConfig(SupervisedModelConfig):
    """The model of supervised fine-tuning."""

    pretrain_mode_enable: bool = False
    """Train on every token of the text instead of the response only; the input template is not applied."""


@dataclass(frozen=True, kw_only=True)
class RmModelConfig(SupervisedModelConfig):
    """The model of reward-model training."""

    compute_fp32_loss_enable: bool = False
    """Compute the loss in fp32."""
    margin_loss_enable: bool = False
    """Demand a margin between the two rewards: the field `margin` of each sample."""
    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """sigmoid: -log sigmoid(chosen - rejected) (Bradley-Terry). logexp: log(1 + exp(rejected - chosen))."""


@dataclass(frozen=True, kw_only=True)
class DpoModelConfig(SupervisedModelConfig):
    """The model and the loss of direct preference optimisation."""

    beta: float = 0.1
    """Strength of the pull towards the reference model."""
    ipo_enable: bool = False
    """Use the IPO loss."""
    label_smoothing: float = 0.0
    """Assumed share of swapped preferences (cDPO). Not with --model.ipo_enable."""
    nll_loss_coef: float = 0.0
    """Weight of an added language-modelling loss on the chosen response. 0: off."""


@dataclass(frozen=True, kw_only=True)
class SftRefConfig:
    """The teacher of supervised distillation."""

    model_name_or_path: str | None = None
    """Teacher, of any size, with the model's tokenizer: --distill.divergence says what is learned of it."""
    offload: bool = False
    """Keep the teacher in host memory between its forward passes."""


@dataclass(frozen=True, kw_only=True)
class SftDistillConfig(DistillConfig):
    """A teacher of supervised fine-tuning: `--distill.*`."""

    nll_coef: float = 0.0
    """Weight of the data's own tokens (their negative log-likelihood) beside a teacher."""


@dataclass(frozen=True, kw_only=True)
class DpoRefConfig:
    """The reference model of direct preference optimisation."""

    model_name_or_path: str | None = None
    """Reference model. None: --model.model_name_or_path."""
    offload: bool = False
    """Keep the reference model in host memory between its forward passes."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Training data."""

    dataset: str | None = None
    """Training datasets: files, folders or hub names, separated by commas."""
    dataset_probs: str | None = None
    """Mixing probabilities of the datasets, separated by commas. None: all of each, one after the other."""
    dataset_split: str = "train"
    """Split of the datasets."""
    max_samples: int = 1_000_000
    """Most samples, of each dataset and in all."""
    max_len: int = 2048
    """Most tokens of a sample."""
    input_template: str | None = None
    """Template with one {} that takes the prompt. Not used with --data.apply_chat_template."""
    apply_chat_template: bool = False
    """Render samples with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Chat template that replaces the tokenizer's: the template itself, or the path of a file with it."""
    dropped_text: Literal["warn", "error"] = "warn"
    """What happens when the chat template leaves out a text that a row's messages hold (the reasoning of earlier
    turns, say): warn once with the share of rows, or stop. A lost tool call always stops."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer; there is none any more."""
    dataloader_num_workers: int = 0
    """Processes that read the data."""
    cache_dir: str | None = None
    """Folder for tokenised data, which is made once per machine and used again by every run with the same rows,
    tokenizer and options. None: openrlhf/tokens in $XDG_CACHE_HOME or ~/.cache."""
    cache_gib: float = 50.0
    """GiB that this folder may take: what was used longest ago is removed, unless a run uses it."""


@dataclass(frozen=True, kw_only=True)
class SftDataConfig(DatasetConfig):
    """Data of supervised fine-tuning."""

    input_key: str = "input"
    """Field with the prompt: a string or a list of chat messages."""
    output_key: str | None = None
    """Field with the response. None: the prompt field holds the whole conversation."""
    input_template: str | None = "User: {}\nAssistant: "
    """Template with one {} that takes the prompt. Not used with --data.apply_chat_template."""
    multiturn: bool = False
    """Train on every assistant turn of a conversation. Needs --data.apply_chat_template."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(DatasetConfig):
    """Pairs of a preferred and a rejected response."""

    prompt_key: str | None = None
    """Field with the prompt, if it is not part of the two responses."""
    chosen_key: str = "chosen"
    """Field with the preferred response."""
    rejected_key: str = "rejected"
    """Field with the rejected response."""
    max_len: int = 512
    """Most tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainConfig(TrainBatchConfig):
    """Batch sizes and length of the run."""

    micro_batch_size: int = 8
    """Samples per rank and forward pass."""


@dataclass(frozen=True, kw_only=True)
class SupervisedEvalConfig:
    """Evaluation during training."""

    steps: int = -1
    """Evaluate every N steps; -1: after every epoch."""
    dataset: str | None = None
    """Evaluation dataset."""
    split: str = "train"
    """Split of the evaluation dataset."""


@dataclass(frozen=True, kw_only=True)
class SupervisedCkptConfig(SaveConfig):
    """Checkpoints of supervised training."""

    path: str = "./ckpt/checkpoints_sft"
    """Folder of the checkpoints, from which a run can be resumed."""
    max_mem: int = 100_000_000
    """Most GiB that the kept checkpoints may take."""


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimConfig):
    """What the three supervised trainers share."""

    train: SupervisedTrainConfig = field(default_factory=SupervisedTrainConfig)
    eval: SupervisedEvalConfig = field(default_factory=SupervisedEvalConfig)
    ckpt: SupervisedCkptConfig = field(default_factory=SupervisedCkptConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    ds: DsConfig = field(default_factory=DsConfig)
    local_rank: int = -1
    """Set by launchers of the torchrun kind; -1: read the environment variable LOCAL_RANK."""
    use_ms: bool = False
    """Load models and data from ModelScope. Not supported."""


def _logger(project: str) -> LoggerConfig:
    return LoggerConfig(wandb=WandbConfig(project=project))


@dataclass(frozen=True, kw_only=True)
class TrainSFTConfig(SupervisedConfig):
    """`python -m openrlhf.cli.train_sft`."""

    model: SftModelConfig = field(default_factory=SftModelConfig)
    ref: SftRefConfig = field(default_factory=SftRefConfig)
    distill: SftDistillConfig = field(default_factory=SftDistillConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=5e-6))
    train: SupervisedTrainConfig = field(default_factory=lambda: SupervisedTrainConfig(max_epochs=2))
    logger: LoggerConfig = field(default_factory=lambda: _logger("openrlhf_train_sft"))


@dataclass(frozen=True, kw_only=True)
class TrainRMConfig(SupervisedConfig):
    """`python -m openrlhf.cli.train_rm`."""

    model: RmModelConfig = field(default_factory=RmModelConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    train: SupervisedTrainConfig = field(default_factory=lambda: SupervisedTrainConfig(micro_batch_size=1))
    ckpt: SupervisedCkptConfig = field(default_factory=lambda: SupervisedCkptConfig(path="./ckpt/checkpoints_rm"))
    logger: LoggerConfig = field(default_factory=lambda: _logger("openrlhf_train_rm"))


@dataclass(frozen=True, kw_only=True)
class TrainDPOConfig(SupervisedConfig):
    """`python -m openrlhf.cli.train_dpo`."""

    model: DpoModelConfig = field(default_factory=DpoModelConfig)
    ref: DpoRefConfig = field(default_factory=DpoRefConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    eval: SupervisedEvalConfig = field(default_factory=lambda: SupervisedEvalConfig(split="test"))
    ckpt: SupervisedCkptConfig = field(default_factory=lambda: SupervisedCkptConfig(path="./ckpt/checkpoints_dpo"))
    logger: LoggerConfig = field(default_factory=lambda: _logger("openrlhf_train_dpo"))


SupervisedRun = TrainSFTConfig | TrainRMConfig | TrainDPOConfig


@dataclass(frozen=True, kw_only=True)
class ServedRewardConfig:
    """The served reward model."""

    model_name_or_path: str | None = None
    """Reward model."""
    normalize_enable: bool = False
    """Normalise rewards with the mean and std stored in the model's config; refused for a model without them."""


@dataclass(frozen=True, kw_only=True)
class ServedDataConfig:
    """Texts that are scored."""

    max_len: int = 2048
    """Most tokens of a scored text."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer; there is none any more."""


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig:
    """`python -m openrlhf.cli.serve_rm`."""

    reward: ServedRewardConfig = field(default_factory=ServedRewardConfig)
    data: ServedDataConfig = field(default_factory=ServedDataConfig)
    ds: DsConfig = field(default_factory=DsConfig)
    port: int = 5000
    """Port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on. Another one than loopback needs --api_key or --insecure."""
    api_key: str | None = None
    """Key that clients must send as a bearer token."""
    insecure: bool = False
    """Listen on other addresses than loopback without a key."""
    batch_size: int | None = None
    """Texts per forward pass. None: the whole request."""
    use_ms: bool = False
    """Load models from ModelScope. Not supported."""


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    """`python -m openrlhf.cli.lora_combiner`."""

    model_path: str = field(default="", metadata={"required": True})
    """Base model."""
    lora_path: str = field(default="", metadata={"required": True})
    """Adapter."""
    output_path: str = field(default="", metadata={"required": True})
    """Folder of the merged model."""
    is_rm: bool = False
    """The base model is a reward model."""
    ds: DsConfig = field(default_factory=lambda: DsConfig(param_dtype="bf16"))
