"""What a push brings of an adapter: kept from the model, put together, refused where it is not whole or wrong."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from openrlhf.rollout.weights.parts import AdapterParts, ModelWithAdapter
from openrlhf.rollout.weights.wire import ADAPTER_PREFIX, TensorSpec, is_adapter, plan_buckets

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


class Model:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append([name for name, _ in weights])


def base() -> list[tuple[str, Tensor]]:
    return [
        (f"{Q}.weight", torch.zeros(6, 8)),
        (f"{V}.weight", torch.zeros(4, 8)),
        ("model.norm.weight", torch.ones(8)),
    ]


def adapter(module: str, out: int, rank: int = 2, inner: int = 8) -> list[tuple[str, Tensor]]:
    return [
        (f"{ADAPTER_PREFIX}{module}.lora_A.weight", torch.ones(rank, inner)),
        (f"{ADAPTER_PREFIX}{module}.lora_B.weight", torch.ones(out, rank)),
    ]


def pushed(*tensors: list[tuple[str, Tensor]], into: AdapterParts | None = None) -> AdapterParts:
    """A push over an own or an older receiver; the model comes where there is a tensor of it."""
    parts = into or AdapterParts()
    flat = [pair for some in tensors for pair in some]
    parts.begin(with_base=any(not is_adapter(name) for name, _ in flat))
    parts.load(Model(), flat)
    return parts


def test_a_model_loads_what_belongs_to_it_alone() -> None:
    parts, model = AdapterParts(), Model()
    parts.begin(with_base=True)
    mixed = [*base()[:1], *adapter(Q, 6), *base()[1:]]
    ModelWithAdapter(model, parts).load_weights(iter(mixed))
    ModelWithAdapter(model, parts).load_weights(adapter(V, 4))
    assert model.calls == [[name for name, _ in base()]], "an adapter alone is no reason to load anything"
    tensors, modules = parts.take()
    assert modules == {Q, V}
    assert sorted(tensors) == sorted(name for module in (Q, V) for name, _ in adapter(module, 1))


def test_tensors_are_kept_when_the_memory_of_a_message_is_used_again() -> None:
    parts = pushed(base())
    sent = adapter(Q, 6)
    parts.begin(with_base=False)
    parts.load(Model(), sent)
    for _, tensor in sent:
        tensor.zero_()
    assert all(bool(tensor.all()) for tensor in parts.take()[0].values())


def test_an_adapter_may_lie_on_a_transposed_matrix() -> None:
    parts = pushed([(f"{Q}.weight", torch.zeros(8, 6))], adapter(Q, 6))
    assert parts.take()[1] == {Q}


WRONG = {
    "a push brought no adapter": base(),
    "came without its second factor": [*base(), *adapter(Q, 6)[:1]],
    "came without its first factor": [*base(), *adapter(Q, 6)[1:]],
    "its weight is": [*base(), *adapter(Q, 5)],
    "its weight never came": [*base(), *adapter("model.layers.9.mlp.up_proj", 6)],
    r"\(6, 3\) times \(2, 8\)": [*base(), *adapter(Q, 6)[:1], *adapter(Q, 6, rank=3)[1:]],
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_not_whole_or_does_not_fit_is_refused(words: str) -> None:
    # K05: vLLM copies a smaller factor into a corner of its place, and leaves out what it has no place for
    with pytest.raises(ValueError, match=words):
        pushed(WRONG[words]).take()


def test_later_pushes_hold_the_same_modules() -> None:
    # K06: an adapter that lost a module on its way would leave the engine with none there
    parts = pushed(base(), adapter(Q, 6), adapter(V, 4))
    parts.take()
    assert pushed(adapter(Q, 6), adapter(V, 4), into=parts).take()[1] == {Q, V}
    with pytest.raises(ValueError, match="on other modules than the one before"):
        pushed(adapter(Q, 6), into=parts).take()
    assert pushed(base(), adapter(Q, 6), into=parts).take()[1] == {Q}, "a new model may have a new adapter"


def test_half_a_push_leaves_nothing_for_the_next() -> None:
    parts = pushed(base(), adapter(Q, 6))
    parts.take()
    parts.begin(with_base=False)
    parts.load(Model(), adapter(Q, 6)[:1])
    parts.begin(with_base=False)
    parts.load(Model(), adapter(Q, 6)[1:])
    with pytest.raises(ValueError, match="without its first factor"):
        parts.take()


def test_a_plan_knows_whether_it_moves_more_than_an_adapter() -> None:
    spec = TensorSpec(f"{ADAPTER_PREFIX}{Q}.lora_A.weight", "float32", (2, 8))
    assert not plan_buckets([spec], 100).moves_base
    assert plan_buckets([spec, TensorSpec("lm_head.weight", "float32", (2, 8))], 100).moves_base
