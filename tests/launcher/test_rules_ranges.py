"""Every bound of every table: the value beyond it is refused by name, the value at it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import COMMANDS, LORA_COMBINER, Command
from openrlhf.launcher.flags import build, values_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.rules.ranges import (
    AT_LEAST,
    AT_MOST,
    BETAS,
    ENDLESS,
    LARGEST,
    LESS_THAN,
    MAY_BE_EMPTY,
    MORE_THAN,
    RISING,
    ranges,
    within,
)

GPUS = Machine(gpus=8)
TINY = 1e-9
NAMES = sorted({name for command in COMMANDS.values() for name in command.flags})


def command_of(name: str) -> Command:
    return next(command for command in COMMANDS.values() if name in command.flags)


def refused(name: str, value: Any) -> list[str]:
    """The flags named by the ranges that this one value breaks."""
    found = ranges(build(command_of(name).defaults, {name: value}), GPUS)
    return [flag for violation in found for flag, _ in violation.flags if flag == name]


def step_of(name: str) -> float:
    return 1 if command_of(name).flags[name].shape.base is int else TINY


def as_value(name: str, number: float) -> Any:
    """One number; of two values the one that the bound is nearer to, beside 0.5."""
    shape = command_of(name).flags[name].shape
    value = shape.base(number)
    return value if shape.count == 1 else tuple(sorted((0.5, value)))


@pytest.mark.parametrize(("name", "bound"), AT_LEAST.items())
def test_at_least(name: str, bound: float) -> None:
    assert refused(name, as_value(name, bound - step_of(name))) == [name]
    assert refused(name, as_value(name, bound)) == ([name] if MORE_THAN.get(name) == bound else [])


@pytest.mark.parametrize(("name", "bound"), AT_MOST.items())
def test_at_most(name: str, bound: float) -> None:
    assert refused(name, as_value(name, bound + step_of(name))) == [name]
    assert refused(name, as_value(name, bound)) == []


@pytest.mark.parametrize(("name", "bound"), MORE_THAN.items())
def test_more_than(name: str, bound: float) -> None:
    assert refused(name, as_value(name, bound)) == [name]
    assert refused(name, bound + step_of(name)) == []


@pytest.mark.parametrize(("name", "bound"), LESS_THAN.items())
def test_less_than(name: str, bound: float) -> None:
    assert refused(name, bound) == [name]
    assert refused(name, bound - TINY) == []


@pytest.mark.parametrize("name", RISING)
def test_pairs_are_ordered(name: str) -> None:
    assert refused(name, (1.0, 0.5)) == [name]
    assert refused(name, (0.5, 0.5)) == [name]
    assert refused(name, (0.5, 1.0)) == []


@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)])
def test_decay_rates(name: str, betas: tuple[float, float]) -> None:
    assert refused(name, betas) == [name]
    assert refused(name, (0.0, 0.999)) == []


def test_lists_of_texts_have_no_empty_places() -> None:
    assert refused("ds.lora.target_modules", ("q_proj", "")) == ["ds.lora.target_modules"]


def test_commands_without_rules_between_flags_have_ranges() -> None:
    with pytest.raises(UsageError, match="--lora_path '': it is empty"):
        prepare(LORA_COMBINER, ["--model_path", "a", "--lora_path", "", "--output_path", "c"], GPUS)


def holds(name: str, base: type) -> bool:
    """Whether the flag takes numbers or one free text of this type."""
    shape = command_of(name).flags[name].shape
    return shape.base is base and not shape.choices and (base is not str or shape.count == 1)


@pytest.mark.parametrize("name", [n for n in NAMES if holds(n, float)])
def test_no_number_is_infinite_unless_that_means_no_bound(name: str) -> None:
    count = command_of(name).flags[name].shape.count
    endless = math.inf if count == 1 else (0.0, math.inf)
    assert (refused(name, endless) == []) is (name in ENDLESS)


@pytest.mark.parametrize("name", [n for n in NAMES if holds(n, int)])
def test_no_number_is_larger_than_computers_count(name: str) -> None:
    assert refused(name, 10**30) == [name]
    sane = within(build(command_of(name).defaults, {name: 10**30}))
    assert values_of(sane)[name] <= LARGEST


@pytest.mark.parametrize("name", [n for n in NAMES if holds(n, str)])
def test_no_text_is_empty(name: str) -> None:
    assert refused(name, "") == refused(name, " ") == ([] if name in MAY_BE_EMPTY else [name])
