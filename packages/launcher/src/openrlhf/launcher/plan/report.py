"""The plan of a run as data, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import called
from openrlhf.launcher.plan.arithmetic import Batches, Placed, Room, Sync, batches, forwards, placement, weight_sync
from openrlhf.launcher.plan.memory import (
    GIB,
    PHASES,
    PROGRAM_BYTES,
    Budget,
    Component,
    kv_cache_tokens,
    memory,
    totals,
)
from openrlhf.launcher.plan.shape import ModelShape
from openrlhf.learner.spec import Role


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `plan` says. Bytes are per GPU (without GPUs: per process)."""

    parameters: dict[str, int]
    placement: list[Placed]
    gpus: Room | None
    batches: Batches
    forwards: list[str]
    weight_sync: Sync
    kv_cache_tokens: int
    memory: list[Component]
    totals: dict[str, dict[str, int]]
    device_bytes: int | None
    notes: list[str]
    warnings: list[str]


def make_plan(
    c: TrainPPOConfig,
    shapes: dict[str, ModelShape],
    budget: Budget,
    *,
    room: Room | None,
    prompts: int | None,
    notes: list[str],
    warnings: list[str],
) -> Plan:
    """The plan of a resolved configuration."""
    components = memory(c, shapes, budget)
    sums, tokens = totals(components), kv_cache_tokens(c, shapes[Role.POLICY], budget)
    found = [*warnings, *_no_room(room), *_guesses(shapes), *_too_large(sums, budget), *_small_cache(c, tokens)]
    if c.algo.dynamic_filtering_enable:
        found.append("dynamic filtering: steps and LR horizon are upper bounds, rejected prompts are replaced")
    return Plan(
        parameters={called(role): shape.parameters for role, shape in shapes.items()},
        placement=placement(c),
        gpus=room,
        batches=batches(c, prompts),
        forwards=forwards(c),
        weight_sync=weight_sync(c, shapes[Role.POLICY]),
        kv_cache_tokens=tokens,
        memory=components,
        totals=sums,
        device_bytes=budget.device_bytes,
        notes=notes,
        warnings=found,
    )


def as_json(plan: Plan) -> str:
    """The plan for programs."""
    return json.dumps(dataclasses.asdict(plan), indent=2)


def as_text(plan: Plan) -> str:
    """The plan for people."""
    lines = ["Placement"]
    lines += [f"  {p.members:<36} {p.devices:>3} devices   {p.detail}" for p in plan.placement]
    if plan.gpus is not None:
        nodes = f"{_nodes(plan.gpus.needed)} of {plan.gpus.per_node}"
        lines.append(f"  {'total':<36} {plan.gpus.total:>3} GPUs      {nodes}")
    lines += ["", "Batches", *_batch_lines(plan.batches)]
    lines += ["", "One rollout batch", *(f"  {i}. {text}" for i, text in enumerate(plan.forwards, 1))]
    sync = plan.weight_sync
    push = f"{_size(sync.bytes)} to each of {sync.engines} engines, {sync.buckets} bucket(s), {sync.backend}"
    lines += [f"  {len(plan.forwards) + 1}. weight push: {push}"]
    lines += ["", f"Memory per device (GiB){_capacity(plan)}", *_memory_lines(plan)]
    lines += [f"  KV cache: {plan.kv_cache_tokens:,} tokens per engine"]
    if plan.notes:
        lines += ["", "Notes", *(f"  {note}" for note in plan.notes)]
    if plan.warnings:
        lines += ["", "Warnings", *(f"  {warning}" for warning in plan.warnings)]
    return "\n".join(lines)


def _batch_lines(b: Batches) -> list[str]:
    micro = "micro-batches by token budget"
    if b.micro_batches_per_rank is not None:
        micro = f"{b.micro_batches_per_rank} micro-batch(es)"
    share = "per rank" if b.ranks_per_sample == 1 else f"per group of {b.ranks_per_sample}"
    lines = [
        f"  rollout batch      {b.prompts_per_rollout:,} prompts, {b.samples_per_rollout:,} samples",
        f"  optimiser steps    {b.optimizer_steps_per_rollout} per rollout batch,"
        f" {b.samples_per_optimizer_step:,} samples each, {b.samples_in_last_step:,} in the last",
        f"  {share:<19}{b.samples_per_rank:,} samples on {b.data_parallel_ranks} {share.split()[1]}s, {micro}",
    ]
    together = b.samples_of_a_prompt_per_pass
    shared = f"once for {together} samples of a forward pass, where the model allows it"
    lines.append(f"  prompts computed   {shared if together > 1 else 'once per sample'}")
    if b.prompts is not None:
        run = (
            f"{b.prompts:,} prompts, {b.rollouts} rollout batch(es), {b.prompts_in_last_rollout:,} prompts in the last"
        )
        lines.append(f"  run                {run}")
    horizon = "unknown: give --prompts, or --train.max_steps" if b.lr_horizon is None else f"{b.lr_horizon:,} steps"
    return [*lines, f"  LR horizon         {horizon}"]


def _memory_lines(plan: Plan) -> list[str]:
    head = "".join(f"{phase:>17}" for phase in PHASES)
    lines = [f"  {'':<28}{head}"]
    for group, sums in plan.totals.items():
        lines.append(f"  {group}")
        for part in (p for p in plan.memory if p.group == group):
            cells = "".join(f"{_gib(part.bytes) if phase in part.phases else '':>17}" for phase in PHASES)
            lines.append(f"    {part.role + ' ' + part.name:<26}{cells}")
        lines.append(f"    {'total':<26}" + "".join(f"{_gib(sums[phase]):>17}" for phase in PHASES))
    return lines


def _capacity(plan: Plan) -> str:
    return "" if plan.device_bytes is None else f" of {_gib(plan.device_bytes)}"


def _no_room(room: Room | None) -> list[str]:
    if room is None or room.fits:
        return []
    parts = ", ".join(f"{names}: {count}" for names, count in room.shares.items())
    return [
        f"the run takes {room.total} GPUs ({parts}), {_nodes(room.needed)} of {room.per_node}; it does not fit on "
        f"{_nodes(room.nodes)} of {room.per_node} GPUs: --train.colocate_all, or fewer GPUs per role"
    ]


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _too_large(sums: dict[str, dict[str, int]], budget: Budget) -> list[str]:
    if budget.device_bytes is None:
        return []
    return [
        f"{group} in {phase}: {_gib(size + PROGRAM_BYTES)} GiB do not fit on a GPU of {_gib(budget.device_bytes)} GiB"
        for group, phases in sums.items()
        for phase, size in phases.items()
        if size + PROGRAM_BYTES > budget.device_bytes
    ]


def _small_cache(c: TrainPPOConfig, tokens: int) -> list[str]:
    if tokens >= c.data.max_len:
        return []
    return [f"the KV cache holds {tokens:,} tokens, fewer than one sample of --data.max_len {c.data.max_len:,}"]


def _guesses(shapes: dict[str, ModelShape]) -> list[str]:
    return [
        f"{called(role)}: parameters of model type {shape.model_type!r} are estimated"
        for role, shape in shapes.items()
        if not shape.exact
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.5f}"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
