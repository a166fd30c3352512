"""Activations, bytes and seconds of a packed row that is cut over 1, 2 and 4 ranks.

    .venv/bin/python benchmarks/sequence_parallel.py [--tokens 2048] [--samples 1] [--layers 4] [--ranks 2 4]

One forward and backward pass of a language model of width 512 over one packed row, on gloo ranks with a thread each.
With several samples one rank attends over all pairs of their tokens under a mask, which costs it more than is cut.
Models: with a key head for each of the 8 query heads, and for four. By heads is what a run does where the ranks divide
the key heads; by tokens is measured beside it.

saved: bytes that the forward pass keeps for the backward pass on a rank, parameters left out, counted by autograd's
hooks; aims: at most 0.6 of one rank's at 2 ranks and 0.35 at 4. sent: bytes per token, layer and rank that attention
hands to other ranks, counted at torch.distributed, which must equal the formula (`formula`). CPU s: this process's CPU
time, of the rank that took most; ranks on fewer cores than there are of them wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.sequence_parallel import attention
from openrlhf.learner.sequence_parallel.check import cut_rows
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.setup import init_distributed
from openrlhf.learner.spec import LearnerSpec, Role

HEADS, HEAD_DIM, ITEMSIZE = 8, 64, 4
MODELS = {"8 key heads": 8, "2 key heads": 2}
AIMS = {2: 0.6, 4: 0.35}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """Of one rank. saved: bytes. sent: bytes per token, layer and rank. seconds: median CPU time of a pass."""

    saved: float
    sent: float
    seconds: float


def formula(key_heads: int, ranks: int, way: str) -> float:
    """Bytes that a rank sends per token of its own, layer, and forward and backward pass."""
    if way == "heads":  # queries, keys, values and outputs, there and back
        return 2 * (ranks - 1) / ranks * (2 * HEADS + 2 * key_heads) * HEAD_DIM * ITEMSIZE
    return 3 * (ranks - 1) * 2 * key_heads * HEAD_DIM * ITEMSIZE  # keys and values, again, and gradients


def save_model(path: Path, key_heads: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 20,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def make_row(tokens: int, samples: int) -> Batch:
    """Samples whose lengths rise, of so many tokens in all."""
    parts = sum(range(1, samples + 1))
    lengths = [tokens * number // parts for number in range(1, samples)]
    lengths.append(tokens - sum(lengths))
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    actions = mask.clone()
    actions[:, 0] = False
    drawn = torch.randint(3, 1000, mask.shape, generator=torch.Generator().manual_seed(1))
    return Batch(tokens=drawn * mask, attention_mask=mask, action_mask=actions, index=torch.arange(samples))


@contextmanager
def counting_sent(ranks: int) -> Iterator[list[float]]:
    """Bytes that collectives of attention hand to other ranks."""
    sent: list[float] = []

    def counted(function: Callable[..., Any], share: float) -> Callable[..., Any]:
        def call(found: Tensor, given: Tensor, **options: Any) -> Any:
            if given.ndim > 1:  # the log-probs of every token are joined as well, a number each
                sent.append(share * given.nbytes)
            return function(found, given, **options)

        return call

    shares = {"all_to_all_single": (ranks - 1) / ranks, "all_gather_single": ranks - 1.0}
    shares["reduce_scatter_single"] = (ranks - 1) / ranks
    patches = [patch.object(dist, name, counted(getattr(dist, name), share)) for name, share in shares.items()]
    for each in patches:
        each.start()
    try:
        yield sent
    finally:
        for each in patches:
            each.stop()


def saved_bytes(module: LearnerModule, forward: Callable[[], Tensor]) -> int:
    """Storages that a forward pass keeps, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # no storage is freed and its place taken while this counts
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(found.values())


def measure(rank: int, ranks: int, port: int, model: str, way: str, options: argparse.Namespace, out: str) -> None:
    tokens, layers = options.tokens, options.layers
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    init_distributed("gloo")
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", packing_samples=True, ring_attn_size=ranks)
    spec = LearnerSpec(role=Role.POLICY, model_path=model, ds=ds, optim=OptimConfig())
    module, group = load_module(spec, CPU), SequenceGroup.of(ranks)
    if group is not None:
        cut_rows(spec, module, group, CPU)
    batch = make_row(tokens, options.samples)
    inputs = build_inputs(batch, batch.action_mask, packed=True)

    def forward() -> Tensor:
        return module(inputs).primary.sum()

    attention.by_heads = lambda key_heads, ranks: way == "heads"
    saved = saved_bytes(module, forward)
    with counting_sent(ranks) as sent:
        forward().backward()
    seconds = []
    for _ in range(3):
        began = time.process_time()
        forward().backward()
        seconds.append(time.process_time() - began)
    own = tokens / ranks * layers
    found = Measured(saved, sum(sent) / own, statistics.median(seconds))
    Path(f"{out}.{rank}").write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


def run(model: Path, ranks: int, way: str, options: argparse.Namespace) -> Measured:
    """The largest figure of any rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = str(model / f"measured-{ranks}")
    arguments = (ranks, port, str(model), way, options, out)
    mp.spawn(measure, args=arguments, nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
    found = [Measured(**json.loads(Path(f"{out}.{rank}").read_text())) for rank in range(ranks)]
    return Measured(*(max(getattr(one, name) for one in found) for name in ("saved", "sent", "seconds")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    failed = False
    print(f"{'model':<12} ranks  way     saved MiB  of one   sent B  formula  CPU s  of one")
    for name, key_heads in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), key_heads, options.layers)
            ways = [(1, "-"), *((ranks, way) for ranks in options.ranks for way in ("heads", "tokens"))]
            ways = [(ranks, way) for ranks, way in ways if way != "heads" or key_heads % ranks == 0]
            found = {cut: run(Path(folder), *cut, options) for cut in ways}
        one = found[1, "-"]
        for (ranks, way), own in found.items():
            want = formula(key_heads, ranks, way) if ranks > 1 else 0.0
            share = own.saved / one.saved
            ratio = own.seconds / one.seconds
            print(
                f"{name:<12} {ranks:>5}  {way:<6} {own.saved / 2**20:>10.1f} {share:>7.2f} {own.sent:>8.0f}"
                f" {want:>8.0f} {own.seconds:>6.2f} {ratio:>7.2f}"
            )
            failed |= share > AIMS.get(ranks, 1.0) or abs(own.sent - want) > 0.01 * want + 1
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
