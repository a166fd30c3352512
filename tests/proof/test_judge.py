"""Judges on the real stack: one scores beside a reward function in a whole run, and vLLM's server is one."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from openrlhf.agents.rewards import RewardResult
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.record.reader import Record, find_records
from openrlhf.launcher.rewards.checks import ask_servers, check_sources
from openrlhf.launcher.rewards.sources import RewardSpec, make_sources, reward_metrics
from support.judge_server import judge_server
from support.stack_runs import make_workspace, start_run
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900)]

RUBRIC = """
user = "Grade {{ response }} of level {{ columns.level }}."
[score]
by = "last_number"
range = [0, 1000]
to = [0, 1]
"""


def length_of_answer(token_ids: Any, sampling: Any) -> str:
    """How long the graded answer is; nothing readable for one in eight."""
    text = bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")
    answer = text.partition("Grade ")[2].rpartition(" of level ")[0]
    return "no idea" if sum(answer.encode()) % 8 == 0 else f"It has {len(answer)}"


@contextmanager
def running_judge() -> Iterator[tuple[str, str]]:
    """(URL, key) of a judge in a thread of its own."""
    loop, done, ready = asyncio.new_event_loop(), asyncio.Event(), Future[tuple[str, str]]()

    async def serve() -> None:
        async with judge_server(length_of_answer) as server:
            ready.set_result((server.url, server.key))
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield ready.result(30)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def test_a_judge_and_a_function_score_a_whole_run(tmp_path: Path) -> None:
    space = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"))
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    rows = [row | {"kind": "" if i % 2 else "digits", "level": i} for i, row in enumerate(rows)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    with running_judge() as (url, key):
        words = ["--reward.remote_url", f"digits={tmp_path / 'reward.py'}", f"judge=openai:{url}?model=judge"]
        words += ["--reward.weights", "judge=0.5", "--reward.choose_by", "kind", "--data.extra_keys", "level"]
        words += ["--judge.rubric", str(tmp_path / "rubric.toml"), "--judge.max_concurrency", "4"]
        words += ["--rollout.max_failed_fraction", "0.9", "--reward.processes", "2", "--agent.num_workers", "2"]
        space.without = ("reward.remote_url",)
        run = start_run(space, *words, env={"OPENRLHF_JUDGE_API_KEY": key})
        assert run.wait(600) == 0, run.text
    assert run.left_over() == []
    assert key not in run.text
    [record] = [Record.open(folder) for folder in find_records(tmp_path)]
    judged = 0
    for step, recorded in record.steps().items():
        for sample in record.samples(step):
            logs = sample.extra_logs
            parts = {"digits": logs["digits/reward"], "judge": 0.5 * logs.get("judge/reward", 0.0)}
            assert sample.reward == parts["digits"] + parts["judge"]
            judged += "judge/reward" in logs
        metrics = recorded.metrics
        asked = metrics["reward/judge/calls"]
        assert metrics["reward/digits/calls"] == len(recorded.groups) + metrics["rollout/dropped_groups"]
        assert metrics.get("reward/judge/failures", 0.0) == metrics["rollout/failed_samples"]
        if asked:
            assert metrics["reward/judge/completion_tokens"] > 0
            assert metrics["reward/judge/unreadable"] == metrics["reward/judge/failures"] / (4 * asked)
        print({name: value for name, value in metrics.items() if name.startswith(("reward/", "train/judge"))})
    assert judged > 0


def test_a_judge_on_engines_of_the_run_scores_it(tmp_path: Path) -> None:
    space = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"))
    judge = Path(tiny_qwen3(tmp_path / "judge"))
    (judge / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "rubric.toml").write_text(RUBRIC.replace(" of level {{ columns.level }}", ""))
    words = ["--reward.remote_url", f"digits={tmp_path / 'reward.py'}", "quality=judge"]
    words += ["--judge.model_name_or_path", str(judge), "--judge.rubric", str(tmp_path / "rubric.toml")]
    words += ["--judge.max_len", "128", "--judge.max_new_tokens", "8", "--judge.unreadable_score", "0.25"]
    space.without = ("reward.remote_url",)
    run = start_run(space, *words)
    assert run.wait(600) == 0, run.text
    assert run.left_over() == []
    [record] = [Record.open(folder) for folder in find_records(tmp_path)]
    assert len(record.steps()) == 2
    for step, recorded in record.steps().items():
        samples, metrics = record.samples(step), recorded.metrics
        assert len(samples) == 16
        for sample in samples:
            logs = sample.extra_logs
            assert sample.reward == logs["digits/reward"] + logs["quality/reward"]
            assert logs["quality/unreadable"] == 0.0 or logs["quality/reward"] == 0.25
        assert metrics["reward/quality/calls"] == 4.0
        assert metrics["reward/quality/failures"] == metrics["rollout/failed_samples"] == 0.0
        assert metrics["reward/quality/completion_tokens"] == sum(s.extra_logs["quality/tokens"] for s in samples)
        print({name: value for name, value in metrics.items() if name.startswith("reward/")})


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` with a random model and a chat template."""
    model = Path(tiny_qwen3(tmp_path_factory.mktemp("judge")))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    words += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--api-key", "secret"]
    words += ["--served-model-name", "grader", "--enforce-eager"]
    (model / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words += ["--chat-template", str(model / "template.jinja")]
    with (model / "server.log").open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, (model / "server.log").read_text()[-4000:]
            assert time.monotonic() < deadline, (model / "server.log").read_text()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def test_vllms_server_is_a_judge(vllm_url: str, tmp_path: Path) -> None:
    (tmp_path / "rubric.toml").write_text(RUBRIC.replace(" of level {{ columns.level }}", ""))
    config = build(
        TrainPPOConfig(),
        {
            "reward.remote_url": f"j=openai:{vllm_url}",
            "judge.rubric": (str(tmp_path / "rubric.toml"),),
            "judge.max_new_tokens": 5,
            "judge.unreadable_score": -1.0,
        },
    )
    sources = ask_servers(check_sources(config, {"OPENRLHF_JUDGE_J_API_KEY": "secret"}))
    with pytest.raises(ValueError, match="refuses the key"):
        ask_servers(check_sources(config, {"OPENRLHF_JUDGE_J_API_KEY": "other"}))

    async def grade() -> tuple[RewardResult, dict[str, float]]:
        made = await make_sources(RewardSpec(sources=sources), 0, [])
        assert made is not None
        try:
            responses = [f"answer {i}" for i in range(8)]
            result = await made.score(["q"] * 8, ["p"] * 8, ["l"] * 8, responses=responses)
            return result, made.totals()
        finally:
            await made.close()

    result, totals = asyncio.run(grade())
    metrics = reward_metrics(totals)
    print(metrics)
    assert result.failures == [None] * 8
    assert all(reward is not None and (reward == -1.0 or 0.0 <= reward <= 1.0) for reward in result.rewards)
    assert metrics["reward/j/completion_tokens"] == sum(log["j/tokens"] for log in result.extra_logs) <= 40
    assert metrics["reward/j/prompt_tokens"] > 8
