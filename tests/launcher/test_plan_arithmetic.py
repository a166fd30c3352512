"""The arithmetic of a plan: batches, forwards and the tokens of a micro-batch, from flags alone."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.machine import Machine
from openrlhf.launcher.plan.arithmetic import batches, count_prompts, forwards
from openrlhf.launcher.plan.memory import rank_tokens, tokens_per_forward
from openrlhf.launcher.resolve import resolve
from support.launcher_flags import parse_train_ppo


def resolved(flags: str, gpus: int = 0) -> Any:
    base = "--actor.model_name_or_path A --vllm.num_engines 1 --reward.remote_url f.py --data.prompt_dataset "
    return resolve(parse_train_ppo(shlex.split(base + flags)), Machine(gpus=gpus))[0]


def test_batch_arithmetic(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "a"}\n' * 101 + "\n", encoding="utf-8")
    config = resolved(
        f"{data} --actor.num_gpus_per_node 2 --rollout.batch_size 10 --rollout.n_samples_per_prompt 4"
        " --train.batch_size 16 --train.micro_batch_size 3 --train.max_epochs 2 --train.num_episodes 3"
    )
    found = batches(config, count_prompts(config))
    assert (found.samples_per_rollout, found.optimizer_steps_per_rollout, found.samples_in_last_step) == (40, 6, 8)
    assert (found.samples_per_rank, found.micro_batches_per_rank) == (8, 3)
    assert found.samples_of_a_prompt_per_pass == 1  # of 4, 1.6 are drawn into a step
    assert (found.prompts, found.rollouts, found.prompts_in_last_rollout) == (101, 33, 1)
    assert found.lr_horizon == (10 * 3 + 1) * 2 * 3


@pytest.mark.parametrize(
    ("flags", "together"),
    [
        ("--train.micro_batch_size 8", 8),
        ("--train.micro_batch_size 16", 8),
        ("", 1),
        ("--train.dynamic_batch_enable", 8),
        ("--train.dynamic_batch_enable --train.batch_size 16", 4),
        ("--train.dynamic_batch_enable --train.share_prompt off", 1),
        ("--train.micro_batch_size 8 --data.max_images_per_prompt 1", 1),
    ],
)
def test_how_many_samples_share_a_prompt(flags: str, together: int) -> None:
    c = resolved(f"D --rollout.batch_size 4 --rollout.n_samples_per_prompt 8 --train.batch_size 32 {flags}")
    assert batches(c, None).samples_of_a_prompt_per_pass == together


def test_prompts_that_cannot_be_counted() -> None:
    assert count_prompts(resolved("org/dataset")) is None
    assert batches(resolved("org/dataset --train.max_steps 7"), None).lr_horizon == 7


def test_forwards() -> None:
    lean = resolved("D --algo.advantage.estimator rloo --algo.kl.init_coef 0 --rollout.batch_size 128")
    assert forwards(lean) == [
        "generation by the engines",
        "forward and backward of the policy, 1 time(s) over the batch",
    ]
    full = forwards(resolved("D --rollout.batch_size 256 --train.max_epochs 2"))
    assert [text.split()[0] for text in full] == ["generation", "log-probs", "old", "values", "forward"]


def test_tokens_of_a_micro_batch() -> None:
    fixed = resolved("D --data.max_len 100 --train.micro_batch_size 3 --rollout.micro_batch_size 5")
    assert (tokens_per_forward(fixed, "training"), tokens_per_forward(fixed, "make_experience")) == (300, 500)
    dynamic = resolved("D --data.max_len 100 --train.dynamic_batch_enable --train.max_tokens_per_gpu 4096")
    assert tokens_per_forward(dynamic, "training") == tokens_per_forward(dynamic, "make_experience") == 4096
    split = resolved(
        "D --data.max_len 100 --train.dynamic_batch_enable --train.max_tokens_per_gpu 4096"
        " --rollout.max_tokens_per_gpu 5000 --ds.tensor_parallel_size 4"
    )
    assert tokens_per_forward(split, "training") == 4 * 4096  # N05: of all devices of a group
    assert tokens_per_forward(split, "make_experience") == 4 * 5000
    cut = resolved(
        "D --data.max_len 99 --train.dynamic_batch_enable --train.max_tokens_per_gpu 9 --ds.ring_attn_size 4"
    )
    assert (tokens_per_forward(cut, "training"), rank_tokens(cut, "training")) == (99, 25)
    assert rank_tokens(split, "training") == 4 * 4096
    long = resolved("D --data.max_len 9000 --train.dynamic_batch_enable --train.max_tokens_per_gpu 4096")
    assert tokens_per_forward(long, "training") == 9000  # one sample never splits
