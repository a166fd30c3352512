"""Rules of adapters and 4-bit weights, the same for RL and for the supervised trainers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.violation import Rule, Violation, broken
from openrlhf.launcher.supervised_config import SupervisedConfig
from openrlhf.learner.config import LoraConfig

C = TrainPPOConfig | SupervisedConfig
Found = Iterator[Violation]


def adapters(c: C, m: Machine) -> Found:
    """Options of adapters that are off, or that make none."""
    lora, default = c.ds.lora, LoraConfig()
    if lora.rank == 0:
        for name in ("alpha", "dropout", "target_modules", "rslora", "dora", "save_merged"):
            if getattr(lora, name) != getattr(default, name):
                problem = "there are no adapters"
                yield broken(c, f"ds.lora.{name} ds.lora.rank", problem, "--ds.lora.rank 16")
    if lora.rank > 0 and not lora.target_modules:
        yield broken(c, "ds.lora.target_modules", "it names no module", "--ds.lora.target_modules all-linear")
    if not 0 <= lora.dropout < 1:
        yield broken(c, "ds.lora.dropout", "it must lie in [0, 1)", "--ds.lora.dropout 0.05")
    if lora.alpha < 1:
        yield broken(c, "ds.lora.alpha", "it must be at least 1", "--ds.lora.alpha 16")


def installed(c: C, m: Machine) -> Found:
    """The package that makes adapters."""
    if c.ds.lora.rank > 0 and find_spec("peft") is None:
        fix = "pip install 'openrlhf-learner[lora]'"
        yield broken(c, "ds.lora.rank", "adapters need the package peft, which is not installed", fix)


def four_bit(c: C, m: Machine) -> Found:
    """What 4-bit weights need."""
    if not c.ds.load_in_4bit:
        return
    if not m.gpus:
        yield broken(c, "ds.load_in_4bit", "it needs a GPU, and there is none", "leave --ds.load_in_4bit out")
    elif c.ds.param_dtype != "bf16":
        problem = "4-bit weights compute in bf16"
        yield broken(c, "ds.load_in_4bit ds.param_dtype", problem, "--ds.param_dtype bf16")


def compiled(c: TrainPPOConfig, m: Machine) -> Found:
    """A model that is compiled as a whole."""
    if c.base_is_reference and c.ds.deepcompile:
        problem = "the reference is the policy with its adapters off, and a compiled one keeps them on"
        yield broken(c, "ds.deepcompile ds.lora.rank", problem, "leave --ds.deepcompile out")


RULES: tuple[Rule, ...] = (adapters, installed, four_bit)
