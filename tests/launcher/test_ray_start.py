"""In which order the parts of a run start, and what their processes are told. Without Ray: the parts only note it."""

from __future__ import annotations

import asyncio
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.ray import start, weight_push
from openrlhf.launcher.ray.weight_push import CheckPlan
from openrlhf.launcher.resolve import resolve
from openrlhf.learner.spec import Role
from openrlhf.rollout.sync_check import Tolerance, check_sequences
from support.broken_rl_commands import BASE
from support.launcher_flags import parse_train_ppo

SHARED = "--train.colocate_all --vllm.num_engines 8"


class StartedError(Exception):
    """The learners' turn has come; the test has seen enough."""


class Fleet:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def wait_started(self) -> None:
        self._log.append("engines ready")

    async def sleep(self) -> None:
        self._log.append("engines sleep")


def config_of(line: str, gpus: int = 8) -> TrainPPOConfig:
    return resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), Machine(gpus=gpus))[0]


def order(line: str, monkeypatch: pytest.MonkeyPatch, gpus: int) -> list[str]:
    log: list[str] = []

    def learners(*args: object) -> None:
        log.append("learners")
        raise StartedError

    def fleet(*args: object, **kwargs: object) -> Fleet:
        log.append("engines")
        return Fleet(log)

    monkeypatch.setattr(start, "Reservation", lambda plan: None)
    monkeypatch.setattr(start, "start_fleet", fleet)
    monkeypatch.setattr(start, "start_learners", learners)
    cluster: Any = SimpleNamespace(gpus=gpus, nodes=1, cores=2, worker_environment=dict, seconds={}, apart=frozenset())
    prepared: Any = None
    sink: Any = None
    with pytest.raises(StartedError):
        asyncio.run(start.start_parts(config_of(line, gpus), prepared, cluster, sink))
    return log


@pytest.mark.parametrize(
    ("line", "gpus", "want"),
    [
        (f"{SHARED} --vllm.enable_sleep", 8, ["engines", "engines ready", "engines sleep", "learners"]),
        (SHARED, 8, ["engines", "engines ready", "learners"]),  # c: nothing moves while vLLM measures
        (f"{SHARED} --train.async_enable", 8, ["engines", "learners"]),  # devices of their own: side by side
        ("", 8, ["engines", "learners"]),
        (SHARED, 0, ["engines", "learners"]),
    ],
    ids=["sleep", "c", "async", "apart", "cpu"],
)
def test_engines_measure_a_quiet_device(line: str, gpus: int, want: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert order(line, monkeypatch, gpus) == want


@pytest.mark.parametrize(
    ("line", "sharing"),
    [
        ("", []),
        (SHARED, ["policy", "critic", "reference"]),
        (f"{SHARED} --train.async_enable", ["policy", "critic", "reference"]),
        ("--train.colocate_actor_ref", ["policy", "reference"]),
    ],
)
def test_ranks_know_whether_they_share_their_device(line: str, sharing: list[str]) -> None:
    config = config_of(line)
    roles = [Role.POLICY, Role.CRITIC, Role.REFERENCE]
    assert [role for role in roles if start.learner_spec(config, role, 10).shares_device] == sharing


def test_full_determinism_reaches_the_engines() -> None:
    for line, asked in (("--train.full_determinism_enable", True), ("", False)):
        assert start.engine_specs(config_of(line), gpus=8)[0].full_determinism is asked


class Prompts(list[str]):
    def item(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(prompt=self[index])


def plan_of(prompts: list[str], line: str = "", gpus: int = 8) -> CheckPlan:
    """The check of a run whose tokens are characters."""
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text])
    suppressed = SimpleNamespace(suppressed=(ord("#"),))
    prepared: Any = SimpleNamespace(prompts=Prompts(prompts), tokenizer=tokenizer, vision=suppressed, vocab_size=256)
    return weight_push.check_plan(config_of(f"--data.max_len 100 {line}", gpus), prepared)


def test_the_sync_check_takes_text_from_the_first_prompts() -> None:
    plan = plan_of([f"a#{i}" for i in range(20)])
    assert ["".join(map(chr, ids)) for ids in plan.prompts] == [f"a{i}" for i in range(16)]
    assert (plan.answer_tokens, plan.tolerance, plan.bits) == (32, None, 7)
    assert plan_of(["#", ""]).prompts == check_sequences(256)


def test_the_tolerance_of_the_sync_check_is_the_users_or_that_of_fp32() -> None:
    given = plan_of(["a"], "--vllm.sync_tolerance 0.25").tolerance
    assert given == Tolerance(value=0.25, source="--vllm.sync_tolerance 0.25")
    fp32 = plan_of(["a"], gpus=0)
    assert (fp32.tolerance, fp32.bits) == (Tolerance(value=1e-3, source="--vllm.sync_tolerance 0.001"), None)
