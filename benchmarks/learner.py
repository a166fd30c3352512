"""A training step of the learner against a bare PyTorch loop, packed against padded samples, shared against whole ones.

    .venv/bin/python benchmarks/learner.py [--dtype fp32] [--layers 30] [--tokens 1024] [--rounds 3]
    .venv/bin/python benchmarks/learner.py --shared 128,128 --shared 16,128 [--samples 8] [--layers 30] [--rounds 3]

`--shared PROMPT,ANSWER` measures groups of samples of one prompt with `share_prompt` on and off instead, padded and
packed; answers are between three and five quarters as long as given.

The model has the shape of SmolLM2-135M with random weights. Both sides do forward, backward, clipping and AdamW on the
same samples in one process; the learner through DeepSpeed ZeRO-2 with one rank. Rounds alternate between the sides, so
that other load on the machine falls on both, and seconds are this process's CPU time (one thread), which other load
moves least. `valid tokens` are real tokens, without padding. Two models are in memory at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf.core.batch import Batch, pad_rows
from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.config import AdamConfig, DsConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.setup import init_distributed
from openrlhf.learner.spec import LearnerSpec, Role

VOCAB = 49_152
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OBJECTIVE = PolicyObjective(config=PolicyLossConfig(), detach_old=True)
LR = 1e-5


def save_model(path: Path, layers: int) -> None:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def log_normal_batch(tokens: int, seed: int = 0) -> Batch:
    """Samples of log-normal lengths, about `tokens` tokens in all; everything after the first token is trained."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(max(int(rng.lognormvariate(3.8, 1.0)), 8), 512))
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    actions = mask.clone()
    actions[:, 0] = False
    rows = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * actions
    return Batch(
        tokens=pad_rows(rows, width=width, value=0, dtype=torch.long),
        attention_mask=mask,
        action_mask=actions,
        index=torch.arange(len(rows)),
        advantages=advantages,
    )


def group_batch(prompt: int, answer: int, samples: int, seed: int = 0) -> Batch:
    """Samples of one prompt, whose answers are trained."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(prompt)]
    lengths = [prompt + rng.randint(3 * answer // 4, 5 * answer // 4) for _ in range(samples)]
    places = torch.arange(max(lengths))[None]
    mask = places < torch.tensor(lengths)[:, None]
    actions = mask & (places >= prompt)
    rows = [head + [rng.randrange(VOCAB) for _ in range(n - prompt)] for n in lengths]
    return Batch(
        tokens=pad_rows(rows, width=max(lengths), value=0, dtype=torch.long),
        attention_mask=mask,
        action_mask=actions,
        index=torch.arange(samples),
        advantages=torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * actions,
    )


def make_learner(path: Path, dtype: str, *, packed: bool, size: int, share: Literal["auto", "off"] = "off") -> Learner:
    ds = DsConfig(param_dtype="bf16" if dtype == "bf16" else "fp32", attn_implementation="sdpa", packing_samples=packed)
    return Learner(
        LearnerSpec(
            role=Role.POLICY,
            model_path=str(path),
            ds=replace(ds, zero_stage=2),
            optim=OptimConfig(lr_scheduler="constant", lr_warmup_ratio=0.0, adam=AdamConfig(lr=LR)),
            batch=TrainBatchConfig(micro_batch_size=size, share_prompt=share),
            max_optimizer_steps=1000,
        )
    )


def bare_step(path: Path, dtype: str, batch: Batch) -> Callable[[], Any]:
    """The same step by hand: full logits over the same packed row; bf16 with fp32 copies of the weights, as in ZeRO."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa").train()
    weights = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in weights] if dtype == "bf16" else weights
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), fused=True)
    inputs = build_inputs(batch, batch.action_mask, packed=True)
    assert batch.advantages is not None
    advantages = batch.advantages[batch.action_mask]

    def step() -> Tensor:
        outputs = model(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, attention_mask=None, use_cache=False
        )
        logp = torch.log_softmax(outputs.logits[0, inputs.select].float(), -1)
        logprobs = logp.gather(-1, inputs.targets[:, None])[:, 0]
        loss = -((logprobs - logprobs.detach()).exp() * advantages).mean()
        loss.backward()
        if masters is not weights:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not weights:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
        return loss.detach()

    return step


def compare(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds per side over alternating rounds, after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, step in sides.items():
            start = time.process_time()
            step()
            if number:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def run(path: Path, dtype: str, tokens: int, rounds: int) -> dict[str, float | str]:
    batch = log_normal_batch(tokens)
    valid = int(batch.attention_mask.sum())
    packed = make_learner(path, dtype, packed=True, size=batch.size)
    sides = {"learner": lambda: packed.update(batch, OBJECTIVE), "bare": bare_step(path, dtype, batch)}
    median = compare(sides, rounds)
    del sides["bare"]
    gc.collect()
    padded = make_learner(path, dtype, packed=False, size=batch.size)
    second = compare({"learner": sides["learner"], "padded": lambda: padded.update(batch, OBJECTIVE)}, rounds)
    return {
        "dtype": dtype,
        "samples": batch.size,
        "valid_tokens": valid,
        "padding_share": round(1 - valid / batch.tokens.numel(), 3),
        **{f"{name}_tokens_per_s": round(valid / value, 1) for name, value in (second | median).items()},
        "learner_over_bare": round(median["bare"] / median["learner"], 3),
        "packed_over_padded": round(second["padded"] / second["learner"], 3),
    }


def run_shared(path: Path, dtype: str, shape: tuple[int, int], samples: int, rounds: int) -> dict[str, Any]:
    """Whole over shared: how much faster a step is whose prompt is computed once."""
    batch = group_batch(*shape, samples)
    found: dict[str, Any] = {"dtype": dtype, "prompt": shape[0], "answer": shape[1], "samples": samples}
    for packed in (False, True):
        learners = {
            kind: make_learner(path, dtype, packed=packed, size=samples, share=kind) for kind in ("auto", "off")
        }
        median = compare({kind: partial(one.update, batch, OBJECTIVE) for kind, one in learners.items()}, rounds)
        name = "packed" if packed else "padded"
        found[f"{name}_seconds"] = {kind: round(value, 3) for kind, value in median.items()}
        found[f"{name}_whole_over_shared"] = round(median["off"] / median["auto"], 3)
    return found


def pair(text: str) -> tuple[int, int]:
    """ "128,64" as two numbers."""
    prompt, answer = text.split(",")
    return int(prompt), int(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=sorted(DTYPES), action="append")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=pair, action="append", metavar="PROMPT,ANSWER")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.layers)
        for dtype in options.dtype or ["fp32", "bf16"]:
            for shape in options.shared or ():
                print(json.dumps(run_shared(Path(folder), dtype, shape, options.samples, options.rounds)), flush=True)
            if options.shared:
                continue
            print(json.dumps(run(Path(folder), dtype, options.tokens, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
