"""Three environments and two reward sources in one real run: columns arrive, metrics per source add up."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.record.files import ABOUT
from openrlhf.launcher.record.reader import Record
from support.stack_runs import make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.proof,
    pytest.mark.stack,
    pytest.mark.timeout(1500),
    pytest.mark.alarms("all_truncated"),
]

AGENTS = '''
from openrlhf.utils.agent import AgentInstanceBase


class Digits(AgentInstanceBase):
    """Two turns; the reward is the share of digits, the column's level is checked in both."""

    async def reset(self, states, **kwargs):
        assert states["columns"]["level"] == int(states["label"]), states
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        assert states["columns"]["level"] == int(states["label"]), states
        text = states["action_text"]
        share = sum(c.isdigit() for c in text) / max(len(text), 1)
        done = states["turn"] == 1
        return {"rewards": share, "environment_feedback": "" if done else "again", "done": done}


class Broken(AgentInstanceBase):
    async def step(self, states, **kwargs):
        raise RuntimeError("no browser here")
'''
REWARD = """
def reward_func(queries, prompts, labels, level, task):
    assert [int(label) for label in labels] == level, (labels, level)
    answers = [q[len(p):] for q, p in zip(queries, prompts)]
    return {"rewards": [sum(c.isalpha() for c in a) / max(len(a), 1) for a in answers]}
"""
TABLE = """
column = "task"
max_failure_share = 0.5

[turns]
agent = "agents.py:Digits"
ratio = 2

[answers]
ratio = 2

[broken]
agent = "agents.py:Broken"
ratio = 1
"""
STEPS, GROUPS, SAMPLES = 12, 10, 4


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A reward server, and the questions it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            rewards = [float(len(q) % 2) for q in body["query"]]
            answer = json.dumps({"rewards": rewards}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/get_reward", bodies
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_three_environments_and_two_reward_sources(server: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, bodies = server
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "model"), reward=REWARD)
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "table.toml").write_text(TABLE)
    for source, tasks in (("first", ("turns", "answers")), ("second", ("answers", "broken", "turns"))):
        rows = [
            {"prompt": f"{source} {i:03d}", "label": i, "level": i, "task": tasks[i % len(tasks)], "graders": grader}
            for i, grader in enumerate(["file", "server"] * 30)
        ]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "train.agent_func_path": "table.toml",
        "data.prompt_dataset": "first.jsonl,second.jsonl",
        "reward.remote_url": f"file={workspace.path / 'reward.py'} server={url}",
        "reward.choose_by": "graders",
        "data.extra_keys": "level task graders datasource",
        "rollout.batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "train.batch_size": GROUPS * SAMPLES,
        "train.max_steps": STEPS,
        "train.num_episodes": 2,
        "agent.num_workers": 2,
    }
    with running(workspace, *(word for k, v in flags.items() for word in (f"--{k}", *str(v).split()))) as run:
        assert run.wait(1200) == 0, run.text[-6000:]
    (about,) = tmp_path.rglob(ABOUT)
    steps = list(Record.open(about.parent).steps().values())
    assert len(steps) == STEPS
    for step in steps:
        check_parts(step.metrics)
    check_columns(steps, bodies)
    assert "environment 'broken' is switched off" in run.text
    assert "no browser here" in run.text
    last = steps[-1].metrics
    assert (last["environment/broken/off"], last["environment/turns/off"]) == (1, 0)
    assert last["environment/broken/skipped_prompts"] > 0
    print({name: round(value, 4) for name, value in last.items() if name.startswith(("source/", "environment/"))})


def check_parts(metrics: dict[str, float] | Any) -> None:
    """What sources and environments say of a step adds up to what is said of the whole."""
    for kind in ("source", "environment"):
        names = {key.split("/")[1] for key in metrics if key.startswith(f"{kind}/") and key.endswith("/share")}
        part = {(n, what): metrics[f"{kind}/{n}/{what}"] for n in names for what in ("share", "num_episodes", "reward")}
        assert sum(part[n, "share"] for n in names) == pytest.approx(1)
        episodes = sum(part[n, "num_episodes"] for n in names)
        assert episodes == metrics["rollout/num_episodes"] == GROUPS * SAMPLES
        reward = sum(part[n, "reward"] * part[n, "num_episodes"] for n in names) / episodes
        assert reward == pytest.approx(metrics["train/reward"])
        ends = (key for key in metrics if key.startswith(f"{kind}/") and key.endswith("/failed_samples"))
        assert sum(metrics[key] for key in ends) == metrics["rollout/failed_samples"]


def check_columns(steps: Any, bodies: list[dict[str, Any]]) -> None:
    """Every trained sample had its columns, in the record and at the server that graded it."""
    groups = [group for step in steps for group in step.groups]
    told = [group.columns for group in groups]
    assert all(set(columns) == {"level", "task", "graders", "datasource"} for columns in told)
    assert [group.datasource for group in groups] == [columns["datasource"] for columns in told]
    asked = [(b["columns"]["level"], b["columns"]["graders"], b["labels"]) for b in bodies]
    assert all(levels == [int(label) for label in labels] for levels, _, labels in asked)
    assert {name for _, graders, _ in asked for name in graders} == {"server"}
    count = Counter((c["task"], c["graders"]) for c in told)
    assert set(count) == {(task, grader) for task in ("turns", "answers") for grader in ("file", "server")}
    print(f"{len(told) * SAMPLES} samples of {dict(count)}, {len(bodies)} questions to the server")
