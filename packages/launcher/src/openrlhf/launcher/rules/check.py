"""All rules of a command, applied."""

from __future__ import annotations

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules import adapters, algorithm, inputs, lora_push, pipeline, placement, rewards, supervised
from openrlhf.launcher.rules.ranges import ranges, within
from openrlhf.launcher.rules.violation import Rule, Violation
from openrlhf.launcher.rules.warnings import WARNINGS
from openrlhf.launcher.supervised_config import ServeRMConfig, SupervisedConfig

RL_RULES: tuple[Rule, ...] = (
    *inputs.RULES,
    *rewards.RULES,
    *algorithm.RULES,
    *adapters.RULES,
    adapters.compiled,
    *lora_push.RULES,
    *pipeline.RULES,
    *placement.RULES,
)

SUPERVISED_RULES: tuple[Rule, ...] = (
    *supervised.RULES,
    *adapters.RULES,
    inputs.template,
    inputs.probabilities,
    inputs.entries,
    pipeline.attention_name,
    pipeline.flash_attention,
    pipeline.packing_attention,
    pipeline.accumulation_dtype,
    pipeline.liger_needs_gpu,
    pipeline.tensor_parallel,
    pipeline.sequence_parallel,
    pipeline.fp16_needs_gpu,
    pipeline.backend,
)

SERVE_RULES: tuple[Rule, ...] = (
    pipeline.attention_name,
    pipeline.flash_attention,
    pipeline.packing_attention,
    pipeline.fp16_needs_gpu,
)


def check_rules(config: TrainPPOConfig, machine: Machine) -> list[Violation]:
    """Everything that is wrong with a resolved RL configuration."""
    return _check(config, machine, RL_RULES)


def check_supervised_rules(config: SupervisedConfig, machine: Machine) -> list[Violation]:
    """Everything that is wrong with a resolved configuration of a supervised trainer."""
    return _check(config, machine, SUPERVISED_RULES)


def check_serve_rules(config: ServeRMConfig, machine: Machine) -> list[Violation]:
    """Everything that is wrong with a resolved configuration of the reward server."""
    return _check(config, machine, SERVE_RULES)


def check_ranges(config: object, machine: Machine) -> list[Violation]:
    """Everything that is wrong with single values, for commands without rules between flags."""
    return list(ranges(config, machine))


def warnings_of(config: TrainPPOConfig, machine: Machine) -> list[str]:
    """What is allowed and probably not meant; all of it speaks of training."""
    if not config.trains:
        return []
    return [text for warning in WARNINGS for text in warning(config, machine)]


def _check(config: object, machine: Machine, rules: tuple[Rule, ...]) -> list[Violation]:
    sane = within(config)
    return [*ranges(config, machine), *(v for rule in rules for v in rule(sane, machine))]
