"""A reward per turn and a curriculum need fewer episodes, on tables as policies: the small cases of two benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.launcher.environments import sampler
from support.toy_turns import train_chains, train_turns


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_turns_that_are_credited_one_by_one_are_learned_sooner(seed: int) -> None:
    flags: dict[str, Any] = {"algo.advantage.estimator": "group_norm", "rollout.batch_size": 1}
    options: dict[str, Any] = {"vocabulary": 16, "seed": seed, "lr": 16.0, "limit": 1000}
    modes: dict[str, dict[str, Any]] = {mode: {"algo.turn_rewards": mode} for mode in ("off", "to_go")}
    found = {mode: train_turns(8, **options, **flags, **own) for mode, own in modes.items()}
    assert found["to_go"] < 0.8 * found["off"] < 800


def test_prompts_that_are_chosen_by_their_pass_rate_are_learned_sooner() -> None:
    def order(tasks: Any, config: Any, seed: int) -> Any:
        return sampler(tasks, seed, None, config)

    flags: dict[str, Any] = {"algo.advantage.estimator": "rloo", "rollout.batch_size": 8}
    options: dict[str, Any] = {"vocabulary": 8, "seed": 0, "lr": 32.0, "limit": 10_000}
    kinds: dict[str, dict[str, Any]] = {kind: {"data.curriculum": kind} for kind in ("uniform", "prioritised")}
    found = {kind: train_chains(order, **options, **flags, **own) for kind, own in kinds.items()}
    assert found["prioritised"] < found["uniform"] < 10_000
