"""The asynchronous pipeline on fakes: staleness, nothing lost, evaluation and checkpoints beside sampling."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.signals import StoppedAfterSave
from openrlhf.launcher.trainer.loop import NoOptimizerStepError
from openrlhf.rollout.failure_share import RolloutFailedError
from support.trainer_fakes import FAILED, GOOD, FakeLearner, FakeRun, fake_run, half_right


def async_run(prompts: int, *, seed: int = 0, **flags: Any) -> FakeRun:
    """Random durations of groups and updates, reproducible."""
    rng = random.Random(seed)
    learner = FakeLearner(delay=lambda: rng.randint(0, 40))
    return fake_run(
        prompts, delay=lambda item: rng.randint(0, 25), learner=learner, **{"train.async_enable": True}, **flags
    )


def handles(prompts: int, n: int = 2) -> list[str]:
    return sorted(f"h{p}" for p in range(prompts) for _ in range(n))


def run_until(run: FakeRun, step: int) -> None:
    """Save and stop after this step, as at the warning of a job scheduler."""
    log_step = run.sink.log_step

    def log_and_stop(number: int, metrics: dict[str, float]) -> None:
        log_step(number, metrics)
        if number == step:
            run.trainer.stop_after_step()

    run.sink.log_step = log_and_stop  # type: ignore[method-assign]
    with pytest.raises(StoppedAfterSave):
        run.run()


def staleness(run: FakeRun) -> float:
    return max(step["rollout/staleness_max"] for step in run.sink.steps)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("bound", "queue"), [(0, 1), (1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("in_flight", [None, 1, 7])
@pytest.mark.parametrize("seed", range(3))
def test_staleness_is_bounded_and_nothing_is_lost(
    partial: bool, bound: int, queue: int, in_flight: int | None, seed: int
) -> None:
    run = async_run(
        21,
        seed=seed,
        train__max_staleness=bound,
        train__async_queue_size=queue,
        train__partial_rollout_enable=partial,
        rollout__vllm_generate_batch_size=in_flight,
    )
    summary = run.run()
    assert summary.steps == 11
    assert run.trained() == handles(21)
    assert staleness(run) <= bound
    assert partial or run.learner.pushed_while_busy == 0
    assert run.rollout.cancelled == 0


def test_sampling_and_training_overlap() -> None:
    run = fake_run(12, delay=lambda item: 9, learner=FakeLearner(delay=lambda: 20), train__async_enable=True)
    run.run()
    assert run.learner.log[: run.learner.log.index("update")].count("generate") == 4
    assert staleness(run) == 1


def test_default_bound_is_the_queue_size() -> None:
    run = fake_run(40, learner=FakeLearner(delay=lambda: 50), train__async_enable=True, train__async_queue_size=3)
    run.run()
    assert staleness(run) == 3


def test_partial_rollout_pushes_while_groups_run() -> None:
    flags: dict[str, Any] = {"train.async_enable": True, "train.partial_rollout_enable": True}
    run = fake_run(12, delay=lambda item: 30, learner=FakeLearner(delay=lambda: 5), **flags)
    run.run()
    assert run.learner.pushed_while_busy > 0
    assert run.trained() == handles(12)


def test_episodes_go_on_without_a_break_and_tails_are_trained() -> None:  # B049
    run = async_run(5, train__num_episodes=3)
    assert run.run().steps == 9
    assert run.trained() == sorted(handles(5) * 3)


def test_nothing_is_sampled_that_max_steps_leaves_untrained() -> None:
    run = async_run(400, train__max_steps=6, train__async_queue_size=4, rollout__vllm_generate_batch_size=32)
    assert run.run().optimizer_steps == 6
    assert len(run.rollout.calls) == 12
    assert len(run.trained()) == 24


def test_filtered_prompts_are_replaced() -> None:  # B050
    def score(item: PromptItem, sample: int) -> Any:
        return GOOD if item.position % 2 else half_right(item, sample)

    run = fake_run(12, score=score, train__async_enable=True, algo__dynamic_filtering_enable=True)
    assert run.run().steps == 3
    assert run.trained() == sorted(f"h{p}" for p in range(0, 12, 2) for _ in range(2))


PASSES = [p for p in range(40) if random.Random(f"passes {p}").random() < 0.4]


def picky(item: PromptItem, sample: int) -> Any:
    """Groups that pass the filter, groups that do not, and a failed sample here and there."""
    if (item.position, sample) in ((PASSES[2], 3), (PASSES[5], 0)):
        return FAILED
    return half_right(item, sample) if item.position in PASSES else GOOD


@pytest.mark.parametrize("pipeline", [{}, {"train.async_enable": True}])
@pytest.mark.parametrize("in_flight", [None, 2, 9])
@pytest.mark.parametrize("seed", range(4))
def test_filtered_batches_have_exactly_their_size(pipeline: dict[str, Any], in_flight: int | None, seed: int) -> None:
    # B050: only the last batch of an episode may be smaller, whatever finishes when and however many are refilled
    rng = random.Random(seed)
    flags: dict[str, Any] = {
        "algo.dynamic_filtering_enable": True,
        "rollout.batch_size": 3,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_failed_fraction": 0.2,
        "rollout.vllm_generate_batch_size": in_flight if pipeline or in_flight != 9 else None,
        "train.batch_size": 12,
        "train.num_episodes": 2,
    }
    run = fake_run(40, score=picky, delay=lambda item: rng.randint(0, 30), **pipeline, **flags)
    run.run()
    groups = [len({s.handle for part in batch for s in part}) for batch in run.learner.prepared]
    size = len(PASSES)
    assert groups == ([3] * (size // 3) + [size % 3] * (size % 3 > 0)) * 2
    wanted = sorted(f"h{p}" for p in PASSES for _ in range(4 - (p in (PASSES[2], PASSES[5]))))
    assert run.trained() == sorted(wanted * 2)
    if not pipeline:  # in prompt order
        firsts = [min(int(s.handle[1:]) for part in batch for s in part) for batch in run.learner.prepared]
        assert firsts == PASSES[::3] * 2


def test_everything_filtered_is_an_error_with_the_scores(caplog: pytest.LogCaptureFixture) -> None:  # B051
    run = fake_run(4, score=lambda item, sample: GOOD, train__async_enable=True, algo__dynamic_filtering_enable=True)
    with pytest.raises(NoOptimizerStepError, match=r"4 filtered out.*\n1: 4"):
        run.run()
    assert "4 groups were outside --algo.dynamic_filtering_range (0.0, 1.0)" in caplog.text


def test_a_failure_while_sampling_ends_the_run() -> None:  # B067
    def score(item: PromptItem, sample: int) -> Any:
        return FAILED if item.position >= 6 else half_right(item, sample)

    run = async_run(20)
    run.rollout.score = score
    with pytest.raises(RolloutFailedError, match="boom-3"):
        run.run()
    assert run.learner.exported == []


def test_evaluation_runs_beside_the_next_update_on_one_version(tmp_path: Path) -> None:
    run = async_run(16, eval_prompts=3, eval__steps=2, ckpt__path=str(tmp_path))
    run.rollout.delay = lambda item: 9
    run.run()
    assert [step for step, _ in run.sink.evaluations] == [2, 4, 6, 8]
    assert sum(evaluation for _, evaluation in run.rollout.calls) == 12
    pushes = [place for place, entry in enumerate(run.learner.log) if entry == "push"]
    third = run.learner.log[pushes[2] : pushes[3]]
    assert (third.count("evaluate"), third.count("update")) == (3, 1)
    assert run.learner.pushed_while_busy == 0


def test_a_checkpoint_waits_for_its_metric(tmp_path: Path) -> None:
    run = async_run(16, eval_prompts=3, eval__steps=2, ckpt__path=str(tmp_path), ckpt__save_steps=2)
    run.run()
    assert (tmp_path / "global_step4" / "metric.json").read_text().count("0.5") == 1


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("bound", [1, 3])
def test_resumed_run_trains_on_what_was_sampled_ahead(tmp_path: Path, stop: int, bound: int, partial: bool) -> None:
    flags: dict[str, Any] = {
        "ckpt.path": str(tmp_path),
        "train.async_queue_size": bound,
        "train.partial_rollout_enable": partial,
        "rollout.vllm_generate_batch_size": 5,
        "train.num_episodes": 2,
    }
    first = async_run(9, seed=stop, **flags)
    first.learner.delay = lambda: 60

    run_until(first, stop)
    assert (tmp_path / f"global_step{stop}" / "state" / "untrained.pkl").exists()
    second = async_run(9, seed=stop + 100, **flags, **{"ckpt.load_enable": True})
    second.sink.first = stop + 1
    assert second.run().steps == 10
    assert sorted(first.trained() + second.trained()) == sorted(handles(9) * 2)
    assert staleness(second) <= bound


def test_a_smaller_bound_is_refused_on_resume_when_it_cannot_be_kept(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"ckpt.path": str(tmp_path), "train.async_queue_size": 3}
    first = async_run(20, **flags)
    first.learner.delay = lambda: 80
    run_until(first, 1)
    second = async_run(20, ckpt__load_enable=True, train__max_staleness=0, **flags)
    with pytest.raises(ValueError, match=r"--train.max_staleness 0: resume with the value of then"):
        second.run()


def test_a_synchronous_run_can_go_on_from_an_asynchronous_checkpoint(tmp_path: Path) -> None:
    first = async_run(12, ckpt__path=str(tmp_path))
    first.learner.delay = lambda: 60
    run_until(first, 1)
    second = fake_run(12, ckpt__path=str(tmp_path), ckpt__load_enable=True)
    second.sink.first = 2
    second.run()
    assert sorted(first.trained() + second.trained()) == handles(12)


def test_n11_a_run_ends_whatever_ends_its_sampling() -> None:
    run = async_run(4)

    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    run.trainer.pipeline._sample = cancelled  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="sampling was cancelled"):
        run.run(10)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_n01_a_small_share_of_failures_never_ends_a_run(partial: bool, seed: int) -> None:
    """One sample of every batch of 32 fails, in whatever order groups finish; five of 32 are too many."""

    def failing(every: int) -> FakeRun:
        return async_run(
            50,
            seed=seed,
            score=lambda item, i: FAILED if item.position % every == 0 and i == 0 else half_right(item, i),
            rollout__batch_size=8,
            rollout__n_samples_per_prompt=4,
            rollout__vllm_generate_batch_size=16,
            train__batch_size=32,
            train__max_staleness=2,
            train__async_queue_size=2,
            train__partial_rollout_enable=partial,
        )

    run = failing(every=8)
    run.run()
    assert len(run.trained()) == 50 * 4 - 7
    with pytest.raises(RolloutFailedError, match="boom-3"):
        failing(every=1).run()
