"""The sync check against real engines: sound pushes of a model that trains never stop a run, faults always do.

Three families, trained on this repository's documentation until they write something like it, in two number formats.
Every push is the whole way: the learner's stream, gloo, vLLM's reload; both sides then score what the engine wrote.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from openrlhf.agents.engine import SamplingParams
from openrlhf.core.batch import Batch
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.learner.config import AdamConfig, DsConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.setup import init_distributed, leave_distributed
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.supervised_objectives import SftObjective
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.sync_check import (
    CHECK_ROWS,
    FP32_TOLERANCE,
    SyncError,
    Tolerance,
    answer_tokens,
    check_prompts,
    compare,
    measured_tolerance,
    noise_bits,
)
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import plan_buckets, specs_of
from support.rollout_engine import EngineHost
from support.sync_faults import FAULTS, share_of
from support.tiny_models import byte_tokenizer

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs"
SOUND_PUSHES = 36
"""Per family and number format: 216 in all."""
FAULTS_EACH = 2
"""Of each kind, per family and number format, with a third `scaled` for the second `stale`, which is the same again."""
MAX_LEN = 128
WARM_STEPS = 200
RATE = 5e-4
"""A usual learning rate of models of this size."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SIZE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
FAMILIES: dict[str, Any] = {
    "qwen3, tied": Qwen3Config(**SIZE, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "qwen3_moe, untied": Qwen3MoeConfig(**SIZE, **EXPERTS, tie_word_embeddings=False),
}
RULES = RankConfig(
    algo=AlgoConfig(),
    policy_loss=PolicyLossConfig(),
    value_clip=0.2,
    max_len=MAX_LEN,
    agg_constant=1.0,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def text() -> Tensor:
    """The documentation, one id per byte."""
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    tokenizer: Any = byte_tokenizer()
    return torch.tensor(tokenizer(pages, add_special_tokens=False)["input_ids"])


def pieces(text: Tensor, generator: torch.Generator, *, rows: int = 8, length: int = 64) -> Tensor:
    """[rows, length] random pieces."""
    starts = torch.randint(0, len(text) - length, (rows,), generator=generator).tolist()
    return torch.stack([text[start : start + length] for start in starts])


def warm_model(config: Any, text: Tensor, folder: Path) -> str:
    """A model that has learned which bytes follow each other; saved in fp32."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(WARM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / WARM_STEPS)
        ids = pieces(text, generator)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Of one; the same for all models, since DeepSpeed keeps its first groups."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as environ:
        for name, value in place.items():
            environ.setenv(name, value)
        init_distributed()
        yield
        leave_distributed()


class Pair:
    """A learner that trains, and a real engine."""

    def __init__(self, model: str, dtype: str, host: EngineHost, text: Tensor) -> None:
        self.host, self.text, self.version = host, text, 0
        self.generator = torch.Generator().manual_seed(2)
        spec = LearnerSpec(
            role=Role.POLICY,
            model_path=model,
            ds=DsConfig(param_dtype=dtype, attn_implementation="sdpa"),  # type: ignore[arg-type]
            optim=OptimConfig(adam=AdamConfig(lr=RATE), lr_scheduler="constant", lr_warmup_ratio=0.0),
            batch=TrainBatchConfig(micro_batch_size=8, batch_size=8),
            max_optimizer_steps=1000,
        )
        self.trainer = PolicyRank(Learner(spec), RULES, resolve=lambda what, handles: list(handles))
        self.bits = noise_bits(DTYPES[dtype])
        self.sender = WeightSender()
        address = self.sender.open(2, 1)
        joining = host.submit("engine", "init_weight_transfer", address.for_engine(1))
        self.sender.connect()
        joining.result(120)
        self.sent: list[dict[str, Tensor]] = []
        """Weights of all pushes, newest first."""
        self.push(self.weights())
        prompts = check_prompts(pieces(text, self.generator, rows=CHECK_ROWS, length=24).tolist(), max_len=MAX_LEN)
        sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens(prompts, max_len=MAX_LEN))
        asked = [GenerateRequest(request_id=str(i), token_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
        self.rows = [[*r.token_ids, *host.call("engine", "generate", r).token_ids] for r in asked]

    def weights(self) -> dict[str, Tensor]:
        """What a push sends."""
        stream = self.trainer.learner.named_parameter_buckets(1 << 30)
        return {name: tensor.detach().clone() for bucket in stream for name, tensor in bucket}

    def step(self) -> None:
        """One optimiser step on other pieces of the text."""
        ids = pieces(self.text, self.generator)
        mask = torch.ones_like(ids, dtype=torch.bool)
        action = mask.clone()
        action[:, 0] = False
        batch = Batch(tokens=ids, attention_mask=mask, action_mask=action, index=torch.arange(len(ids)))
        self.trainer.learner.update(batch, SftObjective())

    def push(self, weights: dict[str, Tensor]) -> None:
        self.version += 1
        named = list(weights.items())
        plan = plan_buckets(specs_of(named), 100_000)
        receiving = self.host.submit("engine", "receive_weights", plan, self.version)
        try:
            self.sender.send([named], plan, self.version)
        finally:
            receiving.result(120)

    def check(self) -> float:
        """The difference after a push in units of what a run allows: above 1 it stops."""
        own, scored = self.trainer.check_logprobs(self.rows), self.host.call("engine", "score", self.rows)
        tolerance = Tolerance(value=FP32_TOLERANCE, source="float32")
        if self.bits is not None:
            rounded = self.trainer.check_logprobs(self.rows, bits=self.bits)
            tolerance = measured_tolerance(own, rounded, bits=self.bits)
        share = share_of(tolerance, own, scored)
        try:
            compare(own, scored, tolerance=tolerance, engine="engine")
        except SyncError:
            assert share > 1
        else:
            assert share <= 1
        return share


def figures(name: str, sound: list[float], found: dict[str, float]) -> str:
    """Errors in units of the tolerance, the faintest fault first."""
    head = f"{name}: {len(sound)} sound pushes show {min(sound):.2f} to {max(sound):.2f} of their tolerance"
    return "\n".join(["", head, *(f"{found[w]:9.2f}  {w}" for w in sorted(found, key=lambda w: found[w]))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_pushes_pass_and_faults_stop_the_run(tmp_path: Path, text: Tensor, family: str, dtype: str) -> None:
    model = warm_model(FAMILIES[family], text, tmp_path)
    host = EngineHost([EngineSpec(model=model, name="engine", dtype=DTYPES[dtype], max_model_len=MAX_LEN)])
    sound: list[float] = []
    found: dict[str, float] = {}
    try:
        pair = Pair(model, dtype, host, text)
        for _ in range(SOUND_PUSHES):
            pair.step()
            pair.sent.insert(0, pair.weights())
            pair.push(pair.sent[0])
            sound.append(pair.check())
        rng = random.Random(0)
        for name, fault in FAULTS.items():
            for _ in range(FAULTS_EACH + (name == "scaled")):
                spoiled = pair.weights()
                what = fault(spoiled, pair.sent[1:], rng)
                pair.push(spoiled)
                found[f"{name}: {what}"] = pair.check()
        pair.sender.close()
    finally:
        host.close()
    print(figures(f"{family} {dtype}", sound, found))
    assert max(sound) < 1, "a sound push was stopped"
    assert min(found.values()) > 1, "a fault was not found"
