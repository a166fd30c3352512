"""One weight push to a live engine, in shared memory and over gloo, against its bare parts; one run on CPU.

    python benchmarks/weight_sync.py [--layers 30] [--repeats 5]

Prints the median seconds of: a push in shared memory and one over gloo (both with layer-wise reload and cache reset);
the same tensors handed from the trainer to another process and looked at there, in both ways; a bare reload of the
same model from a file in the page cache; a memory copy of the same bytes, into memory that is there and into new
memory. Aims: handing over in shared memory <= 3 x a copy; a push <= 1.5 x (handing over + reload).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.shared import SHARED_BUCKET_BYTES
from openrlhf.rollout.weights.wire import BucketPlan, plan_buckets, specs_of

WAYS = {True: "shared", False: "gloo"}


def make_model(path: str, layers: int) -> torch.nn.Module:
    """A random model in the shape of SmolLM2-135M (tied, 30 layers), saved under `path`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(path)

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(path)
    return model


def median(action: Callable[[], Any], repeats: int) -> float:
    """Median seconds of an action, after one warm-up."""
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def receive_bare(address: GroupAddress, plan: BucketPlan, rounds: int) -> None:
    """The other process of `bare_transfer`: waits for every tensor and looks at its last number."""
    torch.set_num_threads(1)
    group = WeightGroup.join(address, 1)
    for version in range(rounds):
        for _, tensor in group.receive(plan, version):
            tensor.view(-1)[-1].item()


def bare_transfer(plan: BucketPlan, named: Sequence[tuple[str, torch.Tensor]], repeats: int, *, shared: bool) -> float:
    """Median seconds from the trainer's tensors to views of them in another process, without any engine."""
    sender = WeightSender(timeout_s=120, shared=shared)
    process = multiprocessing.get_context("spawn").Process(
        target=receive_bare, args=(sender.open(2, 0), plan, repeats + 1), daemon=True
    )
    process.start()
    sender.connect()
    versions = itertools.count()
    seconds = median(lambda: sender.send([[pair] for pair in named], plan, next(versions)), repeats)
    process.join()
    sender.close()
    return seconds


def cut(named: Sequence[tuple[str, torch.Tensor]], bucket_mb: int, *, shared: bool) -> BucketPlan:
    """The buckets of a run."""
    size = bucket_mb << 20
    return plan_buckets(specs_of(named), min(size, SHARED_BUCKET_BYTES) if shared else size)


async def push(
    engine: VllmEngine, named: Sequence[tuple[str, torch.Tensor]], plan: BucketPlan, repeats: int, *, shared: bool
) -> float:
    """Median seconds of a whole push."""
    sender = WeightSender(shared=shared)
    address = sender.open(2, 0)
    await asyncio.gather(engine.init_weight_transfer(address.for_engine(1)), asyncio.to_thread(sender.connect))
    seconds = []
    for version in range(repeats + 1):
        began = time.perf_counter()
        stream = [[pair] for pair in named]
        await asyncio.gather(
            engine.receive_weights(plan, version), asyncio.to_thread(sender.send, stream, plan, version)
        )
        seconds.append(time.perf_counter() - began)
    sender.close()
    return statistics.median(seconds[1:])


async def measure(layers: int, repeats: int, bucket_mb: int) -> tuple[int, dict[str, float]]:
    """Bytes, and seconds of everything."""
    with tempfile.TemporaryDirectory() as path:
        named = list(make_model(path, layers).named_parameters())
        plans = {shared: cut(named, bucket_mb, shared=shared) for shared in (True, False)}
        engine = VllmEngine(EngineSpec(model=path, max_model_len=256))
        await engine.start()
        seconds = {
            f"push, {WAYS[shared]}": await push(engine, named, plans[shared], repeats, shared=shared)
            for shared in (True, False)
        }
        reloads = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            await engine.running_llm().collective_rpc("reload_weights", kwargs={"weights_path": path})
            reloads.append(time.perf_counter() - began)
        await engine.shutdown()
    for shared, plan in plans.items():
        seconds[f"handed over, {WAYS[shared]}"] = bare_transfer(plan, named, repeats, shared=shared)
    seconds["reload"] = statistics.median(reloads[1:])
    source = torch.zeros(plans[True].nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds["copy"] = median(lambda: target.copy_(source), repeats)
    seconds["copy, new memory"] = median(source.clone, repeats)
    return plans[True].nbytes, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket_mb", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    nbytes, seconds = asyncio.run(measure(args.layers, args.repeats, args.bucket_mb))
    print(f"{nbytes / 1e6:.1f} MB")
    for name, value in seconds.items():
        print(f"{name:28s} {value:7.3f} s  {nbytes / value / 1e9:6.2f} GB/s  {value / seconds['copy']:5.1f} x a copy")
    for way in WAYS.values():
        ratio = seconds[f"push, {way}"] / (seconds[f"handed over, {way}"] + seconds["reload"])
        print(f"push / (handed over + reload), {way}: {ratio:.2f} (aim <= 1.5)")
    print(f"handed over in shared memory / copy: {seconds['handed over, shared'] / seconds['copy']:.2f} (aim <= 3)")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
