"""Several environments in one run: which prompts are whose, ratios, and environments that fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.environments import EnvironmentTable, load_environments, read_environments
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import DataConfig, TrainPPOConfig
from openrlhf.launcher.data.blend import quotas
from openrlhf.launcher.data.prompts import PromptDataset, load_prompts
from openrlhf.launcher.data.sampler import dealt, order
from openrlhf.launcher.environments import EnvironmentSampler
from openrlhf.launcher.flags import build
from openrlhf.launcher.preflight import check_scored
from openrlhf.rollout.failure_share import RolloutFailedError
from support.agent_rollouts import WorkerRollout, worker_run
from support.launcher_tokenizer import byte_tokenizer
from support.trainer_fakes import FAILED, GOOD, FakeRun

AGENTS = """
from openrlhf.utils.agent import AgentInstanceBase

class Good(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {"rewards": float("yes" in states["action_text"]), "environment_feedback": "", "done": True}

class Bad(AgentInstanceBase):
    async def step(self, states, **kwargs):
        raise RuntimeError("no browser")
"""
TOML = '[a]\nagent = "agents.py:Good"\n{a}\n[b]\nagent = "agents.py:Good"\n{b}\n[bad]\nagent = "agents.py:Bad"\n{bad}\n'


def table_of(folder: Path, *, a: str = "", b: str = "", bad: str = "", top: str = "") -> EnvironmentTable:
    (folder / "agents.py").write_text(AGENTS)
    (folder / "table.toml").write_text(f"{top}\n" + TOML.format(a=a, b=b, bad=bad))
    table = read_environments(str(folder / "table.toml"))
    assert table is not None
    return table


def rows(folder: Path, counts: dict[str, int], column: str = "datasource") -> str:
    names = [name for name, count in counts.items() for _ in range(count)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}{i}", column: n}) + "\n" for i, n in enumerate(names)))
    return str(path)


def load(path: str, table: EnvironmentTable, **options: Any) -> PromptDataset:
    data = DataConfig(prompt_dataset=path, input_key="prompt", **options)
    return load_prompts(data, byte_tokenizer(), environments=table)


def drawn(sampler: EnvironmentSampler, episode: int = 0) -> list[str]:
    sampler.start_episode(episode)
    return [item.environment for item in sampler.next(10**6)]


def test_every_row_has_its_environment(tmp_path: Path) -> None:
    table = table_of(tmp_path, top='column = "task"')
    prompts = load(rows(tmp_path, {"a": 1, "bad": 2, "b": 1}, "task"), table)
    assert [prompts.item(i).environment for i in range(4)] == ["a", "bad", "bad", "b"]
    assert prompts.strata is not None
    assert prompts.strata.tolist() == [0, 2, 2, 1]


def test_an_unknown_environment_is_an_error_with_row_and_names(tmp_path: Path) -> None:
    path = rows(tmp_path, {"a": 2, "maths": 1})
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3, field 'datasource': 'maths' is no env.*are a, b, bad"):
        load(path, table_of(tmp_path))
    with pytest.raises(ValueError, match=r"line 1, field 'task': 'None' is no environment"):
        load(path, table_of(tmp_path, top='column = "task"'))


def test_a_ratio_without_rows_is_an_error_and_a_table_without_ratios_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path, {"a": 2, "b": 1})
    with pytest.raises(ValueError, match=r"no row is of environment 'bad' \(field 'datasource'\).*which has a ratio"):
        load(path, table_of(tmp_path, a="ratio = 1", b="ratio = 1", bad="ratio = 1"))
    assert len(load(path, table_of(tmp_path))) == 3
    assert "no row is of environment 'bad'" in caplog.text


def test_ratios_are_exact_in_an_episode_and_in_every_part_of_it(tmp_path: Path) -> None:
    table = table_of(tmp_path, a="ratio = 5", b="ratio = 3", bad="ratio = 2")
    prompts = load(rows(tmp_path, {"a": 30, "b": 60, "bad": 4}), table)
    sampler = EnvironmentSampler(prompts, 7, table)
    names = drawn(sampler)
    assert len(names) == 200
    assert names == drawn(EnvironmentSampler(prompts, 7, table))
    orders = [order(200, seed=7, episode=episode, strata=prompts.strata).tolist() for episode in (0, 1)]
    assert orders[0] != orders[1]
    for episode in (names, drawn(sampler, 1)):
        for name, share in (("a", 0.5), ("b", 0.3), ("bad", 0.2)):
            assert episode.count(name) == 200 * share
            for n in range(200):
                assert abs(episode[:n].count(name) - share * n) < 1
    sampler.start_episode(0)
    assert {item.prompt for item in sampler.next(200)} == {prompts.item(i).prompt for i in range(200)}
    assert len({prompts.item(i).prompt for i in range(200)}) == 94


def test_an_evaluation_is_not_mixed(tmp_path: Path) -> None:
    table = table_of(tmp_path, a="ratio = 5", b="ratio = 3", bad="ratio = 2")
    path = rows(tmp_path, {"a": 3, "b": 1})
    data = DataConfig(prompt_dataset=None, input_key="prompt")
    assert [i.environment for i in load_prompts(data, byte_tokenizer(), dataset=path, environments=table).items()] == [
        "a",
        "a",
        "a",
        "b",
    ]


SIZES = st.lists(st.tuples(st.integers(1, 200), st.floats(0.05, 10)), min_size=1, max_size=5)


@given(SIZES)
def test_quotas_are_exact_to_one_prompt_and_lose_none(drawn: list[tuple[int, float]]) -> None:
    sizes, ratios = zip(*drawn, strict=True)
    counts = quotas(sizes, ratios, most=10**9)
    total = sum(counts)
    for size, ratio, count in zip(sizes, ratios, counts, strict=True):
        assert abs(count - total * ratio / sum(ratios)) <= 1
        assert count >= size
    assert sum(quotas(sizes, ratios, most=7)) <= 7


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 99))
def test_an_order_with_strata_is_a_permutation(strata: list[int], seed: int) -> None:
    drawn = order(len(strata), seed=seed, episode=0, strata=np.array(strata)).tolist()
    assert sorted(drawn) == list(range(len(strata)))
    kinds = [strata[place] for place in drawn]
    assert sorted(kinds) == sorted(strata)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_kinds_are_dealt_evenly(counts: list[int]) -> None:
    places = dealt(tuple(counts))
    had = np.cumsum(places[:, None] == np.arange(len(counts)), axis=0)
    share = np.outer(np.arange(1, len(places) + 1), np.array(counts) / sum(counts))
    assert had[-1].tolist() == counts
    assert np.abs(had - share).max() < 1


def run_of(folder: Path, table: EnvironmentTable, counts: dict[str, int], **flags: Any) -> FakeRun:
    options = {
        "data.prompt_dataset": rows(folder, counts),
        "data.input_key": "prompt",
        "train.agent_func_path": table.file,
        "reward.remote_url": None,
        "rollout.batch_size": 8,
        "train.batch_size": 16,
    }
    return worker_run(load_environments(table, None), table=table, **(options | flags))


def groups_of(run: FakeRun) -> list[str]:
    """The environments of all groups, as they finished."""
    assert isinstance(run.rollout, WorkerRollout)
    return [group.prompt.environment for group in run.rollout.groups]


COUNTS = {"a": 100, "b": 100, "bad": 40}


@pytest.mark.parametrize("flags", [{}, {"train.async_enable": True}], ids=["sync", "async"])
def test_an_environment_that_always_fails_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any]
) -> None:
    run = run_of(tmp_path, table_of(tmp_path, bad="max_failure_share = 0.5"), COUNTS, **flags)
    summary = run.run()
    last = run.sink.steps[-1]
    tried = groups_of(run).count("bad")
    assert summary.steps == 25
    assert 8 <= tried <= 20
    assert (last["environment/bad/off"], last["environment/bad/failed_share"]) == (1, 1)
    assert last["environment/bad/skipped_prompts"] == 40 - tried
    assert (last["environment/a/off"], last["environment/a/failed_share"]) == (0, 0)
    assert (
        sum(step["source/bad/failed_samples"] for step in run.sink.steps if "source/bad/failed_samples" in step) >= 16
    )
    (said,) = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    assert said.startswith("environment 'bad' is switched off: 16 of the 16 episodes of its last 8 groups failed")
    assert "no browser" in said


def test_without_the_rule_the_run_ends_and_names_the_environment(tmp_path: Path) -> None:
    run = run_of(tmp_path, table_of(tmp_path), COUNTS)
    with pytest.raises(
        RolloutFailedError, match=r"no browser[\s\S]*environment 'bad': 100% of its last episodes failed"
    ):
        run.run()


def test_an_environment_without_the_rule_that_always_fails_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, table_of(tmp_path), COUNTS, **{"rollout.max_failed_fraction": 1.0})
    run.run()
    said = [r.getMessage() for r in caplog.records if "fails always" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("environment 'bad' fails always: 16 of the 16 episodes")
    assert any("environment_fails" in r.getMessage() for r in caplog.records)


def test_all_switched_off_ends_the_run_with_the_reasons(tmp_path: Path) -> None:
    table = table_of(tmp_path, bad="max_failure_share = 0.5")
    table = EnvironmentTable(file=table.file, column=table.column, environments=table.environments[2:])
    run = run_of(tmp_path, table, {"bad": 40})
    with pytest.raises(ValueError, match=r"all environments of --train.agent_func_path were switched off: bad: 16 of"):
        run.run()


def test_what_was_switched_off_stays_off_after_a_resume(tmp_path: Path) -> None:
    table = table_of(tmp_path, bad="max_failure_share = 0.5")
    path = {"ckpt.path": str(tmp_path / "ckpt"), "ckpt.save_steps": 1}
    whole = run_of(tmp_path, table, COUNTS)
    whole.run()
    first = run_of(tmp_path, table, COUNTS, **path, **{"train.max_steps": 18})
    first.run()
    off = [step["environment/bad/off"] for step in first.sink.steps]
    assert off[-1] == 1
    second = run_of(tmp_path, table, COUNTS, **path, **{"ckpt.load_enable": True})
    second.sink.first = 19
    second.run()
    assert "bad" not in groups_of(second)
    both, at_once = [*first.sink.steps, *second.sink.steps], whole.sink.steps
    kept = [name for name in at_once[0] if name.startswith(("environment/", "source/", "train/reward"))]
    assert [[step.get(name) for name in kept] for step in both] == [
        [step.get(name) for name in kept] for step in at_once
    ]
    assert both[-1]["environment/bad/skipped_prompts"] == at_once[-1]["environment/bad/skipped_prompts"] > 0


def test_without_its_rule_an_environment_is_on_again(tmp_path: Path) -> None:
    strict = table_of(tmp_path, bad="max_failure_share = 0.5")
    prompts = load(rows(tmp_path, {"a": 1, "b": 1, "bad": 30}), strict)
    sampler = EnvironmentSampler(prompts, 0, strict)
    item = PromptItem(group_id="g", prompt="p", environment="bad")
    for _ in range(8):
        sampler.seen(item, [FAILED, GOOD, FAILED])
    state = json.loads(json.dumps(sampler.state_dict()))
    assert "bad" not in drawn(sampler)
    again = EnvironmentSampler(prompts, 0, table_of(tmp_path))
    again.load_state_dict(state)
    assert drawn(again).count("bad") == 30


def test_a_checkpoint_with_other_environments_is_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    prompts = load(rows(tmp_path, {"a": 1, "b": 1, "bad": 1}), table)
    sampler = EnvironmentSampler(prompts, 0, table)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.raises(ValueError, match=r"environments none \(--train.agent_func_path\), this run has a, b, bad"):
        sampler.load_state_dict({name: value for name, value in state.items() if name != "environments"})
    fewer = EnvironmentTable(file="t", column="datasource", environments=table.environments[:2])
    with pytest.raises(ValueError, match=r"with the environments a, b, bad .*, this run has a, b"):
        EnvironmentSampler(prompts, 0, fewer).load_state_dict(state)


def test_few_failures_switch_nothing_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    table = table_of(tmp_path, bad="max_failure_share = 0.5")
    sampler = EnvironmentSampler(load(rows(tmp_path, {"a": 1, "b": 1, "bad": 1}), table), 0, table)
    item = PromptItem(group_id="g", prompt="p", environment="bad")
    for _ in range(7):
        sampler.seen(item, [FAILED, FAILED])
    assert sampler.failing() == {"bad": 1.0}
    assert "environment/bad/failed_share" not in sampler.metrics()
    sampler.seen(item, [GOOD, GOOD])
    for _ in range(50):
        sampler.seen(item, [FAILED, GOOD])
    assert sampler.metrics()["environment/bad/off"] == 1
    other = EnvironmentSampler(load(rows(tmp_path, {"a": 1, "b": 1, "bad": 1}), table), 0, table)
    for _ in range(50):
        other.seen(item, [FAILED, GOOD])
    assert (other.metrics()["environment/bad/off"], other.metrics()["environment/bad/failed_share"]) == (0, 0.5)


def test_reward_sources_and_environments_must_agree(tmp_path: Path) -> None:
    def config(**flags: Any) -> TrainPPOConfig:
        return build(TrainPPOConfig(), {name.replace("__", "."): value for name, value in flags.items()})

    scored, own = table_of(tmp_path, a='reward = "run"'), table_of(tmp_path)
    check_scored(config(reward__remote_url="reward.py"), scored)
    check_scored(config(reward__model_name_or_path="rm"), scored)
    check_scored(config(), own)
    with pytest.raises(ValueError, match=r"'a' is scored by the run's reward source, and there is none: add --reward"):
        check_scored(config(), scored)
    with pytest.raises(ValueError, match=r"nothing asks 'reward.py': leave it out, or write reward = \"run\""):
        check_scored(config(reward__remote_url="reward.py"), own)
