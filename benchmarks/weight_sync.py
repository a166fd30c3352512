"""One weight push to a live engine, in shared memory and over gloo, against its bare parts; one run on CPU.

    python benchmarks/weight_sync.py [--layers 30] [--repeats 5] [--model FOLDER] [--adapter_rank 8]

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
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from openrlhf.agents.engine import SamplingParams
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.shared import SHARED_BUCKET_BYTES
from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec, plan_buckets, specs_of

WAYS = {True: "shared", False: "gloo"}


def make_model(path: str, layers: int) -> None:
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
    LlamaForCausalLM(config).float().save_pretrained(path)


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


def make_learner(path: str, rank: int) -> Any:
    """A policy that trains adapters, alone in its process group."""
    from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
    from openrlhf.learner.learner import Learner
    from openrlhf.learner.setup import init_distributed
    from openrlhf.learner.spec import LearnerSpec, Role

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    init_distributed()
    lora = LoraConfig(rank=rank, alpha=2 * rank)
    ds = DsConfig(zero_stage=0, param_dtype="fp32", attn_implementation="sdpa", lora=lora)
    learner = Learner(LearnerSpec(role=Role.POLICY, model_path=path, ds=ds, optim=OptimConfig()))
    with torch.no_grad():
        for name, parameter in learner.module.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.01)
    return learner


async def adapter_push(engine: VllmEngine, learner: Any, form: Any, repeats: int, bucket_mb: int) -> tuple[int, float]:
    """Bytes, and median seconds, of a push after the one that brought the whole model."""
    sender = WeightSender()
    address = sender.open(2, 0)
    await asyncio.gather(engine.init_weight_transfer(address.for_engine(1)), asyncio.to_thread(sender.connect))
    seconds, nbytes = [], 0
    for version in range(repeats + 2):
        options: dict[str, Any] = {"skip_frozen": version > 0, "form": form}
        infos = learner.weight_metadata(**options)
        specs = [TensorSpec(i.name, str(i.dtype).removeprefix("torch."), i.shape) for i in infos]
        plan = plan_buckets(specs, min(bucket_mb << 20, SHARED_BUCKET_BYTES))
        began = time.perf_counter()
        stream = learner.named_parameter_buckets(bucket_mb << 20, **options)
        await asyncio.gather(
            engine.receive_weights(plan, version), asyncio.to_thread(sender.send, stream, plan, version)
        )
        seconds.append(time.perf_counter() - began)
        nbytes = plan.nbytes
    sender.close()
    return nbytes, statistics.median(seconds[2:])


async def tokens_per_second(engine: VllmEngine, repeats: int) -> float:
    """Of 16 samples of 64 tokens at once."""
    sampling = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)
    seconds = []
    for _ in range(repeats + 1):
        asked = [GenerateRequest(request_id=str(i), token_ids=[i + 5] * 32, sampling=sampling) for i in range(16)]
        began = time.perf_counter()
        await asyncio.gather(*map(engine.generate, asked))
        seconds.append(time.perf_counter() - began)
    return 16 * 64 / statistics.median(seconds[1:])


async def measure_adapters(path: str, rank: int, repeats: int, bucket_mb: int) -> None:
    """Print bytes and seconds of both ways."""
    ways = {"merged": 0, "apart": rank}
    engines = {form: VllmEngine(EngineSpec(model=path, max_model_len=256, lora_rank=r)) for form, r in ways.items()}
    for engine in engines.values():  # before the learner: their cores are forks of this process
        await engine.start()
    learner = make_learner(path, rank)
    whole = sum(info.nbytes for info in learner.weight_metadata())
    for form, name in (("merged", "merged"), ("apart", "adapter")):
        nbytes, seconds = await adapter_push(engines[form], learner, form, repeats, bucket_mb)
        speed = await tokens_per_second(engines[form], repeats)
        await engines[form].shutdown()
        share = f"{nbytes / whole:.1%} of the model's {whole / 1e6:.1f} MB"
        print(
            f"rank {rank}, {name:8s} {nbytes / 1e6:8.2f} MB ({share})  {seconds:6.3f} s  {speed:6.1f} tokens/s sampled"
        )


async def measure(path: str, repeats: int, bucket_mb: int) -> tuple[int, dict[str, float]]:
    """Bytes, and seconds of everything."""
    from transformers import AutoModelForCausalLM

    named = list(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
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
    parser.add_argument("--model", help="a model's folder in place of a random one")
    parser.add_argument("--adapter_rank", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(folder, args.layers)
        path = args.model or folder
        report(*asyncio.run(measure(path, args.repeats, args.bucket_mb)))
        asyncio.run(measure_adapters(path, args.adapter_rank, args.repeats, args.bucket_mb))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def report(nbytes: int, seconds: dict[str, float]) -> None:
    """Print everything beside the time of a copy."""
    print(f"{nbytes / 1e6:.1f} MB")
    for name, value in seconds.items():
        print(f"{name:28s} {value:7.3f} s  {nbytes / value / 1e9:6.2f} GB/s  {value / seconds['copy']:5.1f} x a copy")
    for way in WAYS.values():
        ratio = seconds[f"push, {way}"] / (seconds[f"handed over, {way}"] + seconds["reload"])
        print(f"push / (handed over + reload), {way}: {ratio:.2f} (aim <= 1.5)")
    print(f"handed over in shared memory / copy: {seconds['handed over, shared'] / seconds['copy']:.2f} (aim <= 3)")


if __name__ == "__main__":
    main()
