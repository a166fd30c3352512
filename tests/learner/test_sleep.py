"""What leaves the GPU while the engines sample: seen by a stand-in for DeepSpeed, a CPU has nowhere to move it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.setup import give_back
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.sleep import sleep, wake

# DeepSpeed 0.19.8 compiles helpers with torch.jit when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

GPU = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that the device got."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    return calls


def engine(calls: list[dict[str, Any]]) -> SimpleNamespace:
    """Two states of one parameter and a step counter, and master weights."""
    state = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4), "step": torch.ones(())}
    return SimpleNamespace(
        offload_states=lambda **asked: calls.append(asked),
        reload_states=lambda: None,
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
def test_deepspeed_is_asked_to_move_its_own_states_to_the_host(
    stage: int, names: set[str] | None, asked: list[str]
) -> None:
    calls: list[dict[str, Any]] = []
    sleep(engine(calls), stage, GPU)
    assert asked == ["empty"]
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


@pytest.mark.parametrize(
    ("stage", "host_optimizer", "moved"),
    [
        (0, False, ["cpu", "cuda"]),
        (1, False, []),  # DeepSpeed moves them
        (3, False, ["cpu", "cuda"]),
        (3, True, []),  # --ds.adam_offload: they live in host memory
        (1, True, []),
        (0, True, ["cpu", "cuda"]),  # stage 0 does not offload
    ],
)
def test_an_offloaded_optimiser_stays_in_host_memory(
    stage: int, host_optimizer: bool, moved: list[str], monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    places: list[str] = []
    monkeypatch.setattr("openrlhf.learner.zero.sleep.move_states", lambda _, stage, device: places.append(device.type))
    sleep(engine([]), stage, GPU, host_optimizer=host_optimizer)
    wake(engine([]), stage, GPU, host_optimizer=host_optimizer)
    assert places == moved
    assert asked == ["empty", "wait"]


def test_what_is_not_used_goes_back_to_the_device(asked: list[str]) -> None:
    give_back(torch.device("cpu"))
    assert asked == []
    give_back(GPU)
    assert asked == ["empty"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("shares", [True, False])
def test_every_role_on_a_shared_device_gives_back(role: Role, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # frozen or trained, and without --ds.enable_sleep
    given: list[torch.device] = []
    monkeypatch.setattr("openrlhf.learner.setup.give_back", given.append)
    learner = Learner.__new__(Learner)
    learner.spec = LearnerSpec(
        role=role,
        model_path="m",
        ds=DsConfig(param_dtype="fp32", attn_implementation="sdpa"),
        optim=OptimConfig() if role in (Role.POLICY, Role.CRITIC) else None,
        shares_device=shares,
    )
    learner.device = GPU
    learner.give_back()
    assert given == ([GPU] if shares else [])
