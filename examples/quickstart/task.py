"""The quickstart's task: sort five digits. "sort 60453" is answered by "03456". Standard library only."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

DIGITS = 5
EVAL_SEED = 12345


@dataclass(frozen=True)
class Example:
    """One question with its only right answer."""

    question: str
    answer: str


def sort_example(digits: str) -> Example:
    """The question that asks to sort `digits`, with its answer."""
    return Example(question=f"sort {digits}", answer="".join(sorted(digits)))


def draw_examples(count: int, *, seed: int, exclude: Collection[str] = ()) -> list[Example]:
    """`count` random examples, none of whose questions is in `exclude`. The same seed gives the same examples."""
    rng = random.Random(seed)
    out: list[Example] = []
    while len(out) < count:
        example = sort_example("".join(str(rng.randrange(10)) for _ in range(DIGITS)))
        if example.question not in exclude:
            out.append(example)
    return out


def imperfect_answer(answer: str, rng: random.Random, wrong: float) -> str:
    """The answer, with probability `wrong` spoiled by one or two swaps of two places."""
    chars = list(answer)
    if rng.random() < wrong:
        for _ in range(rng.randint(1, 2)):
            i, j = rng.sample(range(len(chars)), 2)
            chars[i], chars[j] = chars[j], chars[i]
    return "".join(chars)


def write_jsonl(path: Path, examples: Sequence[Example]) -> None:
    """One {"prompt": ..., "label": ...} object per line; the label is a string, so leading zeros survive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": e.question, "label": e.answer}) for e in examples)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_datasets(folder: Path, *, train_count: int, eval_count: int, seed: int) -> tuple[Path, Path]:
    """Write train.jsonl and eval.jsonl into `folder` and return their paths; no evaluation prompt is trained on.

    The evaluation prompts do not depend on `seed`, so that runs with different seeds can be compared.
    """
    held_out = draw_examples(eval_count, seed=EVAL_SEED)
    train = draw_examples(train_count, seed=seed, exclude={e.question for e in held_out})
    train_path, eval_path = folder / "train.jsonl", folder / "eval.jsonl"
    write_jsonl(train_path, train)
    write_jsonl(eval_path, held_out)
    return train_path, eval_path


def read_jsonl(path: Path) -> list[Example]:
    """The examples of a file written by `write_jsonl`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Example(question=row["prompt"], answer=row["label"]) for row in rows]
