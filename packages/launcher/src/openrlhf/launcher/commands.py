"""The six commands: name, defaults, and the flags of shared sections that a command does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import Flag, flags_of
from openrlhf.launcher.supervised_config import (
    LoraCombinerConfig,
    ServeRMConfig,
    TrainDPOConfig,
    TrainRMConfig,
    TrainSFTConfig,
)

C = TypeVar("C")


@dataclass(frozen=True)
class Command(Generic[C]):
    """A command line: `python -m openrlhf.cli.<name>`."""

    name: str
    defaults: C
    summary: str
    prefix: str = ""
    """What names of runs start with."""
    hidden: Callable[[str], bool] = lambda path: False

    @property
    def program(self) -> str:
        """How the command is started."""
        return f"python3 -m openrlhf.cli.{self.name}"

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """Its flags by name."""
        return flags_of(self.defaults, hidden=self.hidden)


_RL_ONLY = frozenset({"ds.enable_sleep"})
_NOT_SUPERVISED = _RL_ONLY | {"train.enable_ema", "train.ema_beta"}
_SERVED = frozenset(
    f"ds.{name}"
    for name in (
        "value_head_prefix",
        "load_in_4bit",
        "param_dtype",
        "attn_implementation",
        "experts_implementation",
        "packing_samples",
    )
)


def _hide(*names: str) -> Callable[[str], bool]:
    return _NOT_SUPERVISED.union(names).__contains__


def _only(names: frozenset[str]) -> Callable[[str], bool]:
    return lambda path: path.startswith("ds.") and path not in names


TRAIN_PPO_RAY = Command("train_ppo_ray", TrainPPOConfig(), "RL training on Ray, vLLM and DeepSpeed.", prefix="ppo_")
TRAIN_SFT = Command(
    "train_sft", TrainSFTConfig(), "Supervised fine-tuning.", prefix="sft_", hidden=_hide("ds.value_head_prefix")
)
TRAIN_RM = Command(
    "train_rm", TrainRMConfig(), "Reward-model training.", prefix="rm_", hidden=_hide("ds.use_liger_kernel")
)
TRAIN_DPO = Command(
    "train_dpo", TrainDPOConfig(), "Preference training.", prefix="exp_", hidden=_hide("ds.value_head_prefix")
)
SERVE_RM = Command("serve_rm", ServeRMConfig(), "Serve a reward model over HTTP.", hidden=_only(_SERVED))
LORA_COMBINER = Command(
    "lora_combiner",
    LoraCombinerConfig(),
    "Merge a LoRA adapter into its base model.",
    hidden=_only(frozenset({"ds.param_dtype"})),
)

COMMANDS: dict[str, Command] = {
    c.name: c for c in (TRAIN_PPO_RAY, TRAIN_SFT, TRAIN_RM, TRAIN_DPO, SERVE_RM, LORA_COMBINER)
}
