"""Columns of the prompt data (`--data.extra_keys`): read, carried through every pipeline, saved and recorded."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openrlhf.agents.executor import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnExecutor
from openrlhf.agents.rewards import RewardResult, normalize_rewards
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.prompts import PromptDataset, load_prompts
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.samples import Group
from openrlhf.launcher.trainer.untrained import Collected, Untrained, read_untrained, write_untrained
from support.agent_rollouts import worker_run
from support.launcher_tokenizer import byte_tokenizer
from support.trainer_fakes import GOOD, FakeLearner, FakeRollout

ROWS = [
    {"prompt": f"p{i}", "label": str(i), "level": i, "tests": [{"in": str(i)}], "meta": {"name": f"n{i}", "odd": i % 2}}
    for i in range(250)
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(dataset: str, *keys: str, **options: Any) -> PromptDataset:
    data = DataConfig(prompt_dataset=dataset, input_key="prompt", label_key="label", extra_keys=keys, **options)
    return load_prompts(data, byte_tokenizer())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_columns_are_the_same_from_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(ROWS[:3])) if path.suffix == ".json" else write(path, ROWS[:3])
    item = load(str(path), "level", "tests", "meta.name").item(2)
    assert item.columns == {"level": 2, "tests": [{"in": "2"}], "meta.name": "n2"}
    every = load(str(path), "all").item(2)
    assert every.columns == {
        "level": 2,
        "tests": [{"in": "2"}],
        "meta": {"name": "n2", "odd": 0},
        "datasource": "default",
    }
    assert load(str(path)).item(2).columns == {}


def test_a_column_that_only_some_rows_have_is_none_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "label": ""}, {"prompt": "b", "label": "", "level": 2}])
    assert [load(path, "level").item(i).columns for i in range(2)] == [{"level": None}, {"level": 2}]


def test_an_unknown_column_is_an_error_with_those_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[:2])
    with pytest.raises(ValueError, match=r"--data.extra_keys 'levl': .*a.jsonl has no such field; it .*level, tests"):
        load(path, "level", "levl")


def test_a_blended_row_names_its_data_set(tmp_path: Path) -> None:
    maths = write(tmp_path / "maths.v2.jsonl", [{"prompt": "a", "label": "1", "level": 5}])
    (tmp_path / "code").mkdir()
    write(tmp_path / "code" / "train.jsonl", [{"prompt": "b", "label": "2"}, {"prompt": "c", "datasource": "own"}])
    items = [load(f"{maths},{tmp_path / 'code'}", "level", "datasource").item(i) for i in range(3)]
    assert [item.datasource for item in items] == ["maths", "code", "own"]
    assert [item.columns for item in items] == [
        {"level": 5, "datasource": "maths"},
        {"level": None, "datasource": "code"},
        {"level": None, "datasource": "own"},
    ]
    (tmp_path / "other").mkdir()
    twin = write(tmp_path / "other" / "maths.jsonl", ROWS[:1])
    assert {load(f"{maths},{twin}").item(i).datasource for i in range(2)} == {maths, twin}


def test_bytes_are_no_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "label": "1", "blob": b"\xff\xfe"}])
    with pytest.raises(ValueError, match=r"row 0, field 'blob': .*bytes that are no UTF-8"):
        load(path, "all")


class Checked:
    """A reward source that compares every sample's columns with its label."""

    def __init__(self) -> None:
        self.right: list[str] = []

    async def score(
        self, queries: Any, prompts: Any, labels: Any, *, responses: Any = None, columns: Any = None
    ) -> RewardResult:
        await asyncio.sleep(0)
        for prompt, label, level, tests, name in zip(prompts, labels, *columns.values(), strict=True):
            i = int(label)
            assert (prompt, level, tests, name) == (f"p{i}", i, [{"in": label}], f"n{i}")
            self.right.append(label)
        return normalize_rewards([float(i % 2) for i in range(len(queries))], len(queries))


class Agent(AgentInstanceBase):
    """An agent that does the same."""

    right: list[str]

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        self.columns = states["columns"]
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs: Any) -> dict:
        i = int(states["label"])
        assert states["observation_text"] == f"p{i}"
        assert self.columns == {"level": i, "tests": [{"in": str(i)}], "meta.name": f"n{i}"}
        self.right.append(states["label"])
        return {"rewards": float("yes" in states["action_text"]), "environment_feedback": "", "done": True}


PIPELINES: dict[str, dict[str, Any]] = {
    "sync": {},
    "hybrid": {"train.colocate_all": True, "vllm.enable_sleep": True},
    "async": {"train.async_enable": True},
    "partial": {"train.async_enable": True, "train.partial_rollout_enable": True, "train.async_queue_size": 3},
    "filtered": {"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": (0.0, 1.0)},
    "oversampled": {
        "train.async_enable": True,
        "rollout.vllm_generate_batch_size": 24,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": (0.0, 1.0),
    },
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("kind", ["reward function", "agent"])
def test_columns_arrive_for_1000_of_1000_samples(tmp_path: Path, kind: str, pipeline: str) -> None:
    source, Agent.right = Checked(), []
    flags = {
        "data.prompt_dataset": write(tmp_path / "rows.jsonl", ROWS),
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.extra_keys": ("level", "tests", "meta.name"),
        "rollout.batch_size": 10,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 40,
    }
    executor = SingleTurnExecutor(source) if kind == "reward function" else MultiTurnAgentExecutor(Agent)
    run = worker_run(executor, **flags, **PIPELINES[pipeline])
    assert run.run().steps == 25
    right = source.right if kind == "reward function" else Agent.right
    assert sorted(right) == sorted(str(i) for i in range(250) for _ in range(4))
    assert run.trained() == sorted(f"h{i}" for i in range(250) for _ in range(4))


def test_columns_arrive_in_an_evaluation(tmp_path: Path) -> None:
    source = Checked()
    flags = {
        "data.prompt_dataset": write(tmp_path / "rows.jsonl", ROWS[:4]),
        "eval.dataset": write(tmp_path / "eval.jsonl", ROWS[100:110]),
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.extra_keys": ("level", "tests", "meta.name"),
        "eval.at_start": True,
        "eval.n_samples_per_prompt": 3,
    }
    worker_run(SingleTurnExecutor(source), **flags).run()
    assert sorted(label for label in source.right if int(label) >= 100) == [str(100 + i // 3) for i in range(30)]


def test_what_waits_for_training_keeps_its_columns_in_a_checkpoint(tmp_path: Path) -> None:
    rollout = FakeRollout(n=2, weights=FakeLearner())
    items = [PromptItem(group_id=f"g{i}", prompt="p", columns={"level": i, "tests": [{"in": None}]}) for i in range(3)]
    groups = [Group(prompt=item, samples=[GOOD], handle="h") for item in items]
    untrained = Untrained(batches=[Collected(groups=groups[:1])], groups=groups[1:2], prompts=items[2:])
    asyncio.run(write_untrained(untrained, rollout, tmp_path))
    assert asyncio.run(read_untrained(rollout, tmp_path)) == untrained


class Before:
    """A prompt as it was pickled when it had no columns."""

    def __init__(self, item: PromptItem) -> None:
        self.item = item

    def __reduce__(self) -> Any:
        return object.__new__, (PromptItem,), [getattr(self.item, f.name) for f in fields(self.item)[:-1]]


def test_a_checkpoint_from_before_there_were_columns_is_read(tmp_path: Path) -> None:
    rollout = FakeRollout(n=2, weights=FakeLearner())
    item = PromptItem(group_id="g", prompt="p", label="1")
    old = Before(item)
    content = {
        "batches": [],
        "groups": [{"prompt": old, "samples": [GOOD], "trajectories": "h"}],
        "deadlines": [],
        "prompts": [old],
    }
    (tmp_path / "untrained.pkl").write_bytes(pickle.dumps(content))
    read = asyncio.run(read_untrained(rollout, tmp_path))
    assert read == Untrained(groups=[Group(prompt=item, samples=[GOOD], handle="h")], prompts=[item])


def test_the_record_holds_columns_and_the_beginning_of_long_ones(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, run="r", name="n", ranks=1, goes_on=False, config_toml="")
    item = PromptItem(group_id="g", prompt="p", environment="e", columns={"level": 3, "tests": ["x" * 10_000]})
    record.batch(1, [Group(prompt=item, samples=[], handle="h")], [], before={}, sampling={})
    (row,) = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    columns = row["groups"][0]["columns"]
    assert row["groups"][0]["environment"] == "e"
    assert columns["level"] == 3
    assert (columns["tests"][:4], len(columns["tests"])) == ('["xx', 2001)
