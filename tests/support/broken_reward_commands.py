"""The lines of `broken_rl_commands` about sources of rewards and judges."""

from __future__ import annotations

REWARD_CASES = [
    ("--reward.model_name_or_path R", "reward.remote_url", "several sources", ""),
    (
        "--reward.api_key k",
        "reward.api_key",
        "sent to a reward server",
        "--reward.api_key k --reward.remote_url http://h",
    ),
    ("--reward.remote_url a=", "reward.remote_url", "no source after it", "--reward.remote_url a=a.py"),
    (
        "--reward.remote_url r.py b=b.py",
        "reward.remote_url",
        "'r.py' has no name and 'b=b.py' has one",
        "--reward.remote_url a=r.py b=b.py",
    ),
    ("--reward.remote_url a=r.py a=b.py", "reward.remote_url", "several sources have the name 'a'", ""),
    (
        "--reward.remote_url a=r.py --reward.weights b=1",
        "reward.weights",
        "no source has the name 'b'; there are a",
        "--reward.remote_url a=r.py --reward.weights a=1",
    ),
    ("--reward.remote_url a=r.py --reward.weights a=x", "reward.weights", "'x', which is no number", ""),
    ("--reward.remote_url a=r.py --reward.weights a=nan", "reward.weights", "which is no number", ""),
    ("--reward.remote_url a=r.py --reward.weights a=1 a=2", "reward.weights", "'a' has a value already", ""),
    ("--reward.weights 1", "reward.weights", "a weight belongs to a source with a name", ""),
    (
        "--reward.choose_by kind",
        "reward.choose_by",
        "no named sources to choose from",
        "--reward.choose_by kind --reward.remote_url a=r.py b=b.py",
    ),
    (
        "--reward.remote_url a=r.py b=openai:http://h/v1",
        "judge.rubric",
        "nothing says what a judge is asked",
        "--reward.remote_url a=r.py b=openai:http://h/v1 --judge.rubric r.toml",
    ),
    ("--judge.rubric r.toml", "judge.rubric", "for a judge, and none is given", ""),
    (
        "--reward.remote_url judge --judge.rubric r.toml",
        "judge.model_name_or_path",
        "runs in the cluster, and has no model",
        "--reward.remote_url judge --judge.rubric r.toml --judge.model_name_or_path J",
    ),
    ("--judge.model_name_or_path J", "judge.model_name_or_path", "for the source judge, and none is given", ""),
    (
        "--reward.remote_url a=judge --judge.rubric r.toml --judge.model_name_or_path J --judge.tensor_parallel_size 9",
        "judge.tensor_parallel_size",
        "an engine lies on one node",
        "--reward.remote_url a=judge --judge.rubric r.toml --judge.model_name_or_path J --judge.tensor_parallel_size 2",
    ),
    ("--judge.max_len 1024", "judge.max_len", "no room is left for the question", "--judge.max_len 2048"),
    ("--judge.num_engines 0", "judge.num_engines", "at least 1", ""),
    ("--judge.timeout 0", "judge.timeout", "more than 0", "--judge.timeout 1"),
    ("--judge.attempts 0", "judge.attempts", "at least 1", "--judge.attempts 1"),
    ("--judge.max_concurrency 0", "judge.max_concurrency", "at least 1", "--judge.max_concurrency 1"),
]
