"""What leaves the GPU while the engines sample: seen by a stand-in for DeepSpeed, a CPU has nowhere to move it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.learner.sleep import sleep

# DeepSpeed 0.19.8 compiles helpers with torch.jit when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

GPU = torch.device("cuda")


def engine(calls: list[dict[str, Any]]) -> SimpleNamespace:
    """Two states of one parameter and a step counter, and master weights."""
    state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4), "step": torch.ones(())}
    return SimpleNamespace(
        offload_states=lambda **asked: calls.append(asked),
        basic_optimizer=SimpleNamespace(state={0: state}),
        optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[torch.ones(4)]),
    )


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (0, None),
        (1, {"optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer"}),
        (2, {"optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer"}),
        (3, {"lp_grads", "contiguous_grad_buffer"}),
    ],
)
def test_deepspeed_is_asked_to_move_its_own_states_to_the_host(stage: int, names: set[str] | None) -> None:
    calls: list[dict[str, Any]] = []
    sleep(engine(calls), stage, GPU)
    if names is None:
        assert calls == []
        return
    (call,) = calls
    assert {kind.value for kind in call["include"]} == names
    assert (call["device"].value, call["pin_memory"]) == ("cpu", False)


def test_a_cpu_has_nothing_to_free() -> None:
    calls: list[dict[str, Any]] = []
    sleep(engine(calls), 2, torch.device("cpu"))
    assert calls == []
