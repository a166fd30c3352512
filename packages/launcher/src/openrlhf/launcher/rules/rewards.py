"""Rules of where rewards come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rewards.entries import Entry, read_entries
from openrlhf.launcher.rules.violation import Rule, Violation, broken, value_at

P = TrainPPOConfig
Found = Iterator[Violation]


def _entries(c: P) -> list[Entry]:
    """The sources; none where they cannot be read, which `sources` tells."""
    try:
        return read_entries(c.reward.remote_url, c.reward.weights)
    except ValueError:
        return []


def one_reward_source(c: P, m: Machine) -> Found:
    """Rewards come from exactly one place."""
    names = ("reward.model_name_or_path", "reward.remote_url", "train.agent_func_path")
    given = [name for name in names if value_at(c, name) is not None]
    if not given and not c.rewards_optional:
        yield broken(c, " ".join(names), "nothing gives rewards", "add one of the three")
    elif len(given) > 1 and (c.agents_score or len(given) > 2 or names[2] not in given):
        yield broken(c, " ".join(given), "there are several sources of rewards", "keep one of them")


def one_reward_model(c: P, m: Machine) -> Found:
    """Several reward models: nothing says how their rewards, each on a scale of its own, become one."""
    path = c.reward.model_name_or_path or ""
    if c.has_reward_model and "," in path and not Path(path).expanduser().is_dir():
        yield broken(
            c,
            "reward.model_name_or_path",
            "one reward model runs in the cluster: rewards of several are on different scales",
            "give one model, or serve each (python3 -m openrlhf.cli.serve_rm) and weigh them (--reward.remote_url "
            "a=http://host:5000/get_reward b=http://host:5001/get_reward --reward.weights a=1 b=0.5)",
        )


def api_key_has_server(c: P, m: Machine) -> Found:
    """A key that nobody is sent."""
    if c.reward.api_key is not None and not any(entry.kind == "servers" for entry in _entries(c)):
        yield Violation(
            (("reward.api_key", c.reward.api_key), ("reward.remote_url", c.reward.remote_url)),
            "the key is sent to a reward server, and none is given",
            "--reward.remote_url http://host:5000/get_reward, or leave the key out",
        )


def sources(c: P, m: Machine) -> Found:
    """The named sources and their weights."""
    names = "reward.remote_url reward.weights" if c.reward.weights else "reward.remote_url"
    fix = "--reward.remote_url math=math.py code=http://host:5000 --reward.weights math=1 code=0.5"
    try:
        read_entries(c.reward.remote_url, c.reward.weights)
    except ValueError as error:
        yield broken(c, names, str(error), fix)
    if c.reward.weights and c.reward.remote_url is None:
        yield broken(c, "reward.weights reward.remote_url", "there is no source to weigh", fix)


def choice_of_sources(c: P, m: Machine) -> Found:
    """A column chooses between sources that have names."""
    if c.reward.choose_by is not None and not any(entry.name for entry in _entries(c)):
        problem = "there are no named sources to choose from"
        fix = "--reward.remote_url math=math.py code=http://host:5000, or leave --reward.choose_by out"
        yield broken(c, "reward.choose_by reward.remote_url", problem, fix)


def judges(c: P, m: Machine) -> Found:
    """A judge has a rubric, and a rubric a judge."""
    there = any(entry.kind == "judge" for entry in _entries(c))
    if there and not c.judge.rubric:
        problem = "nothing says what a judge is asked and how its answer becomes a score"
        yield broken(c, "reward.remote_url judge.rubric", problem, "--judge.rubric rubric.toml")
    here = any(entry.here for entry in _entries(c))
    if here and c.judge.model_name_or_path is None:
        problem = "the judge runs in the cluster, and has no model"
        yield broken(c, "reward.remote_url judge.model_name_or_path", problem, "--judge.model_name_or_path MODEL")
    if c.judge.model_name_or_path is not None and not here:
        problem = "the model is for the source judge, and none is given"
        fix = "--reward.remote_url judge (with others: quality=judge), or leave the model out"
        yield broken(c, "judge.model_name_or_path reward.remote_url", problem, fix)
    if c.judge.max_new_tokens >= c.judge.max_len:
        problem = "no room is left for the question"
        yield broken(c, "judge.max_new_tokens judge.max_len", problem, f"--judge.max_len {2 * c.judge.max_new_tokens}")
    if c.judge.rubric and not there:
        problem = "the rubric is for a judge, and none is given"
        fix = "--reward.remote_url openai:http://host:8000/v1?model=NAME, or leave the rubric out"
        yield broken(c, "judge.rubric reward.remote_url", problem, fix)


RULES: tuple[Rule, ...] = (
    one_reward_source,
    one_reward_model,
    api_key_has_server,
    sources,
    choice_of_sources,
    judges,
)
