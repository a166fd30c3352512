"""The six commands: name, defaults, and the flags of shared sections that a command does not have."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import Flag, flags_of, values_of
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

_RL = (TRAIN_PPO_RAY.name,)

REFUSED: dict[str, tuple[Collection[str], str]] = {
    "use_ms": (COMMANDS, "models and data come from local folders or the Hugging Face hub, not from ModelScope"),
    "data.disable_fast_tokenizer": (COMMANDS, "transformers 5 has one tokenizer for each model; leave the flag out"),
    "vllm.sync_with_ray": (_RL, "weights always travel by the engines' own transfer; leave the flag out"),
    "local_rank": (_RL, "the trainer starts its own ranks; start it with python3 -m, not with deepspeed or torchrun"),
}
"""Flags that nothing honours -> (commands, why): refused when they differ from their default, never ignored."""


def unsupported(command: Command, asked: object, resolved: object) -> list[str]:
    """One message per flag that the user set (`asked`), that still stands (`resolved`) and that nothing honours."""
    defaults, values, final = values_of(command.defaults), values_of(asked), values_of(resolved)
    refused = []
    for path, (commands, reason) in REFUSED.items():
        flag = command.flags.get(path)
        if flag is None or command.name not in commands or defaults[path] in (values[path], final[path]):
            continue
        setting = flag.option if values[path] is True else f"{flag.option} {flag.show(values[path])}"
        refused.append(f"{setting} is not supported: {reason}")
    return refused
