"""The reward sources of a run: read from its flags, checked before anything starts, made in agent workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.config import RewardFunctionConfig
from openrlhf.agents.files import CodeFile
from openrlhf.agents.memory import resident_bytes, usable_bytes
from openrlhf.agents.rewards import RewardResult
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.redaction import is_secret_name
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rewards.checks import ask_servers, check_choices, check_sources, key_variable
from openrlhf.launcher.rewards.config import JudgeConfig
from openrlhf.launcher.rewards.entries import Entry, read_entries
from openrlhf.launcher.rewards.sources import RewardSpec, SourceSpec, make_sources, reward_metrics
from support.judge_server import judge_server
from support.launcher_flags import parse_train_ppo
from support.launcher_tokenizer import byte_tokenizer

LENGTH = "def reward_func(queries, prompts, labels): return [float(len(q)) for q in queries]"
LABEL = (
    "def reward_func(queries, prompts, labels): return {'rewards': [float(x) for x in labels], 'extra_logs': {'n': 1}}"
)
RUBRIC = 'user = "{{ response }}"\n[score]\nby = "last_number"\n'


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, []),
        ("my rewards/reward.py", [Entry(name="", place="my rewards/reward.py")]),
        ("http://a?x=1,http://b", [Entry(name="", place="http://a?x=1,http://b")]),
        (
            "math=my rewards/m.py code-2=http://a,http://b judge=openai:http://c/v1?model=x",
            [
                Entry(name="math", place="my rewards/m.py"),
                Entry(name="code-2", place="http://a,http://b", weight=0.5),
                Entry(name="judge", place="openai:http://c/v1?model=x", weight=-2.0),
            ],
        ),
    ],
)
def test_plain_and_named_sources(text: str | None, entries: list[Entry]) -> None:
    weights = ["judge=-2", "code-2=0.5"] if len(entries) == 3 else []
    assert read_entries(text, weights) == entries


def test_several_words_are_one_value_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    words = ["math=m.py", "code=http://a"]
    file = tmp_path / "run.toml"
    file.write_text(f"[reward]\nremote_url = {json.dumps(words)}\n")
    given = [parse_train_ppo(["--reward.remote_url", *words]), parse_train_ppo(["--config", str(file)])]
    assert [config.reward.remote_url for config in given] == ["math=m.py code=http://a"] * 2


def config_of(folder: Path, **flags: Any) -> TrainPPOConfig:
    (folder / "length.py").write_text(LENGTH)
    (folder / "label.py").write_text(LABEL)
    (folder / "rubric.toml").write_text(RUBRIC)
    return build(TrainPPOConfig(), {name.replace("__", "."): value for name, value in flags.items()})


def test_files_and_rubrics_are_read_before_anything_starts(tmp_path: Path) -> None:
    url = f"length={tmp_path}/length.py far=http://a,http://b judge=openai:http://c/v1?model=big"
    rubric = str(tmp_path / "rubric.toml")
    config = config_of(
        tmp_path, reward__remote_url=url, reward__weights=("judge=0.5",), judge__rubric=(rubric,), judge__attempts=7
    )
    keys = {"OPENRLHF_JUDGE_API_KEY": "all", "OPENRLHF_JUDGE_JUDGE_API_KEY": "own"}
    length, far, judge = check_sources(config, keys)
    assert length.file is not None
    assert length.file.source == LENGTH
    assert far.urls == ("http://a", "http://b")
    assert judge.judge is not None
    assert (judge.name, judge.weight) == ("judge", 0.5)
    assert (judge.judge.model, judge.judge.api_key, judge.judge.config.attempts) == ("big", "own", 7)
    assert all(is_secret_name(key_variable(name)) for name in ("", "judge", "how-good"))
    alone = config_of(tmp_path, reward__remote_url="openai:http://c/v1", judge__rubric=(rubric,))
    (plain,) = check_sources(alone, keys)
    assert plain.judge is not None
    assert (plain.name, plain.judge.model, plain.judge.api_key) == ("", "", "all")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reward.remote_url": "a=none.py"}, r"file not found: 'none.py' .* \(reward source 'a'\)"),
        ({"reward.remote_url": "a=ftp://x"}, r"--reward.remote_url 'ftp://x': expected http\(s\) URLs or the path"),
        ({"reward.remote_url": "a=openai:x"}, r"--reward.remote_url 'openai:x': expected http\(s\) URLs"),
        ({"reward.remote_url": "http://u:secretword@x a=b.py"}, r"'http://u:\*\*\*@x' has no name"),
        ({"judge.rubric": ("none.toml",)}, "--judge.rubric: file not found: 'none.toml'"),
        ({"judge.rubric": ()}, "--judge.rubric: the judge 'j' of --reward.remote_url has none"),
        ({"judge.rubric": ("x=a.toml", "j=b.toml")}, "no source has the name 'x'; there are j"),
        ({"judge.rubric": ("FOLDER/broken.toml",)}, r"broken.toml': \[score\] must say how"),
    ],
)
def test_what_is_wrong_with_a_source_names_its_flag(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    (tmp_path / "broken.toml").write_text('user = "x"')
    flags = {"reward.remote_url": "j=openai:http://c"} | flags
    values = {
        name: tuple(v.replace("FOLDER", str(tmp_path)) for v in value) if isinstance(value, tuple) else value
        for name, value in flags.items()
    }
    with pytest.raises(ValueError, match=message) as error:
        check_sources(build(TrainPPOConfig(), values), {})
    assert "secretword" not in str(error.value)


def test_a_judge_is_asked_for_its_model_and_a_server_that_is_away_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rubric = str(tmp_path / "rubric.toml")

    async def asked(model: str, key: str) -> SourceSpec | str:
        async with judge_server(["1"]) as server:
            url = f"openai:{server.url}{model}"
            config = config_of(tmp_path, reward__remote_url=url, judge__rubric=(rubric,))
            sources = check_sources(config, {"OPENRLHF_JUDGE_API_KEY": key or server.key})
            try:
                return (await asyncio.to_thread(ask_servers, sources))[0]
            except ValueError as error:
                return str(error)

    found = asyncio.run(asked("", ""))
    assert isinstance(found, SourceSpec)
    assert found.judge is not None
    assert found.judge.model == "judge"
    assert "is not served by" in str(asyncio.run(asked("?model=other", "")))
    refused = str(asyncio.run(asked("", "wrong")))
    assert "refuses the key (HTTP 401). Fix: the variable OPENRLHF_JUDGE_API_KEY" in refused
    assert ask_servers([SourceSpec(urls=("http://127.0.0.1:9/get_reward",))])[0].urls
    assert "http://127.0.0.1:9/get_reward: no answer yet" in caplog.text


def code(source: str) -> CodeFile:
    return CodeFile(path="/nowhere/reward.py", source=source)


def test_a_workers_sources_score_and_count() -> None:
    spec = RewardSpec(
        sources=(
            SourceSpec(name="length", file=code(LENGTH), weight=0.5),
            SourceSpec(name="label", file=code(LABEL), weight=2.0),
        ),
        function=RewardFunctionConfig(processes=2),
    )

    async def main() -> tuple[RewardResult, dict[str, float]]:
        sources = await make_sources(spec, 0, [])
        assert sources is not None
        try:
            return await sources.score(["four", "sixsix"], ["", ""], ["1", "2"]), sources.totals()
        finally:
            await sources.close()

    result, totals = asyncio.run(main())
    assert result.rewards == [4.0, 7.0]
    assert result.extra_logs == [
        {"length/reward": 4.0, "label/n": 1.0, "label/reward": 1.0},
        {"length/reward": 6.0, "label/n": 1.0, "label/reward": 2.0},
    ]
    metrics = reward_metrics(totals)
    assert metrics["reward/length/calls"] == metrics["reward/label/calls"] == 1.0
    assert metrics["reward/length/seconds"] >= metrics["reward/length/wait_seconds"] >= 0.0
    assert asyncio.run(make_sources(RewardSpec(), 0, [])) is None


@pytest.mark.parametrize(("total", "workers", "shares"), [(8, 3, [3, 3, 2]), (1, 3, [1, 1, 1]), (4, 1, [4])])
def test_workers_share_processes_and_requests_evenly(total: int, workers: int, shares: list[int]) -> None:
    spec = RewardSpec(workers=workers)
    assert [spec.share(total, worker) for worker in range(workers)] == shares


def test_processes_and_memory_of_a_machine(tmp_path: Path) -> None:
    for folder in ("proc", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    assert usable_bytes(tmp_path) == 2**20
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000\n")
    assert usable_bytes(tmp_path) == 1000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert usable_bytes(tmp_path) == 2**20
    assert usable_bytes(tmp_path / "none") is None
    assert resident_bytes(os.getpid()) > sys.getsizeof("") * 2**10
    assert resident_bytes(2**30) == 0


def test_the_judges_flags_are_its_sections_fields() -> None:
    words = [
        "--judge.temperature",
        "0.5",
        "--judge.max_new_tokens",
        "9",
        "--judge.max_concurrency",
        "3",
        "--judge.timeout",
        "4",
    ]
    config = parse_train_ppo([*words, "--judge.attempts", "2", "--judge.unreadable_score", "0"])
    assert config.judge == JudgeConfig(
        temperature=0.5, max_new_tokens=9, max_concurrency=3, timeout=4.0, attempts=2, unreadable_score=0.0
    )


def test_a_row_whose_column_names_no_source_is_found_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"input": f"p{i}", "kind": kind} for i, kind in enumerate(["a", "b,a", "", None, ["b"], "c"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "r.py"
    file.write_text(LENGTH)
    words = ["--reward.remote_url", f"a={file}", f"b={file}", "--reward.choose_by", "kind"]
    words += ["--data.prompt_dataset", str(tmp_path / "rows.jsonl")]
    config, _ = resolve(parse_train_ppo(words), Machine(gpus=0))
    assert config.data.extra_keys == ("kind",)
    sources = check_sources(config)
    prompts = load_prompts(config.data, byte_tokenizer())
    assert prompts.item(1).columns == {"kind": "b,a"}
    with pytest.raises(ValueError, match=r"line 6, field 'kind' \(--reward.choose_by\): 'c' names no reward source"):
        check_choices("kind", sources, prompts)
    check_choices("kind", [*sources, SourceSpec(name="c", urls=("http://c",))], prompts)
    check_choices(None, sources, prompts)
