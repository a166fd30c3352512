"""pass@k."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import Group
from openrlhf.launcher.trainer.evaluation import ToldPipeline, evaluate, evaluation_metrics
from support.trainer_fakes import FAILED, GOOD, fake_run


def group(name: str, rewards: list[float | None]) -> Group:
    samples = [FAILED if r is None else replace(GOOD, reward=r) for r in rewards]
    return Group(prompt=PromptItem(group_id="g", prompt="p", datasource=name), samples=samples, handle=None)


def test_datasets_are_kept_apart() -> None:
    metrics = evaluation_metrics([group("a", [1.0, 0.0]), group("b", [0.0, 0.0]), group("a", [1.0, 1.0])], 2)
    assert metrics["eval/eval_a_pass1"] == 0.75
    assert metrics["eval/eval_a_pass2"] == 1.0
    assert metrics["eval/eval_b_pass1"] == 0.0
    assert metrics["eval/eval_a_pass1_unbiased"] == 0.75
    assert metrics["eval/eval_a_pass2_unbiased"] == 1.0


def test_both_estimators_of_pass_at_k_are_named() -> None:
    metrics = evaluation_metrics([group("a", [1.0, 0.0, 0.0, 0.0]), group("a", [0.0] * 4)], 4)
    assert metrics["eval/eval_a_pass1"] == 0.125
    assert metrics["eval/eval_a_pass4"] == 0.5
    assert [metrics[f"eval/eval_a_pass{j}_unbiased"] for j in (1, 2, 4)] == [0.125, 0.25, 0.5]


def test_rewards_that_are_no_verdicts_have_no_combinatorial_estimator() -> None:
    metrics = evaluation_metrics([group("a", [0.5, -2.0])], 2)
    assert metrics["eval/eval_a_pass2"] == 0.5
    assert not [name for name in metrics if name.endswith("_unbiased")]


def test_repeated_prompts_do_not_merge() -> None:  # B035
    rows = [group("a", [1.0])] * 32 + [group("a", [0.0])] * 32
    assert evaluation_metrics(rows, 1)["eval/eval_a_pass1"] == 0.5


def test_failed_samples_are_left_out_and_counted() -> None:
    metrics = evaluation_metrics([group("a", [1.0, None])], 2)
    assert metrics["eval/eval_a_pass1"] == 1.0
    assert metrics["eval/eval_failed_samples"] == 1.0


def test_an_evaluation_alone_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    run = fake_run(1, eval_prompts=25, eval__n_samples_per_prompt=2)
    run.learner.pushed.append(0)
    pipeline = ToldPipeline(run.config, run.rollout, run.prompts)
    with caplog.at_level(logging.INFO):
        groups = asyncio.run(evaluate(run.config, pipeline, run.learner, run.trainer.parts.eval_prompts))
    assert [g.prompt.position for g in groups] == list(range(25))
    told = [message.partition(", ")[0] for message in caplog.messages]
    assert told == [f"evaluation: {n} of 25 prompts" for n in (3, 5, 8, 10, 13, 15, 18, 20, 23, 25)]
    assert caplog.messages[-1].endswith("0 s left")


def test_an_episode_with_branches_is_one_attempt() -> None:
    """Four attempts, of which the one that failed the task has six branches."""
    samples = [replace(GOOD, reward=1.0, episode=n) for n in range(3)] + [replace(GOOD, reward=0.0, episode=3)] * 6
    failed = [replace(FAILED, episode=4)] * 2
    group = Group(prompt=PromptItem(group_id="g", prompt="p", datasource="d"), samples=samples + failed, handle=None)
    metrics = evaluation_metrics([group], 4)
    assert metrics["eval/eval_d_pass1"] == 0.75
    assert metrics["eval/eval_d_pass2_unbiased"] == 1.0
    assert metrics["eval/eval_num_samples"] == 5
    assert metrics["eval/eval_failed_samples"] == 1
