"""`openrlhf-launch plan [options] -- <flags of train_ppo_ray>`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from openrlhf.launcher.command_line import USAGE_EXIT, WARNING, finish, usage_message
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine, detect_machine
from openrlhf.launcher.parsing import UsageError, parse, wants_help
from openrlhf.launcher.placement import JUDGE, model_flag, roles
from openrlhf.launcher.plan.arithmetic import count_prompts, room
from openrlhf.launcher.plan.memory import GIB, Budget
from openrlhf.launcher.plan.report import as_json, as_text, make_plan
from openrlhf.launcher.plan.shape import ModelShape, read_shape
from openrlhf.launcher.rules.violation import value_at
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

GPU_GIB = 80
CPU_KV_GIB = "4"
"""vLLM's own default for VLLM_CPU_KVCACHE_SPACE."""


def main(argv: Sequence[str]) -> int:
    """Print the plan of a training command; starts nothing. Returns the exit status."""
    own, flags = split_at_dashes(argv)
    if wants_help(flags):
        own = ["--help"]
    options = _parser().parse_args(own)
    here = detect_machine()
    there = here if options.gpus is None else Machine(gpus=options.gpus)
    machine = replace(there, nodes=options.nodes)
    try:
        config, said = finish(TRAIN_PPO_RAY, parse(TRAIN_PPO_RAY, flags).config, machine)
        shapes = model_shapes(config)
    except UsageError as error:
        sys.stderr.write(usage_message(TRAIN_PPO_RAY, error) + "\n")
        return USAGE_EXIT
    prompts = options.prompts if options.prompts is not None else count_prompts(config)
    budget = budget_of(machine, options.gpu_memory, os.environ)
    notes = [line for line in said if not line.startswith(WARNING)]
    warnings = [line.removeprefix(WARNING) for line in said if line.startswith(WARNING)]
    plan = make_plan(
        config, shapes, budget, room=room(config, machine), prompts=prompts, notes=notes, warnings=warnings
    )
    sys.stdout.write((as_json(plan) if options.json else as_text(plan)) + "\n")
    return 0


def model_shapes(config: TrainPPOConfig) -> dict[str, ModelShape]:
    """The model of each role; UsageError names the flag whose model has no local `config.json`."""
    shapes: dict[str, ModelShape] = {}
    for role in roles(config):
        try:
            shapes[role] = read_shape(value_at(config, model_flag(config, role)) or "")
        except ValueError as error:
            raise UsageError([f"--{model_flag(config, role)} {error}"]) from None
    if config.judge.engines:
        try:
            shapes[JUDGE] = read_shape(config.judge.model_name_or_path or "")
        except ValueError as error:
            raise UsageError([f"--judge.model_name_or_path {error}"]) from None
    return shapes


def budget_of(machine: Machine, gpu_gib: float, environ: Mapping[str, str]) -> Budget:
    """What one device offers."""
    if machine.gpus:
        return Budget(device_bytes=int(gpu_gib * GIB))
    return Budget(device_bytes=None, kv_bytes=int(float(environ.get("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)) * GIB))


def _parser() -> argparse.ArgumentParser:
    parser = SubcommandParser(
        "plan",
        "What a training command would do: placement, batches, memory. Starts nothing, loads no weights.",
        "%(prog)s [options] -- <flags of train_ppo_ray>",
    )
    parser.add_argument("--gpus", type=int, help="GPUs of each node (default: those of this machine)")
    parser.add_argument(
        "--nodes", type=int, help="nodes that there are: more are refused (default: --*.num_nodes of the roles)"
    )
    parser.add_argument(
        "--gpu-memory", type=float, default=GPU_GIB, metavar="GIB", help="memory of a GPU (default: 80)"
    )
    parser.add_argument(
        "--prompts", type=int, help="size of the prompt dataset (default: counted in local JSONL files)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
