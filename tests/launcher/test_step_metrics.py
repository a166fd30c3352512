"""Rates of a step, and what training asks of the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.machine import peak_tflops
from openrlhf.launcher.plan.shape import ModelShape
from openrlhf.launcher.samples import Group
from openrlhf.launcher.trainer.pipeline import Idleness
from openrlhf.launcher.trainer.step_metrics import Throughput, training_flops
from support.trainer_fakes import FAILED, GOOD, fake_run

SHAPE = ModelShape(
    model_type="llama", hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10, tied=True
)
GROUP = Group(
    prompt=PromptItem(group_id="g", prompt=""), samples=[GOOD, replace(GOOD, total_length=12), FAILED], handle=""
)
SECONDS = {
    "timing/step_total": 10.0,
    "timing/generation": 4.0,
    "timing/make_experience": 2.0,
    "timing/ppo_train": 0.5,
}


def test_tokens_per_second_of_every_part() -> None:
    found = Throughput(epochs=3, overlaps=False).metrics([GROUP], SECONDS)
    assert found == {
        "perf/tokens_per_second": 2.0,  # 8 + 12 tokens
        "perf/generation_tokens_per_second": 2.0,  # 4 + 4 of them sampled
        "perf/experience_tokens_per_second": 10.0,
        "perf/training_tokens_per_second": 120.0,
        "perf/waiting_for_samples": 0.4,
    }
    beside = Throughput(epochs=3, overlaps=True).metrics([GROUP], SECONDS)
    assert beside["perf/generation_tokens_per_second"] == 0.8


def test_operations_of_a_model_that_is_counted_by_hand() -> None:
    matrices = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k, v, o, three of the MLP
    parameters = 2 * matrices + 10 * 4
    assert training_flops(SHAPE, 1) == 6 * (parameters + 2 * 4)
    assert training_flops(SHAPE, 8) == 6 * 8 * (parameters + 2 * 4 * 8)


def test_experts_that_no_token_visits_do_nothing() -> None:
    experts = replace(SHAPE, model_type="qwen3_moe", experts=4, active_experts=1)
    router = 2 * 4 * 4
    assert training_flops(experts, 1) == training_flops(SHAPE, 1) + 6 * router


def test_mfu_is_work_over_what_the_devices_could_do() -> None:
    found = Throughput(epochs=2, overlaps=False, shape=SHAPE, flops=1e6).metrics([GROUP], SECONDS)
    work = 2 * (training_flops(SHAPE, 8) + training_flops(SHAPE, 12))
    assert found["perf/mfu"] == pytest.approx(work / (0.5 * 1e6))


def test_the_peak_is_known_by_the_name_or_given(tmp_path: Path) -> None:
    assert peak_tflops(tmp_path) is None
    about = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    about.parent.mkdir(parents=True)
    about.write_text("Model: \t\t NVIDIA H100 PCIe\nIRQ: 1\n")
    assert peak_tflops(tmp_path) == 756.0
    about.write_text("Model: \t\t NVIDIA Something\n")
    assert peak_tflops(tmp_path) is None
    shape: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"intermediate_size": 8}))
    flags: dict[str, Any] = {"actor.model_name_or_path": str(tmp_path), "actor.num_gpus_per_node": 2}
    found = Throughput.of(fake_run(1, **flags, logger__peak_tflops=0.5).config)
    assert found.flops == 1e12
    assert found.shape is not None


def test_idleness_is_the_time_without_any_work() -> None:
    now = 0.0
    idle = Idleness(lambda: now)
    now = 1.0
    with idle.busy():
        now = 2.0
        with idle.busy():
            now = 3.0
        now = 4.0
        assert idle.share() == 0.25  # of four seconds the first
        now = 5.0
    now = 8.0
    assert idle.share() == 0.75
    assert idle.share() == 0.0  # no time has passed


def test_a_run_logs_its_rates() -> None:
    run = fake_run(4)
    run.run()
    assert run.sink.steps[0]["perf/tokens_per_second"] > 0
    assert 0 <= run.sink.steps[0]["perf/waiting_for_trainer"] <= 1
    assert "perf/mfu" not in run.sink.steps[0]
