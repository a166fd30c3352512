"""The quickstart's reward function: 1 when the whole answer equals the label, else 0.

Handed to the trainer by `--reward.remote_url examples/quickstart/reward.py`. It runs in a process of its own and
needs nothing installed: lists of numbers are as welcome as tensors.
"""

from __future__ import annotations

from typing import Any

ASSISTANT = "<|assistant|>"
END = "<|end|>"


def answer_of(query: str) -> str:
    """What the model wrote: the text after the first assistant tag, without the end mark that closes it."""
    return query.partition(ASSISTANT)[2].removesuffix(END)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Score the samples of one prompt.

    queries: prompt and response as one text, special tokens included. prompts: the prompt alone. labels: the right
    answers. Returns one reward per query; `scores` lie in [0, 1]; `extra_logs` values are logged per sample.
    """
    answers = [answer_of(query) for query in queries]
    rewards = [float(answer == label) for answer, label in zip(answers, labels, strict=True)]
    well_formed = [float(len(a) == len(label) and a.isdigit()) for a, label in zip(answers, labels, strict=True)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"well_formed": well_formed}}
