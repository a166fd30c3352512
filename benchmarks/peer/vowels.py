"""The reward of the real model's job, for both sides: how many of the answer's letters are vowels.

It differs from sample to sample, so that no group is without an advantage, and costs nothing.
"""

from __future__ import annotations


def share_of_vowels(text: str) -> float:
    """The share of vowels among the letters of a text; 0 without letters."""
    letters = [c for c in text.lower() if c.isalpha()]
    return sum(c in "aeiou" for c in letters) / max(len(letters), 1)


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """One reward per query (prompt and answer as one text)."""
    return [share_of_vowels(query.removeprefix(prompt)) for query, prompt in zip(queries, prompts, strict=True)]
