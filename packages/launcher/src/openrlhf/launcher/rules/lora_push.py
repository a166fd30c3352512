"""Rules of the way of trained adapters to the engines: what can be known before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.resolve import adapter_problem, adapter_targets
from openrlhf.launcher.rules.violation import Rule, Violation, broken
from openrlhf.rollout.vllm.adapters import NOT_LINEAR

P = TrainPPOConfig
Found = Iterator[Violation]


def served(c: P, m: Machine) -> Found:
    """Engines that are to serve an adapter can."""
    if c.vllm.lora_push != "adapter":
        return
    if c.ds.lora.rank == 0:
        yield broken(c, "vllm.lora_push ds.lora.rank", "there are no adapters", "--ds.lora.rank 16")
        return
    problem = adapter_problem(c)
    if problem:
        names = "vllm.lora_push ds.lora.rank ds.lora.target_modules"
        yield broken(c, names, problem, "--vllm.lora_push merged")


def tied(c: P, m: Machine) -> Found:
    """An adapter on one of two modules that share a matrix, which an engine would give to both."""
    if c.ds.lora.rank == 0:
        return
    on_shared = [name for name in adapter_targets(c) if name.rpartition(".")[2] in NOT_LINEAR]
    file = Path(c.actor.model_name_or_path or "").expanduser() / "config.json"
    if on_shared and file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("tie_word_embeddings"):
        problem = (
            f"embedding and head of the model are one matrix, and an engine would give both what {on_shared[0]} gets"
        )
        yield broken(c, "ds.lora.target_modules", problem, f"leave {on_shared[0]} out")


RULES: tuple[Rule, ...] = (served, tied)
