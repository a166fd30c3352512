"""`openrlhf-agents run FILE --data prompts.jsonl`: episodes over a dataset, trajectories as JSONL, a score table."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.cli.check import make_cli_context, run_and_close
from openrlhf.agents.cli.models import add_model_arguments, make_tokenizer
from openrlhf.agents.files import decode_text, text_lines
from openrlhf.agents.types import PromptItem, Trajectory


def add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run an agent over a dataset")
    parser.add_argument("file", help="the agent file")
    parser.add_argument("--data", required=True, help="a JSONL file with one prompt per line")
    parser.add_argument("--input-key", default="prompt")
    parser.add_argument("--label-key", default="label")
    parser.add_argument("--limit", type=int, help="use the first LIMIT prompts only")
    parser.add_argument("--samples", type=int, default=1, help="episodes per prompt")
    parser.add_argument("--output", help="where to write the trajectories, one JSON object per line")
    add_model_arguments(parser)


def run_run(arguments: argparse.Namespace) -> int:
    executor = load_executor(arguments.file)
    items = read_prompts(Path(arguments.data), arguments.input_key, arguments.label_key, arguments.limit)
    context = make_cli_context(arguments, make_tokenizer(arguments.tokenizer), arguments.samples)
    groups = asyncio.run(run_and_close(executor, items, context))
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            for group in groups:
                file.writelines(json.dumps(as_json(t), ensure_ascii=False) + "\n" for t in group)
        print(f"wrote {Path(arguments.output).absolute()}")
    print(table(groups))
    return int(all(t.failed for group in groups for t in group))


def read_prompts(path: Path, input_key: str, label_key: str, limit: int | None) -> list[PromptItem]:
    """The prompts of a JSONL file. Raises ValueError that names line and columns."""
    if not path.is_file():
        raise FileNotFoundError(f"--data: file not found: {str(path)!r}")
    items: list[PromptItem] = []
    try:
        lines = text_lines(decode_text(path.read_bytes()))
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path}: cannot be decoded: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(items) >= limit:
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--data {path}: line {number} is no JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(input_key), str):
            columns = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"--data {path}: line {number} has no text in column {input_key!r}; it has {columns}")
        label = row.get(label_key, "")
        item = PromptItem(group_id=f"line-{number}", prompt=row[input_key], label=label, position=len(items))
        items.append(item)
    if not items:
        raise ValueError(f"--data {path}: no prompts")
    return items


def as_json(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as plain JSON; images are left out."""
    failure = trajectory.failure
    return {
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "prompt": trajectory.prompt,
        "label": trajectory.label,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "stop_reason": trajectory.stop_reason.value,
        "failure": None if failure is None else {"border": failure.border, "message": failure.message},
        "turns": [[turn.start, turn.end] for turn in trajectory.turns],
        "token_ids": list(trajectory.token_ids),
        "trainable": list(trajectory.trainable),
        "logprobs": list(trajectory.logprobs),
        "extra_logs": dict(trajectory.extra_logs),
    }


def table(groups: Sequence[Sequence[Trajectory]]) -> str:
    """The scores in a few lines."""
    samples = [t for group in groups for t in group]
    scored = [t for t in samples if t.score is not None and not t.failed]
    rows = [
        ("prompts", str(len(groups))),
        ("samples", str(len(samples))),
        ("failed", str(sum(t.failed for t in samples))),
        ("truncated", str(sum(t.truncated for t in samples))),
        ("turns, mean", _mean([len(t.turns) for t in samples])),
        ("reward, mean", _mean([t.reward for t in scored if t.reward is not None])),
        ("score, mean", _mean([t.score for t in scored if t.score is not None])),
        ("best score of each prompt, mean", _mean(_best(groups))),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _best(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    scores = [[t.score for t in group if t.score is not None] for group in groups]
    return [max(values) for values in scores if values]


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}" if values else "-"
