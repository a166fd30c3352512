"""Long checks of real engines: pushed engines equal fresh ones, also in bf16 and over two workers; a killed core."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.agents.engine import SamplingParams
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.sync_check import check_sequences
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import plan_buckets, specs_of
from support.rollout_engine import EngineHost, RemoteError
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1800)]

SAMPLE = GenerateRequest(
    request_id="r", token_ids=[10, 20, 30], sampling=SamplingParams(max_tokens=48, seed=4, ignore_eos=True)
)


def named_weights(path: str, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).named_parameters())


def push(host: EngineHost, specs: Sequence[EngineSpec], named: list[tuple[str, torch.Tensor]], generation: int) -> None:
    """Into every engine at once."""
    sender = WeightSender()
    address = sender.open(1 + sum(s.num_workers for s in specs), generation)
    joining, offset = [], 1
    for spec in specs:
        joining.append(host.submit(spec.name, "init_weight_transfer", address.for_engine(offset)))
        offset += spec.num_workers
    sender.connect()
    for future in joining:
        future.result(60)
    plan = plan_buckets(specs_of(named), 100_000)
    receiving = [host.submit(s.name, "receive_weights", plan, generation) for s in specs]
    sender.send([named], plan, generation)
    for future in receiving:
        future.result(60)
    sender.close()


def answers(host: EngineHost, engine: str) -> tuple[Any, Any]:
    generated = host.call(engine, "generate", SAMPLE)
    return (generated.token_ids, generated.logprobs), host.call(engine, "score", check_sequences(261))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pushed_engine_equals_a_fresh_one_bit_for_bit(tmp_path: Path, tied: bool, dtype: str) -> None:
    old, new = (tiny_qwen3(tmp_path / str(seed), tied=tied, seed=seed) for seed in (1, 2))
    specs = [
        EngineSpec(model=path, name=name, dtype=dtype, max_model_len=128)
        for path, name in ((old, "pushed"), (old, "pushed-too"), (new, "fresh"))
    ]
    host = EngineHost(specs)
    try:
        before = answers(host, "pushed")
        push(host, specs[:2], named_weights(new, getattr(torch, dtype)), generation=1)
        fresh = answers(host, "fresh")
        assert answers(host, "pushed") == fresh
        assert answers(host, "pushed-too") == fresh
        assert before != fresh
    finally:
        host.close()


def test_tensor_parallel_workers_all_receive(tmp_path: Path) -> None:
    old, new = (tiny_qwen3(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    split = EngineSpec(model=old, name="split", tensor_parallel_size=2, max_model_len=128)
    whole = EngineSpec(model=new, name="whole", max_model_len=128)
    host, reference = EngineHost([split]), EngineHost([whole])
    try:
        push(host, [split], named_weights(new, torch.float32), generation=1)
        (tokens, logprobs), scores = answers(host, "split")
        (wanted_tokens, wanted_logprobs), wanted_scores = answers(reference, "whole")
        assert tokens == wanted_tokens
        assert max(abs(a - b) for a, b in zip(logprobs, wanted_logprobs, strict=True)) < 1e-4
        assert (
            max(abs(a - b) for r, s in zip(scores, wanted_scores, strict=True) for a, b in zip(r, s, strict=True))
            < 1e-4
        )
    finally:
        host.close()
        reference.close()


def test_an_engine_core_killed_in_a_push_costs_one_time_out_and_a_new_generation(tmp_path: Path) -> None:
    old, new = (tiny_qwen3(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    specs = [EngineSpec(model=old, name=name, max_model_len=128) for name in ("stays", "dies")]
    staying, dying = EngineHost(specs[:1]), EngineHost(specs[1:])
    hosts = {"stays": staying, "dies": dying}
    try:
        named = named_weights(new, torch.float32)
        plan = plan_buckets(specs_of(named), 100_000)
        sender = WeightSender()
        address = sender.open(3, 1)
        joining = [hosts[n].submit(n, "init_weight_transfer", address.for_engine(1 + i)) for i, n in enumerate(hosts)]
        sender.connect()
        for future in joining:
            future.result(60)
        receiving = staying.submit("stays", "receive_weights", plan, 1)
        lost = dying.submit("dies", "receive_weights", plan, 1)
        time.sleep(1.0)
        for pid in dying.children():
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            sender.send([named], plan, 1)
        for future in (receiving, lost):
            with pytest.raises(RemoteError):
                future.result(60)
        assert time.monotonic() - began < 20
        push(staying, specs[:1], named, generation=2)
        assert staying.call("stays", "health").unfit == ""
        assert staying.call("stays", "generate", SAMPLE).versions == [2] * 48
    finally:
        staying.close()
        dying.close()
