"""All rules of a command, applied."""

from __future__ import annotations

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.violation import Violation
from openrlhf.launcher.supervised_config import SupervisedConfig


def check_rules(config: TrainPPOConfig, machine: Machine) -> list[Violation]:
    """Everything that is wrong with a resolved RL configuration."""
    return []


def check_supervised_rules(config: SupervisedConfig, machine: Machine) -> list[Violation]:
    """Everything that is wrong with a resolved configuration of a supervised trainer."""
    return []


def warnings_of(config: TrainPPOConfig, machine: Machine) -> list[str]:
    """What is allowed and probably not meant."""
    return []
