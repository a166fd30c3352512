"""The whole trainer loop on fakes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import EvalRequest, SampleInfo
from openrlhf.launcher.signals import StoppedAfterSave
from openrlhf.launcher.trainer.loop import NoOptimizerStepError
from openrlhf.rollout.failure_share import RolloutFailedError
from support.trainer_fakes import FAILED, GOOD, FakeLearner, fake_run, half_right, unscored


def test_one_step_in_order() -> None:  # B063: weights reach the engines before anything is sampled
    run = fake_run(2)
    summary = run.run()
    assert run.learner.log == ["push", "generate", "generate", "prepare", "update", "push", "export"]
    assert run.learner.pushed == [0, 1]
    assert (summary.steps, summary.optimizer_steps) == (1, 1)
    assert run.learner.exported == ["/exported"]


@pytest.mark.parametrize(("prompts", "steps"), [(5, 3), (1, 1), (4, 2)])
def test_tail_batch_is_trained(prompts: int, steps: int) -> None:  # B049
    run = fake_run(prompts)
    assert run.run().steps == steps
    assert run.trained() == sorted(f"h{p}" for p in range(prompts) for _ in range(2))


def test_every_sample_is_trained_max_epochs_times() -> None:
    run = fake_run(4, train__batch_size=3, train__max_epochs=2, rollout__batch_size=4)
    summary = run.run()
    sizes = [len(part) for part in run.learner.prepared[0]]
    assert sizes == [3, 3, 2]
    assert [sorted(u["order"]) for u in run.learner.updates] == [[0, 1, 2]] * 2
    assert [u["members"] for u in run.learner.updates] == [None, "members 42 1 1"]
    assert summary.optimizer_steps == 6


def test_max_steps_counts_optimizer_steps() -> None:
    run = fake_run(40, train__batch_size=1, train__max_steps=6)
    assert run.run().optimizer_steps == 6
    assert [len(u["order"]) for u in run.learner.updates] == [4, 2]


def test_episodes_repeat_the_prompts() -> None:
    run = fake_run(2, train__num_episodes=3)
    assert run.run().steps == 3
    assert [position for position, _ in run.rollout.calls] == [0, 1] * 3


def test_actor_is_frozen_for_exactly_n_optimizer_steps() -> None:
    run = fake_run(6, train__batch_size=2, critic__freezing_steps=3)
    run.run()
    assert [u["freeze"] for u in run.learner.updates] == [[True, True], [True, False], [False, False]]


def test_rewards_are_centred_per_prompt() -> None:  # B016, B035
    run = fake_run(2, delay=lambda item: 5 if item.position == 0 else 0)
    run.run()
    assert sorted(s.reward for s in run.learner.prepared[0][0]) == [-0.5, -0.5, 0.5, 0.5]
    assert run.sink.steps[0]["train/reward"] == 0.5
    assert run.sink.steps[0]["train/group_reward_std"] == pytest.approx(0.5**0.5)


def test_failed_sample_is_left_out(caplog: pytest.LogCaptureFixture) -> None:  # B014, B064, B134
    def score(item: PromptItem, sample: int) -> SampleInfo:
        return FAILED if (item.position, sample) == (0, 1) else replace(GOOD, reward=float(sample), score=0.5)

    run = fake_run(2, score=score, rollout__n_samples_per_prompt=4, rollout__max_failed_fraction=0.2)
    run.run()
    assert run.sink.steps[0]["rollout/failed_samples"] == 1
    rewards = [s.reward for part in run.learner.prepared[0] for s in part if s.handle == "h0"]
    assert sorted(rewards) == pytest.approx([0 - 5 / 3, 2 - 5 / 3, 3 - 5 / 3])


def test_group_with_one_survivor_is_dropped() -> None:  # B064
    def score(item: PromptItem, sample: int) -> SampleInfo:
        return FAILED if item.position == 0 and sample == 0 else half_right(item, sample)

    run = fake_run(2, score=score, rollout__max_failed_fraction=0.5)
    run.run()
    assert run.trained() == ["h1", "h1"]
    assert run.sink.steps[0]["rollout/dropped_groups"] == 1


@pytest.mark.parametrize("pipeline", [{}, {"train.async_enable": True}])
def test_n15_every_failed_sample_is_counted_by_kind_whatever_becomes_of_its_group(pipeline: dict[str, Any]) -> None:
    """Of 8 prompts x 3: group 1 fails wholly, group 3 has one survivor, group 6 is filtered out, group 7 is trained."""
    failures = {
        (1, 0): "reward: boom",
        (1, 1): "timeout: slow",
        (1, 2): "reward: boom",
        (3, 1): "agent: boom",
        (3, 2): "agent: other",
        (6, 0): "engine: gone",
        (7, 0): "timeout: slow",
    }

    def score(item: PromptItem, sample: int) -> SampleInfo:
        failure = failures.get((item.position, sample))
        if failure is not None:
            return replace(FAILED, failure=failure)
        return GOOD if item.position == 6 else half_right(item, sample)

    flags = {
        "rollout.n_samples_per_prompt": 3,
        "rollout.max_failed_fraction": 0.9,
        "algo.dynamic_filtering_enable": True,
    }
    run = fake_run(8, score=score, **flags, **pipeline)
    run.run()
    names = ["", "_reward", "_timeout", "_agent", "_engine"]
    counted = {n: sum(step[f"rollout/failed_samples{n}"] for step in run.sink.steps) for n in names}
    assert counted == {"": 7.0, "_reward": 2.0, "_timeout": 2.0, "_agent": 2.0, "_engine": 1.0}
    assert sum(step["rollout/dropped_groups"] for step in run.sink.steps) == 2


def test_n15_samples_that_a_reward_model_fails_after_sampling_are_counted_too() -> None:
    """Colocated: the batch was complete without them; the group that they leave too small counts as dropped."""
    flags = {
        "reward.remote_url": None,
        "reward.model_name_or_path": "rm",
        "train.colocate_all": True,
        "rollout.max_failed_fraction": 0.9,
    }
    learner = FakeLearner(rewards=lambda sample: math.nan if sample.index == 1 else 1.0)
    run = fake_run(2, score=unscored, learner=learner, **flags)
    run.run()
    (step,) = run.sink.steps
    assert step["rollout/failed_samples"] == step["rollout/failed_samples_reward"] == 1.0
    assert step["rollout/dropped_groups"] == 1.0


def test_too_many_failures_end_the_run_with_the_first_text() -> None:  # B067
    run = fake_run(4, score=lambda item, sample: FAILED)
    with pytest.raises(RolloutFailedError, match="boom-3"):
        run.run()
    assert run.learner.updates == []


def test_everything_filtered_is_an_error_with_the_scores() -> None:  # B051
    run = fake_run(4, score=lambda item, sample: GOOD, algo__dynamic_filtering_enable=True)
    with pytest.raises(NoOptimizerStepError, match=r"4 filtered out.*\n1: 4"):
        run.run()
    assert len(run.rollout.calls) == 4


def test_filtered_prompts_are_replaced() -> None:  # B050, B052
    def score(item: PromptItem, sample: int) -> SampleInfo:
        return GOOD if item.position % 2 else half_right(item, sample)

    run = fake_run(6, score=score, algo__dynamic_filtering_enable=True)
    assert run.run().steps == 2
    assert run.trained() == ["h0", "h0", "h2", "h2", "h4", "h4"]
    assert run.sink.steps[0]["train/dynamic_filtering_pass_rate"] == pytest.approx(100 * 2 / 3)


def test_adaptive_kl_moves_after_the_step() -> None:
    run = fake_run(4, algo__kl__init_coef=0.1, algo__kl__target=0.1, algo__kl__horizon=100, learner=FakeLearner(kl=0.5))
    run.run()
    # 0.1 * (1 + clip(0.5 / 0.1 - 1, -0.2, 0.2) * 4 / 100)
    assert [step["kl_coef_seen"] for step in run.sink.steps] == pytest.approx([0.1, 0.1008])


def test_reward_model_scores_every_surviving_sample() -> None:
    run = fake_run(
        2,
        score=lambda item, sample: replace(GOOD, reward=None, score=None),
        reward__remote_url=None,
        reward__model_name_or_path="rm",
        learner=FakeLearner(rewards=lambda sample: float(sample.position)),
    )
    run.run()
    assert run.sink.steps[0]["train/reward"] == 0.5
    assert len(run.trained()) == 4


def test_evaluation_has_its_own_samples() -> None:  # B056, B076
    run = fake_run(4, eval_prompts=3, eval__steps=2, eval__n_samples_per_prompt=4, eval__temperature=0.25)
    run.run()
    assert run.rollout.evaluations == {EvalRequest(temperature=0.25, n_samples_per_prompt=4)}
    assert sum(1 for _, evaluation in run.rollout.calls if evaluation) == 3
    step, metrics = run.sink.evaluations[0]
    assert step == 2
    assert metrics["eval/eval_default_pass1"] == 0.5
    assert metrics["eval/eval_default_pass4"] == 1.0
    assert metrics["eval/eval_num_samples"] == 12


@pytest.mark.parametrize("pipeline", [{}, {"train.async_enable": True}])
def test_evaluation_before_the_first_step(pipeline: dict[str, Any], tmp_path: Path) -> None:
    flags = {"ckpt.path": str(tmp_path), "ckpt.save_steps": 1} | pipeline
    run = fake_run(4, eval_prompts=3, eval__at_start=True, eval__dataset="held_out", **flags)
    run.run()
    assert [step for step, _ in run.sink.evaluations] == [0]
    before_the_first_step = run.learner.log[: run.learner.log.index("update")]
    assert before_the_first_step.count("evaluate") == 3
    again = fake_run(8, eval_prompts=3, eval__at_start=True, ckpt__load_enable=True, **flags)
    again.sink.first = 3
    again.run()
    assert again.sink.evaluations == []  # the run has begun before


@pytest.mark.parametrize("pipeline", [{}, {"train.async_enable": True}])
def test_evaluation_takes_its_rewards_from_an_in_cluster_model(pipeline: dict[str, Any]) -> None:
    def score(item: PromptItem, sample: int) -> SampleInfo:
        return FAILED if sample == 3 else replace(GOOD, reward=None, score=None)

    flags = {"reward.remote_url": None, "reward.model_name_or_path": "rm", "eval.steps": 2}
    learner = FakeLearner(rewards=lambda sample: float(sample.position))
    run = fake_run(4, score=score, learner=learner, eval_prompts=3, eval__n_samples_per_prompt=4, **flags, **pipeline)
    run.run()
    _, metrics = run.sink.evaluations[0]
    assert metrics["eval/eval_default_pass1"] == 1.0  # the mean of 0, 1 and 2
    assert metrics["eval/eval_default_pass4"] == 2.0
    assert metrics["eval/eval_failed_samples"] == 3


def test_last_evaluation_happens_once() -> None:
    run = fake_run(6, eval_prompts=1, eval__steps=2)
    run.run()
    assert [step for step, _ in run.sink.evaluations] == [2, 3]


def test_phases_are_timed() -> None:
    run = fake_run(2)
    run.run()
    names = {"generation", "make_experience", "ppo_train", "broadcast", "step_total"}
    assert {f"timing/{n}" for n in names} <= run.sink.steps[0].keys()


def test_samples_are_logged_at_logging_steps() -> None:
    run = fake_run(8, logger__logging_steps=2)
    run.run()
    assert run.sink.samples == [(2, ["p2", "p2"]), (4, ["p6", "p6"])]


STEP = ["engines wake", "generate", "generate", "engines sleep", "prepare", "update", "push"]
USED_UP = ["engines wake", "engines sleep"]  # the prompts turn out to be used up
EVALUATION = ["engines wake", "evaluate", "engines sleep"]


def test_hybrid_engine_takes_turns_with_the_trainer() -> None:
    flags = {"train.colocate_all": True, "vllm.enable_sleep": True, "eval.steps": 2}
    run = fake_run(4, eval_prompts=1, **flags)
    run.run()
    assert run.learner.log == ["push", *STEP, *STEP, *EVALUATION, *USED_UP, "export"]
    run = fake_run(2, eval_prompts=1, **flags)
    run.run()
    assert run.learner.log == ["push", *STEP, *USED_UP, *EVALUATION, "export"]


def test_hybrid_engines_sleep_while_the_reward_model_works() -> None:
    flags: dict[str, Any] = {"train.colocate_all": True, "vllm.enable_sleep": True, "eval.steps": 1}
    run = fake_run(2, score=unscored, eval_prompts=1, reward__remote_url=None, reward__model_name_or_path="rm", **flags)
    run.run()
    step = [*STEP[:4], "reward", *STEP[4:]]
    assert run.learner.log == ["push", *step, *EVALUATION, "reward", *USED_UP, "export"]


def test_hybrid_engines_sleep_while_batches_of_an_earlier_run_are_trained_on(tmp_path: Path) -> None:
    first = fake_run(8, learner=FakeLearner(delay=lambda: 60), train__async_enable=True, ckpt__path=str(tmp_path))
    log_step = first.sink.log_step

    def log_and_stop(number: int, metrics: dict[str, float]) -> None:
        log_step(number, metrics)
        first.trainer.stop_after_step()

    first.sink.log_step = log_and_stop  # type: ignore[method-assign]
    with pytest.raises(StoppedAfterSave):
        first.run()
    flags: dict[str, Any] = {"train.colocate_all": True, "vllm.enable_sleep": True, "ckpt.load_enable": True}
    run = fake_run(8, ckpt__path=str(tmp_path), **flags)
    run.sink.first = 2
    run.run()
    assert run.learner.log[:7] == ["load", "push", "engines wake", "engines sleep", "prepare", "update", "push"]


def test_the_reference_moves_every_n_steps_before_a_checkpoint(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"ref__sync_steps": 2, "algo__kl__init_coef": 0.1, "ckpt__save_steps": 2}
    run = fake_run(5, rollout__batch_size=1, ckpt__path=str(tmp_path), **flags)
    run.run()
    step = ["update", "push"]
    events = [event for event in run.learner.log if event in (*step, "sync_reference", "save")]
    two = [*step, *step, "sync_reference", "save"]
    assert events == ["push", *two, *two, *step]
