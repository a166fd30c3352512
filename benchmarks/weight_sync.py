"""One weight push to a live engine against its bare parts, measured in the same run on CPU.

    python benchmarks/weight_sync.py [--layers 30] [--repeats 5]

Prints the median seconds of: a push (gloo, one message per bucket, layer-wise reload, cache reset); a bare gloo
broadcast of the same bytes between two processes; a bare reload of the same model from a file in the page cache;
a memory copy of the same bytes. Aim: push <= 1.5 x (broadcast + reload).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import BucketPlan, Packer, plan_buckets, specs_of, torch_dtype


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
    """The other process of the bare broadcast."""
    torch.set_num_threads(1)
    group = WeightGroup.join(address, 1)
    flats = [torch.empty(b.numel, dtype=torch_dtype(b.dtype)) for b in plan.buckets]
    for _ in range(rounds):
        for flat in flats:
            group.broadcast(flat).wait()


def bare_broadcast(plan: BucketPlan, named: Sequence[tuple[str, torch.Tensor]], repeats: int) -> float:
    """Median seconds to broadcast buckets that are already packed."""
    packer = Packer(plan)
    flats = [flat for name, tensor in named for flat in packer.add(name, tensor)]
    group = WeightGroup.host(master_address="127.0.0.1", world_size=2, generation=0, timeout_s=120)
    process = multiprocessing.get_context("spawn").Process(
        target=receive_bare, args=(group.address, plan, repeats + 1), daemon=True
    )
    process.start()
    group.connect()

    def once() -> None:
        for flat in flats:
            group.broadcast(flat).wait()

    seconds = median(once, repeats)
    process.join()
    group.close()
    return seconds


async def measure(layers: int, repeats: int, bucket_mb: int) -> dict[str, float]:
    """All numbers, in seconds; `bytes` and `ratio` beside them."""
    from openrlhf.rollout.engine_spec import EngineSpec
    from openrlhf.rollout.vllm.engine import VllmEngine

    with tempfile.TemporaryDirectory() as path:
        model = make_model(path, layers)
        named = list(model.named_parameters())
        plan = plan_buckets(specs_of(named), bucket_mb << 20)
        engine = VllmEngine(EngineSpec(model=path, max_model_len=256))
        await engine.start()
        sender = WeightSender()
        address = sender.open(2, 0)
        await asyncio.gather(engine.init_weight_transfer(address.for_engine(1)), asyncio.to_thread(sender.connect))
        pushes = []
        for version in range(1, repeats + 2):
            began = time.perf_counter()
            stream = [[pair] for pair in named]
            await asyncio.gather(
                engine.receive_weights(plan, version), asyncio.to_thread(sender.send, stream, plan, version)
            )
            pushes.append(time.perf_counter() - began)
        llm = engine._llm
        assert llm is not None
        reloads = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            reloads.append(time.perf_counter() - began)
        await engine.shutdown()
    broadcast = bare_broadcast(plan, named, repeats)
    source = torch.empty(plan.nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = median(lambda: target.copy_(source), repeats)
    push, reload = statistics.median(pushes[1:]), statistics.median(reloads[1:])
    return {
        "bytes": plan.nbytes,
        "buckets": len(plan.buckets),
        "push": push,
        "broadcast": broadcast,
        "reload": reload,
        "memcpy": copy,
        "ratio": push / (broadcast + reload),
        "times_memcpy": push / copy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket_mb", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = asyncio.run(measure(args.layers, args.repeats, args.bucket_mb))
    print(f"{result['bytes'] / 1e6:.1f} MB in {result['buckets']:.0f} messages of at most {args.bucket_mb} MiB")
    for name in ("push", "broadcast", "reload", "memcpy"):
        print(f"{name:10s} {result[name]:8.3f} s  {result['bytes'] / result[name] / 1e9:6.2f} GB/s")
    print(f"push / (broadcast + reload) = {result['ratio']:.2f} (aim <= 1.5)")
    print(f"push / memcpy = {result['times_memcpy']:.1f}")


if __name__ == "__main__":
    main()
