"""A real engine that serves an adapter: what it computes, alone and over two workers, and pushes that must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.sync_check import check_sequences, mean_difference
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import ADAPTER_PREFIX, plan_buckets, specs_of
from support.rollout_engine import EngineHost, RemoteError
from support.rollout_stage import request
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("stack"), pytest.mark.timeout(900)]

RANK = 4
ROWS = check_sequences(261, tokens=48)
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
MODULES = [f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS]

Named = list[tuple[str, Tensor]]


class Adapted:
    """An engine, its model, and pushes of adapters into it."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.path = tiny_qwen3(folder / "model", seed=1)
        self.base: Named = sorted(load_file(Path(self.path) / "model.safetensors").items())
        self.host = EngineHost([EngineSpec(model=self.path, name="e", max_model_len=128, lora_rank=RANK, **spec)])
        self.workers = spec.get("tensor_parallel_size", 1)
        self.version = self.generation = 0
        self.connect()

    def connect(self) -> None:
        self.generation += 1
        self.sender = WeightSender()
        address = self.sender.open(1 + self.workers, self.generation)
        joining = self.host.submit("e", "init_weight_transfer", address.for_engine(1))
        self.sender.connect()
        joining.result(60)

    def adapter(self, seed: int) -> Named:
        generator = torch.Generator().manual_seed(seed)
        shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in self.base}
        named: Named = []
        for module in MODULES:
            out, inner = shapes[module]
            named.append((f"{ADAPTER_PREFIX}{module}.lora_A.weight", torch.randn(RANK, inner, generator=generator) / 4))
            named.append((f"{ADAPTER_PREFIX}{module}.lora_B.weight", torch.randn(out, RANK, generator=generator) / 4))
        return named

    def push(self, named: Named) -> None:
        self.version += 1
        plan = plan_buckets(specs_of(named), 100_000)
        receiving = self.host.submit("e", "receive_weights", plan, self.version)
        self.sender.send([named], plan, self.version)
        receiving.result(180)

    def model(self, adapter: Named) -> Any:
        """The same in transformers: the adapter added to the weights."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        factors = dict(adapter)
        with torch.no_grad():
            for module in MODULES if adapter else ():
                first, second = (factors[f"{ADAPTER_PREFIX}{module}.lora_{x}.weight"] for x in "AB")
                model.get_submodule(module).weight.add_(second @ first)
        return model

    def errors(self, adapter: Named) -> tuple[float, float]:
        """Of what it scores, and of what it samples."""
        answer = self.host.call("e", "generate", request(ROWS[0], max_tokens=12, seed=1, ignore_eos=True))
        assert set(answer.versions) == {self.version}
        text = [*ROWS[0], *answer.token_ids]
        own, longer = (logprobs(self.model(adapter), torch.tensor(rows)) for rows in (ROWS, [text]))
        scored = mean_difference([[0.0, *row.tolist()] for row in own], self.host.call("e", "score", ROWS))
        return scored, max(abs(a - b) for a, b in zip(longer[0, -12:].tolist(), answer.logprobs, strict=True))


@torch.no_grad()
def logprobs(model: Any, ids: Tensor) -> Tensor:
    """[B, T - 1], of the tokens behind each row's first."""
    return torch.log_softmax(model(ids).logits[:, :-1].double(), -1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    made = Adapted(tmp_path_factory.mktemp("engine"))
    yield made
    made.host.close()


def test_an_engine_of_two_workers(tmp_path: Path) -> None:
    made = Adapted(tmp_path, tensor_parallel_size=2, lora_targets=("q_proj", "v_proj", "up_proj"))
    try:
        made.push([*made.base, *made.adapter(1)])
        found = [made.errors(made.adapter(1))]
        made.push(made.adapter(2))
        found.append(made.errors(made.adapter(2)))
    finally:
        made.host.close()
    print(f"\n{found}")
    assert max(error for pair in found for error in pair) < 1e-4


def without(named: Named, ending: str) -> Named:
    return [(name, tensor) for name, tensor in named if not name.endswith(f"{MODULES[0]}.{ending}")]


def spoiled(made: Adapted) -> dict[str, Named]:
    good = made.adapter(3)
    narrow = [(n, t[:, :8].contiguous() if n.endswith(f"{MODULES[0]}.lora_A.weight") else t) for n, t in good]
    return {
        "a push brought no adapter": made.base,
        "came without its second factor": without(good, "lora_B.weight"),
        "on other modules than the one before": good[2:],
        "its weight is": narrow,
    }


@pytest.mark.parametrize(
    "words",
    [
        "a push brought no adapter",
        "came without its second factor",
        "on other modules than the one before",
        "its weight is",
    ],
)
def test_a_push_that_is_not_whole_leaves_the_engine_unfit_until_one_is(engine: Adapted, words: str) -> None:
    engine.push([*engine.base, *engine.adapter(1)])
    with pytest.raises(RemoteError, match=words) as caught:
        engine.push(spoiled(engine)[words])
    assert caught.value.kind == "EngineDownError"
    with pytest.raises(RemoteError, match="e must not serve request"):
        engine.host.call("e", "generate", request(ROWS[0], max_tokens=2))
    assert "failed" in engine.host.call("e", "give_up_push").unfit
    engine.connect()
    engine.push([*engine.base, *engine.adapter(4)])
    assert engine.host.call("e", "health").unfit == ""
    assert max(engine.errors(engine.adapter(4))) < 1e-4
