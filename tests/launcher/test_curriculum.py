"""The curriculum: which prompts are drawn, what is known of them, and that a resumed run draws the same."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.data.curriculum import CurriculumSampler, Histories
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.data.sampler import PromptSampler
from openrlhf.launcher.environments import sampler as run_sampler
from openrlhf.launcher.samples import SampleInfo
from support.trainer_fakes import FAILED, GOOD, FakeRun, fake_run


class Numbers:
    """Prompts that are their own numbers, of one source; `rows`: which row each of them is."""

    def __init__(self, size: int, rows: list[int] | None = None) -> None:
        self.rows = list(range(size)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        return PromptItem(group_id=f"e{episode}-p{index}", prompt=str(index), position=position, episode=episode)

    def places(self) -> Any:
        return ["numbers.jsonl"], np.zeros(len(self), np.int32), np.array(self.rows, np.int64)


def sampler(size: int = 10, rows: list[int] | None = None, **config: Any) -> CurriculumSampler:
    options: dict[str, Any] = {"curriculum": "window", "curriculum_half_life": 1e9, **config}
    return CurriculumSampler(Numbers(size, rows), CurriculumConfig(**options), seed=1)


def done(sampler: CurriculumSampler, item: PromptItem, *scores: float | None) -> None:
    """A group of episodes with these scores is finished; None: a failed one."""
    samples = [FAILED if s is None else replace(GOOD, score=s, reward=0.0) for s in scores]
    sampler.seen(item, samples)


def known(sampler: CurriculumSampler, results: dict[int, tuple[int, int]]) -> None:
    """Let rows have (tries, passes) as from the rollout batch before."""
    rows = np.array(list(results), np.int64)
    tries, passes = np.array(list(results.values()), np.float64).T
    sampler.histories.take(rows, tries, passes, now=1, half_life=sampler.config.curriculum_half_life)
    sampler.batches = 0
    sampler.settle()


def drawn(sampler: CurriculumSampler, count: int) -> list[int]:
    """Prompts of `count` draws, a rollout batch each, without any result."""
    found = []
    while len(found) < count:
        items = sampler.next(1)
        if not items:
            sampler.start_episode(sampler.episode + 1)
            continue
        done(sampler, items[0], None)
        sampler.settle()
        found.append(int(items[0].prompt))
    return found


def test_uniform_is_the_plain_order() -> None:
    plain = run_sampler(Numbers(5), 3, None, CurriculumConfig())  # type: ignore[arg-type]
    assert type(plain) is PromptSampler
    assert [i.group_id for i in plain.next(9)] == [i.group_id for i in PromptSampler(Numbers(5), seed=3).next(9)]


def test_an_episode_has_as_many_draws_as_prompts_and_every_draw_its_own_group() -> None:
    it = sampler(4)
    items = it.next(3) + it.next(3)
    assert [i.position for i in items] == [0, 1, 2, 3]
    it.start_episode(1)
    items += it.next(100)
    assert len({i.group_id for i in items}) == 8
    assert items[-1].episode == 1


def test_a_window_draws_what_is_neither_easy_nor_hard() -> None:
    it = sampler(6, curriculum_window=(0.3, 0.7), curriculum_uniform=1e-9)
    known(it, {0: (8, 0), 1: (8, 8), 2: (8, 4), 3: (8, 3), 4: (8, 1), 5: (8, 7)})
    assert Counter(drawn(it, 200)).keys() == {2, 3}


def test_without_any_prompt_in_the_window_the_order_is_uniform() -> None:
    it = sampler(6, curriculum_window=(0.2, 0.8), curriculum_uniform=1e-9)
    known(it, dict.fromkeys(range(6), (8, 8)))
    assert sorted(drawn(it, 6)) == list(range(6))


def test_draws_by_weight_have_their_shares() -> None:
    """E[p (1 - p)] of Beta(1/2 + k, 1/2 + n - k); 4,000 draws are within four deviations."""
    it = sampler(4, curriculum="prioritised", curriculum_uniform=1e-9)
    results = {0: (8, 4), 1: (8, 1), 2: (8, 8)}  # 3 was never tried
    known(it, results)
    total = {row: results.get(row, (0, 0)) for row in range(4)}
    weights = {row: (k + 0.5) * (n - k + 0.5) / ((n + 1) * (n + 2)) for row, (n, k) in total.items()}
    count, found = 4_000, Counter(drawn(it, 4_000))
    for row, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(found[row] / count - share) < 4 * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize("curriculum", ["window", "prioritised"])
def test_rows_that_a_blend_holds_twice_share_their_history(curriculum: str) -> None:
    it = sampler(rows=[0, 1, 0, 2], curriculum=curriculum)
    assert len(it.histories.tried) == 3
    for place in (0, 2):
        item = replace(it.dataset.item(place), group_id=f"x{place}")
        it._under_way[item.group_id] = place
        done(it, item, 1.0, 0.0)
    it.settle()
    assert it.histories.tried.tolist() == [4, 0, 0]
    assert it.histories.passed.tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("threshold", "episodes", "tries", "passes"),
    [
        (0.5, [[0.7, 0.1], [0.6, 0.6]], 2, 1),  # means of branches: 0.4 and 0.6
        (0.3, [[0.7, 0.1], [0.6, 0.6]], 2, 2),
        (0.5, [[0.5], [0.49], [None]], 2, 1),
        (0.5, [[None, 1.0], [None, None]], 1, 1),
        (0.5, [[None]], 0, 0),
    ],
)
def test_an_episode_passes_by_the_mean_score_of_its_branches(
    threshold: float, episodes: Any, tries: int, passes: int
) -> None:
    it = sampler(1, curriculum_pass=threshold)
    (item,) = it.next(1)
    samples = [
        replace(FAILED, episode=n) if score is None else replace(GOOD, score=score, reward=9.0, episode=n)
        for n, branches in enumerate(episodes)
        for score in branches
    ]
    it.seen(item, samples)
    it.settle()
    assert (it.histories.tried[0], it.histories.passed[0]) == (tries, passes)
    assert it.histories.last[0] == (1 if tries else 0)


def test_evidence_halves_with_time() -> None:
    known = Histories.empty(2)
    known.take(np.array([0]), np.array([8.0]), np.array([8.0]), now=1, half_life=2.0)
    assert known.belief(now=1, half_life=2.0)[0][0] == 8.5
    assert [float(v[0]) for v in known.belief(now=5, half_life=2.0)] == [2.5, 0.5]
    known.take(np.array([0]), np.array([4.0]), np.array([0.0]), now=5, half_life=2.0)
    assert [float(v[0]) for v in known.belief(now=5, half_life=2.0)] == [2.5, 4.5]
    assert (known.tried[0], known.passed[0], known.last[0]) == (12, 8, 5)
    assert [float(v[1]) for v in known.belief(now=5, half_life=2.0)] == [0.5, 0.5]


def test_results_count_from_the_next_rollout_batch_on_in_whatever_order_they_come() -> None:
    states = []
    for reverse in (False, True):
        it = sampler(8)
        items = it.next(6)
        for item in sorted(items, key=lambda i: i.position, reverse=reverse):
            done(it, item, 1.0, float(item.position % 2))
        assert not it.histories.tried.any()
        it.settle()
        it.next(2)
        states.append(it.state_dict())
    assert states[0] == states[1]


def test_metrics_tell_what_was_chosen() -> None:
    it = sampler(8, curriculum="prioritised", curriculum_uniform=0.25)
    known(it, {row: (8, row) for row in range(4)})
    it.next(8)
    it.settle()
    metrics = it.metrics()
    assert metrics["curriculum/coverage"] == 0.5
    assert metrics["curriculum/chosen_uniform"] == 0.25
    parts = [metrics[f"curriculum/chosen_{name}"] for name in ("hard", "medium", "easy", "new")]
    assert sum(parts) == 1.0
    estimates = [(row + 0.5) / 9 for row in range(4)]
    assert metrics["curriculum/estimate_mean"] == pytest.approx(sum(estimates) / 4, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 12),
    share=st.sampled_from([0.1, 0.34, 0.5, 1.0]),
    curriculum=st.sampled_from(["window", "prioritised"]),
    flight=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_no_prompt_waits_longer_than_the_uniform_order_takes(
    size: int, share: float, curriculum: str, flight: int, seed: int
) -> None:
    """Whatever the results: two rounds of the uniform order, of which a prompt may be first and last, each step of
    which takes 1 / share draws; then what was under way and passed over. None is under way twice before all are."""
    it = CurriculumSampler(Numbers(size), CurriculumConfig(curriculum=curriculum, curriculum_uniform=share), seed)  # type: ignore[arg-type]
    chance, under_way, waited = random.Random(seed), [], dict.fromkeys(range(size), 0)
    for _ in range(int(4 * size / share)):
        if not (items := it.next(1)):
            it.start_episode(it.episode + 1)
            items = it.next(1)
        prompt = int(items[0].prompt)
        assert prompt not in [int(i.prompt) for i in under_way] or len({i.prompt for i in under_way}) == size
        under_way.append(items[0])
        busy = {int(i.prompt) for i in under_way}
        waited = {row: 0 if row in busy else n + 1 for row, n in waited.items()}
        assert max(waited.values()) <= math.ceil((2 * size + flight) / share)
        if len(under_way) >= flight:
            done(it, under_way.pop(chance.randrange(len(under_way))), *(chance.choice([0.0, 1.0, None]),) * 4)
            it.settle()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), stop=st.integers(0, 30), curriculum=st.sampled_from(["window", "prioritised"]))
def test_a_state_goes_on_as_if_nothing_had_happened(size: int, stop: int, curriculum: str) -> None:
    def go_on(it: CurriculumSampler, draws: range, waiting: list[PromptItem]) -> list[str]:
        found = []
        for number in draws:
            if not (items := it.next(1)):
                it.start_episode(it.episode + 1)
                items = it.next(1)
            waiting += items
            found.append(items[0].group_id)
            if number % 3 == 2:
                for item in waiting[:2]:
                    done(it, item, 1.0, float(int(item.prompt) % 2), 0.0)
                del waiting[:2]
            if number % 5 == 4:
                it.settle()
        return found

    whole, waiting = sampler(size, curriculum=curriculum), []
    go_on(whole, range(stop), waiting)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = sampler(size, curriculum=curriculum)
    resumed.load_state_dict(state)
    assert json.loads(json.dumps(resumed.state_dict())) == state
    rest = range(stop, stop + 20)
    assert go_on(resumed, rest, list(waiting)) == go_on(whole, rest, list(waiting))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"size": 4}, "--data.prompt_dataset"),
        ({"seed": 7}, "--train.seed"),
        ({"curriculum": None}, "written without a curriculum"),
    ],
)
def test_another_runs_state_is_refused(state: dict[str, Any], words: str) -> None:
    saved = {name: value for name, value in (sampler(3).state_dict() | state).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        sampler(3).load_state_dict(saved)


def test_a_plain_order_refuses_the_state_of_a_curriculum() -> None:
    with pytest.raises(ValueError, match="written with a curriculum"):
        PromptSampler(Numbers(3), seed=1).load_state_dict(sampler(3).state_dict())


@pytest.mark.parametrize("name", ["out/history.jsonl", "history.parquet"])
def test_every_history_is_written_at_the_end(tmp_path: Path, name: str) -> None:
    it = sampler(3, curriculum_export=str(tmp_path / name))
    known(it, {1: (4, 3)})
    it.close()
    path = tmp_path / name
    rows = (
        pq.read_table(path).to_pylist()
        if path.suffix == ".parquet"
        else [json.loads(line) for line in path.read_text().splitlines()]
    )
    empty = {"dataset": "numbers.jsonl", "tries": 0, "passes": 0, "estimate": 0.5, "last_step": 0}
    tried = {"dataset": "numbers.jsonl", "tries": 4, "passes": 3, "estimate": 0.7, "last_step": 1}
    assert rows == [empty | {"row": 0}, tried | {"row": 1}, empty | {"row": 2}]


# --- with the trainer -------------------------------------------------------------------------------------------------

PROMPTS, STEPS = 9, 8


def by_number(item: PromptItem, sample: int) -> SampleInfo:
    """The higher the number of the prompt, the more of its samples pass; the last one always fails."""
    return FAILED if int(item.prompt) == PROMPTS - 1 else all_fine(item, sample)


def all_fine(item: PromptItem, sample: int) -> SampleInfo:
    """The same, without a prompt that fails."""
    value = float(sample < int(item.prompt) % 5)
    return replace(GOOD, reward=value, score=value)


def curriculum_run(folder: Path, score: Any = by_number, **flags: Any) -> FakeRun:
    def order(config: TrainPPOConfig) -> CurriculumSampler:
        return CurriculumSampler(Numbers(PROMPTS), config.data, config.train.seed)

    defaults = {
        "data.curriculum": "prioritised",
        "data.curriculum_half_life": 3.0,
        "ckpt.path": str(folder),
        "train.num_episodes": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_failed_fraction": 1.0,
        "train.batch_size": 8,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": (0.0, 1.0),
    }
    return fake_run(0, order=order, score=score, **(defaults | flags))


@pytest.mark.parametrize("curriculum", ["window", "prioritised"])
@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_run_that_is_interrupted_after_any_step_draws_the_same(tmp_path: Path, stop: int, curriculum: str) -> None:
    """With a filter that draws more prompts for those that it rejects, and groups that finish out of order."""
    flags = {"data.curriculum": curriculum, "train.max_steps": STEPS}
    whole = curriculum_run(tmp_path / "whole", **flags)
    whole.run()
    first = curriculum_run(tmp_path / "c", **flags | {"ckpt.save_steps": stop, "train.max_steps": stop})
    first.rollout.delay = lambda item: (7 * item.position) % 5
    first.run()
    second = curriculum_run(tmp_path / "c", **flags | {"ckpt.load_enable": True})
    second.rollout.delay = lambda item: 9 - item.position
    second.sink.first = stop + 1
    second.run()
    assert first.rollout.calls + second.rollout.calls == whole.rollout.calls
    prepared = [[s.handle for part in batch for s in part] for batch in whole.learner.prepared]
    resumed = [[s.handle for part in batch for s in part] for r in (first, second) for batch in r.learner.prepared]
    assert resumed == prepared
    assert second.prompts.state_dict() == whole.prompts.state_dict()


def test_what_is_drawn_does_not_depend_on_what_finishes_first(tmp_path: Path) -> None:
    states = []
    for delay in (lambda item: 0, lambda item: (7 * item.position) % 5, lambda item: 9 - item.position):
        run = curriculum_run(tmp_path, **{"train.max_steps": STEPS})
        run.rollout.delay = delay
        run.run()
        states.append(run.prompts.state_dict())
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_an_asynchronous_run_counts_every_try_once(tmp_path: Path, stop: int) -> None:
    flags = {
        "train.async_enable": True,
        "train.async_queue_size": 2,
        "rollout.vllm_generate_batch_size": 4,
        "algo.dynamic_filtering_enable": False,
    }
    first = curriculum_run(tmp_path, all_fine, **flags, **{"ckpt.save_steps": stop, "train.max_steps": stop})
    first.rollout.delay = lambda item: (7 * item.position) % 5
    first.run()
    second = curriculum_run(tmp_path, all_fine, **flags, **{"ckpt.load_enable": True})
    second.sink.first = stop + 1
    second.rollout.delay = lambda item: (5 * item.position) % 7
    second.run()
    state = second.prompts.state_dict()["curriculum"]
    assert (state["draws"], state["under_way"], state["results"]) == (4 * PROMPTS, {}, [])
    assert second.prompts.histories.tried.sum() == 4 * state["draws"]


def test_metrics_and_histories_of_a_run(tmp_path: Path) -> None:
    run = curriculum_run(tmp_path / "c", **{"data.curriculum_export": str(tmp_path / "h.jsonl"), "train.max_steps": 5})
    run.run()
    assert all(step["curriculum/coverage"] > 0 for step in run.sink.steps)
    rows = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert len(rows) == PROMPTS
    assert all(row["passes"] == row["tries"] * (row["row"] % 5) / 4 for row in rows[:-1])
    assert rows[-1]["tries"] == 0


def test_a_million_prompts_are_chosen_in_arrays() -> None:
    """No object per prompt: beside the arrays of numbers there is nothing of that length."""
    size = 1_000_000
    it = CurriculumSampler(Numbers(size), CurriculumConfig(curriculum="prioritised"), seed=0)
    items = it.next(64)
    for item in items:
        done(it, item, 1.0, 0.0)
    it.settle()
    assert len({item.prompt for item in it.next(64)} | {item.prompt for item in items}) == 128
    assert it.nbytes <= 80 * size
    assert len(json.dumps(it.state_dict())) < 10_000
