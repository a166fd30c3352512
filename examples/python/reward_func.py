"""A reward function: pass this file to --reward.remote_url, the ground truth comes from --data.label_key.

It is called once per prompt, with all samples of that prompt, in a process of its own that may be killed after
--reward.timeout seconds. Torch tensors, numpy arrays, lists and numbers are all accepted as results.
"""

import re


def reward_func(queries, prompts, labels, **kwargs):
    """
    Args:
        queries: list[str] - full text (prompt + response) per sample, special tokens kept
        prompts: list[str] - the prompts
        labels:  list[str] - ground-truth labels (None where a row has none)
        kwargs:  responses: list[str] - the response part of each query

    Returns:
        dict with
            rewards:    one number per sample, used for the advantages
            scores:     one number per sample in [0, 1], used by --algo.dynamic_filtering_enable
            extra_logs: numbers to log, one per sample or one for all
    """
    responses = kwargs.get("responses") or [q.removeprefix(p) for q, p in zip(queries, prompts, strict=True)]
    rewards = [1.0 if my_check(r, label) else 0.0 for r, label in zip(responses, labels, strict=True)]
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"accuracy": rewards, "group_solved": float(any(rewards))},
    }


def my_check(response: str, label: str | None) -> bool:
    """The response, without special tokens and blanks around it, is the label."""
    return label is not None and re.sub(r"<\|[^|>]*\|>", "", response).strip() == label.strip()
