"""Rules of the supervised trainers."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.algorithm import muon_limits
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at
from openrlhf.launcher.supervised_config import SupervisedConfig, TrainDPOConfig, TrainSFTConfig

Found = Iterator[Violation]


def required(c: SupervisedConfig, m: Machine) -> Found:
    """Flags without which no run starts."""
    for name in ("model.model_name_or_path", "data.dataset"):
        if value_at(c, name) is None:
            yield broken(c, name, "nothing to train" if "model" in name else "nothing to train on", f"add --{name}")


def multiturn(c: SupervisedConfig, m: Machine) -> Found:
    """Turns are found by the chat template."""
    if isinstance(c, TrainSFTConfig) and c.data.multiturn and not c.data.apply_chat_template:
        problem = "the turns are found by the chat template"
        yield broken(c, "data.multiturn data.apply_chat_template", problem, "add --data.apply_chat_template")


def chat_template(c: SupervisedConfig, m: Machine) -> Found:
    """A chat template that is not applied."""
    text, applied = value_at(c, "data.tokenizer_chat_template"), value_at(c, "data.apply_chat_template")
    if text is not None and not applied:
        problem = "the template is not applied"
        names = "data.tokenizer_chat_template data.apply_chat_template"
        yield broken(c, names, problem, "add --data.apply_chat_template")


def ipo_smoothing(c: SupervisedConfig, m: Machine) -> Found:
    """IPO has no smoothing."""
    if isinstance(c, TrainDPOConfig) and c.model.ipo_enable and c.model.label_smoothing:
        problem = "the IPO loss has no label smoothing"
        yield broken(c, "model.ipo_enable model.label_smoothing", problem, "leave one of them out")


def four_bit(c: SupervisedConfig, m: Machine) -> Found:
    """4-bit weights compute in bf16."""
    if c.ds.load_in_4bit and c.ds.param_dtype != "bf16":
        problem = "4-bit weights compute in bf16"
        yield broken(c, "ds.load_in_4bit ds.param_dtype", problem, "--ds.param_dtype bf16")


def muon(c: SupervisedConfig, m: Machine) -> Found:
    """What DeepSpeed's Muon does not do."""
    yield from muon_limits(c, "")


RULES: tuple[Rule, ...] = (required, multiturn, chat_template, ipo_smoothing, four_bit, muon)
