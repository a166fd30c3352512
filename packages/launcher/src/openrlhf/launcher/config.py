"""The command lines as trees of dataclasses: every field is a flag, the docstring under it is its help text.

Sections that other packages honour live in those packages' `config.py`; here they are composed, and only what the
launcher itself honours is defined. `cfg.actor.adam.lr` is `--actor.adam.lr`. Nothing here imports an ML library.
The supervised trainers and the tools are in `supervised_config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal

from openrlhf.agents.config import AgentConfig, RewardFunctionConfig
from openrlhf.core.config import AlgoConfig, PolicyLossConfig, RewardShapingConfig, ValueLossConfig
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.rewards.config import JudgeConfig
from openrlhf.learner.config import AdamConfig, DsConfig, ModelConfig, OptimConfig, TrainBatchConfig
from openrlhf.rollout.config import RolloutConfig, VllmConfig

AUTO_NAME = "auto"
"""Value of a run name that `resolve` has not yet replaced."""

ALL = "all"
"""Value of `--data.extra_keys` that means every field."""

AUTO_RANKS = 0
"""Value of a `num_gpus_per_node` that `resolve` has not yet replaced; spelled `auto` on the command line."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How many learner ranks a role gets."""

    num_nodes: int = 1
    """Nodes of this role."""
    num_gpus_per_node: int = field(default=AUTO_RANKS, metadata={"words": {"auto": AUTO_RANKS}})
    """GPUs (ranks) per node of this role. auto: 8, or all of a node with fewer; without a GPU 1 process."""

    @property
    def world_size(self) -> int:
        """Ranks of this role, once resolved."""
        return self.num_nodes * self.num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class ActorConfig(PolicyLossConfig, OptimConfig, ModelConfig, PlacementConfig):
    """The trained policy."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-6))
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass to save memory. Applies to the critic too."""
    freeze_visual_encoder: bool = False
    """Train only the language model of a vision-language model; the rest goes to the engines with the first push."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ValueLossConfig, OptimConfig, ModelConfig, PlacementConfig):
    """The critic; which estimators have one is said in `openrlhf.core.tables`."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    model_name_or_path: str | None = None
    """Model that the critic starts from. None: the reward model, else the actor's model."""
    gradient_checkpointing_enable: bool = False
    """Recompute the critic's activations in its backward pass. --actor.gradient_checkpointing_enable implies it."""
    freezing_steps: int = -1
    """Keep the actor frozen for the first N optimiser steps while the critic warms up; -1 or 0: never."""
    save_value_network: bool = False
    """Export the critic too, to --ckpt.output_dir + "_critic"."""


@dataclass(frozen=True, kw_only=True)
class RefConfig(PlacementConfig):
    """The frozen reference policy, or a teacher: it exists with `--algo.kl.init_coef` above 0 and for distillation."""

    model_name_or_path: str | None = None
    """Reference model or teacher, of any size, with the actor's tokenizer. None: the actor before training. With
    --ref.remote_url: the name that it is served under, where several are."""
    remote_url: str | None = None
    """URL of an OpenAI-compatible server that holds the teacher and returns prompt_logprobs, as vLLM's does (several:
    separated by commas). None: the model runs in the cluster."""
    api_key: str | None = None
    """Key that is sent to that server as a bearer token."""
    offload: bool = False
    """Keep the reference model in host memory between its forward passes."""
    sync_steps: int = 0
    """After every so many rollout batches the reference moves to the policy by --ref.sync_alpha; 0: never."""
    sync_alpha: float = 1.0
    """The reference becomes alpha times the policy plus (1 - alpha) times itself; 1 is a reset."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RewardShapingConfig, RewardFunctionConfig, PlacementConfig):
    """Where rewards come from, and how they are shaped."""

    model_name_or_path: str | None = None
    """Reward model that runs inside the cluster, with the actor's tokenizer; a critic without a model of its own starts
    from it. One model: their scales differ, so several are served and weighed as sources of --reward.remote_url."""
    remote_url: str | None = field(default=None, metadata={"joined": True})
    """URL of a reward server (several: separated by commas), path of a Python file with reward_func, or
    openai:http://host:8000/v1?model=NAME or judge, graders by a rubric (--judge.*). Several: math=math.py code=URL."""
    weights: tuple[str, ...] = ()
    """Weights of the named sources, such as math=1 judge=0.5. Without one it is 1; a source with 0 is only logged."""
    choose_by: str | None = None
    """Column of the prompts whose value names the sources of a row (several: separated by commas, or a list); an empty
    value means all. None: every row is scored by all."""
    offload: bool = False
    """Keep the reward model in host memory between its forward passes."""
    api_key: str | None = None
    """Key that is sent to the reward server as a bearer token."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainBatchConfig):
    """Batch sizes, length of the run and how the parts share GPUs and time."""

    num_episodes: int = 1
    """Passes over the prompt dataset."""
    max_steps: int | None = None
    """End the run after this many optimiser steps. None: after --train.num_episodes."""
    agent_func_path: str | None = None
    """Python file that exports AgentExecutor (or a subclass of AgentInstanceBase): multi-turn episodes. Several
    environments in one run: a .toml with a table for each, or a Python file with a dict ENVIRONMENTS."""
    colocate_actor_ref: bool = False
    """Put the policy and the reference model on the same GPUs."""
    colocate_critic_reward: bool = False
    """Put the critic and the reward model on the same GPUs."""
    colocate_all: bool = False
    """Put all models and, without --train.async_enable, the engines on the same GPUs."""
    async_enable: bool = False
    """Sample and train at the same time."""
    async_queue_size: int = 1
    """Rollout batches that may wait for the trainer."""
    max_staleness: int | None = None
    """Most weight versions that a trained token may be behind. None: --train.async_queue_size."""
    partial_rollout_enable: bool = False
    """Pause running requests for a weight push and continue them with the new weights."""
    partial_rollout_recompute_kv: bool = False
    """Discard the KV cache of paused requests, so that it is computed again with the new weights."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(CurriculumConfig):
    """Prompts."""

    prompt_dataset: str | None = None
    """Prompt datasets: files, folders or hub names, separated by commas."""
    prompt_probs: str | None = None
    """Mixing probabilities of the prompt datasets, separated by commas. None: all of each, one after the other."""
    prompt_split: str = "train"
    """Split of the prompt datasets."""
    input_key: str = "input"
    """Field with the prompt: a string or a list of chat messages."""
    label_key: str | None = None
    """Field with the ground truth, handed to rewards and agents. None: the label is ""."""
    extra_keys: tuple[str, ...] = ()
    """Further fields of a row that travel with its prompt to reward functions, agents and reward servers; all: all of
    them. datasource, where a row has no such field, is the name of the data set."""
    input_template: str | None = None
    """Template with one {} that takes the prompt. Not with --data.apply_chat_template."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    image_key: str = "images"
    """Field with the images of a prompt: paths, URLs, base64 text or an image column."""
    max_images_per_prompt: int = 0
    """Most images per prompt, with those that an agent adds; 0 is text only."""
    max_len: int = 2048
    """Most tokens of a sample, prompt and response together."""
    overlong_prompts: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a prompt that leaves no room for a response: cut its beginning, drop it, or stop."""
    dropped_text: Literal["warn", "error"] = "warn"
    """What happens when the chat template leaves out a text that a row's messages hold (the reasoning of earlier
    turns, say): warn once with the share of rows, or stop. A lost tool call always stops."""
    max_samples: int = 100_000_000
    """Most prompts, of each dataset and in all."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer; there is none any more."""
    dataloader_num_workers: int = 0
    """Processes that measure the prompts at the start; 0: none besides the trainer."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training."""

    steps: int = -1
    """Evaluate every N steps; -1: never."""
    dataset: str | None = None
    """Evaluation dataset."""
    split: str = "train"
    """Split of the evaluation dataset."""
    temperature: float = 0.6
    """Sampling temperature of the evaluation."""
    n_samples_per_prompt: int = 4
    """Samples per evaluation prompt: the k of pass@k."""
    at_start: bool = False
    """Evaluate the model before its first step too."""


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints and the exported model."""

    output_dir: str = "./ckpt"
    """Folder of the exported Hugging Face model. Of what is there, only an earlier export is replaced."""
    path: str = "./ckpt/checkpoints_ppo_ray"
    """Folder of the checkpoints, from which a run can be resumed."""
    save_steps: int = -1
    """Write a checkpoint every N steps; -1: never."""
    save_hf: bool = False
    """Export the Hugging Face model with each checkpoint too."""
    disable_ds: bool = False
    """Leave the resumable part of the checkpoints out."""
    max_num: int = 3
    """Most checkpoints kept. The best and the newest are always kept."""
    load_enable: bool = False
    """Resume from the newest checkpoint in --ckpt.path, if there is one."""


@dataclass(frozen=True, kw_only=True)
class CkptConfig(SaveConfig):
    """Checkpoints of RL training."""

    max_mem: float = inf
    """Most GiB that the kept checkpoints may take."""
    best_metric_key: str = ""
    """Evaluation metric that makes a checkpoint the best. "": the first that ends in _pass1; none: no best one."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    key: str | None = None
    """Log to Weights & Biases with this API key."""
    org: str | None = None
    """Entity (user or team)."""
    group: str | None = None
    """Group of runs."""
    project: str = "openrlhf_train_ppo"
    """Project."""
    run_name: str = AUTO_NAME
    """Name of the run, also of its TensorBoard folder. auto: the trainer's prefix and the time, like ppo_0131T09:30; a
    resumed run keeps its name."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where metrics go."""

    logging_steps: int = 1
    """Log every N steps."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard logs."""
    path: str | None = None
    """A logger of your own beside the others: file.py:Class or module:Class."""
    mlflow: str | None = None
    """Log to MLflow, to this experiment; where is told by MLFLOW_TRACKING_URI. Needs the extra mlflow."""
    trackio: str | None = None
    """Log to Trackio, to this project. Needs the extra trackio."""
    swanlab: str | None = None
    """Log to SwanLab, to this project; SWANLAB_API_KEY and SWANLAB_MODE are read by it. Needs the extra swanlab."""
    comet: str | None = None
    """Log to Comet, to this project; COMET_API_KEY is read by it. Needs the extra comet."""
    prometheus_port: int | None = None
    """Serve the newest metrics to Prometheus at this port, under /metrics; 0: at one that is free, which is logged."""
    prometheus_host: str = "127.0.0.1"
    """Address at which they are served. Whoever reaches it can read them."""
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True, kw_only=True)
class RunLoggerConfig(LoggerConfig):
    """Where metrics of RL training go, and its record."""

    record_dir: str = "auto"
    """Folder in which every trained sample is recorded (`openrlhf.launcher.record.reader` reads it), in a folder of the
    run's name. auto: `record` beside the run's TensorBoard logs, else in --ckpt.path; none: nothing is recorded."""
    record_max_gib: float = 1.0
    """Most GiB of recorded samples of a run; beyond that the oldest steps go. The newest step always stays."""
    peak_tflops: float | None = None
    """What one device of the learner can do, TFLOP/s: perf/mfu is the share that training used. None: known for common
    GPUs in bf16; elsewhere perf/mfu is left out."""
    otlp_endpoint: str | None = None
    """Send spans (steps, groups, turns, engine requests, rewards) by OTLP over HTTP to this URL, such as
    http://localhost:4318/v1/traces. Needs the extra otel."""
    health: Literal["off", "warn", "stop"] = "warn"
    """What happens when a run looks sick (no variance in the rewards, a gradient of 0, ...): warn tells what is wrong,
    by which numbers, and which flag to turn, once per alarm; stop also saves a checkpoint and ends the run with exit
    status 87."""


@dataclass(frozen=True, kw_only=True)
class TrainPPOConfig:
    """`python -m openrlhf.cli.train_ppo_ray`."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    logger: RunLoggerConfig = field(default_factory=RunLoggerConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    ds: DsConfig = field(default_factory=DsConfig)
    local_rank: int = -1
    """Set by launchers of the torchrun kind; the Ray trainer places its ranks itself."""
    use_ms: bool = False
    """Load models and data from ModelScope. Not supported."""

    @property
    def trains(self) -> bool:
        """Whether there is a policy to train, and prompts for it."""
        return True

    @property
    def evaluates(self) -> bool:
        """Whether the evaluation dataset is used."""
        return self.eval.dataset is not None and (self.eval.at_start or self.eval.steps > 0)

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a critic."""
        return self.algo.advantage.row.critic

    @property
    def has_reference(self) -> bool:
        """Whether there are a reference's log-probs."""
        return self.algo.kl.init_coef > 0 or self.has_teacher

    @property
    def shares_prompt(self) -> bool:
        """Whether samples may share their beginnings in training: not in rows that are cut over ranks."""
        return self.train.share_prompt != "off" and self.ds.ring_attn_size == 1

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the policy without its adapters: no other model is loaded for it."""
        own = (self.ref.model_name_or_path or self.actor.model_name_or_path) == self.actor.model_name_or_path
        return self.has_reference and self.ds.lora.rank > 0 and self.ref.remote_url is None and own

    @property
    def has_teacher(self) -> bool:
        """Whether the reference is a teacher, whose distributions are learned."""
        return self.algo.advantage.row.teacher or self.algo.distill.divergence is not None

    @property
    def rewards_optional(self) -> bool:
        """Whether the run learns from a teacher alone; rewards are measured where something gives them."""
        return self.algo.advantage.row.teacher and self.algo.distill.reward_coef == 0

    @property
    def agents_score(self) -> bool:
        """Whether rewards come from agents alone; of several environments (a .toml) some may leave them to the run."""
        path = self.train.agent_func_path
        return path is not None and not path.endswith(".toml")

    @property
    def has_reward_model(self) -> bool:
        """Whether rewards come from a model inside the cluster."""
        return self.reward.model_name_or_path is not None and self.reward.remote_url is None and not self.agents_score


class EvaluationConfig(TrainPPOConfig):
    """`openrlhf-launch eval`: the flags of a training run, of which only sampling and rewards are used."""

    @property
    def trains(self) -> bool:
        return False

    @property
    def evaluates(self) -> bool:
        return self.eval.dataset is not None

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def has_reference(self) -> bool:
        return False

    @property
    def has_teacher(self) -> bool:
        return False

    @property
    def rewards_optional(self) -> bool:
        return False

    @classmethod
    def of(cls, config: TrainPPOConfig) -> EvaluationConfig:
        """The evaluation that the flags of a training run describe."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})
