"""`openrlhf-agents eval FILE --data prompts.jsonl`: episodes over a dataset, pass@k, traces as JSONL."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from openrlhf.agents.cli.models import add_model_arguments, make_engine, make_tokenizer
from openrlhf.agents.cli.subject import make_context, opened, read_file, read_prompts, render, run_watched
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.values import unbiased_pass_at_k

Group = Sequence[Trajectory]


def add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="run an environment or a reward file over a dataset and count what passes",
        description="Runs episodes of FILE over the prompts of --data and prints mean reward, pass@k and what failed.",
    )
    parser.add_argument("file", help="the agent file, or a file with reward_func")
    parser.add_argument("--data", required=True, help="a JSONL file with one prompt per line; its columns travel along")
    parser.add_argument("--input-key", default="prompt")
    parser.add_argument("--label-key", default="label")
    parser.add_argument("--limit", type=int, help="use the first LIMIT prompts only")
    parser.add_argument("--chat-template", action="store_true", help="render prompts with the chat template")
    parser.add_argument("--samples", type=int, default=1, help="episodes per prompt (default: %(default)s)")
    parser.add_argument("--k", type=int, nargs="+", help="the k of pass@k (default: 1, and --samples)")
    parser.add_argument("--threshold", type=float, default=1.0, help="the score that passes (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at the same time (default: %(default)s)")
    parser.add_argument("--output", help="where to write the traces, one JSON object per episode, as they end")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_model_arguments(parser)


def run_eval(arguments: argparse.Namespace) -> int:
    ks = sorted(set(arguments.k or (1, arguments.samples)))
    for name in ("samples", "concurrency"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if ks[0] < 1 or ks[-1] > arguments.samples:
        raise ValueError(f"--k must lie between 1 and --samples ({arguments.samples}), got {ks}")
    code = read_file(arguments.file)
    tokenizer = make_tokenizer(arguments.tokenizer)
    rows = read_prompts(Path(arguments.data), arguments.input_key, arguments.label_key, arguments.limit)
    items = [render(item, tokenizer, arguments.chat_template) for item in rows]
    engine = make_engine(arguments, tokenizer, arguments.concurrency)
    context = replace(
        make_context(arguments, engine, tokenizer, arguments.samples), slots=asyncio.Semaphore(arguments.concurrency)
    )
    started = time.perf_counter()
    with ExitStack() as stack:
        output = stack.enter_context(open(arguments.output, "w", encoding="utf-8")) if arguments.output else None

        async def work() -> list[Group]:
            async with opened(code, arguments.timeout) as executor:
                return list(await asyncio.gather(*(one(executor, item) for item in items)))

        async def one(executor: Any, item: PromptItem) -> Group:
            group = await executor.run_group(item, context)
            _write(output, group, item, tokenizer)
            return group

        groups = run_watched(work, arguments.timeout)
    found = {**metrics(groups, ks, arguments.threshold), "seconds": time.perf_counter() - started}
    if arguments.output:
        print(f"wrote {Path(arguments.output).absolute()}", file=sys.stderr if arguments.json else sys.stdout)
    print(json.dumps(found, indent=1) if arguments.json else table(found))
    return int(all(t.failed for group in groups for t in group))


def _write(output: IO[str] | None, group: Group, item: PromptItem, tokenizer: Any) -> None:
    if output is not None:
        output.writelines(json.dumps(as_json(t, item, tokenizer), ensure_ascii=False) + "\n" for t in group)
        output.flush()


def as_json(trajectory: Trajectory, item: PromptItem, tokenizer: Any) -> dict[str, Any]:
    """An episode as plain JSON; images are left out. turns: where the answers stand in token_ids."""
    failure = trajectory.failure
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    decode = tokenizer.decode
    return {
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "prompt": trajectory.prompt,
        "label": trajectory.label,
        "datasource": item.datasource,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "stop_reason": trajectory.stop_reason.value,
        "failure": None if failure is None else {"border": failure.border, "message": failure.message},
        "text": decode(trajectory.token_ids, skip_special_tokens=False),
        "answers": [decode(trajectory.token_ids[start:end], skip_special_tokens=False) for start, end in spans],
        "turns": [list(span) for span in spans],
        "token_ids": list(trajectory.token_ids),
        "trainable": list(trajectory.trainable),
        "logprobs": list(trajectory.logprobs),
        "extra_logs": dict(trajectory.extra_logs),
    }


def metrics(groups: Sequence[Group], ks: Sequence[int], threshold: float) -> dict[str, float | None]:
    """The table's numbers. An episode with branches counts once, with their mean; one that failed passes nothing.

    pass@k: the unbiased estimate (`unbiased_pass_at_k`) from all episodes of a prompt, mean over prompts.
    """
    samples = [t for group in groups for t in group]
    scores = [_scores(group) for group in groups]
    episodes = [score for group in scores for score in group]
    rewards = [t.reward for t in samples if t.reward is not None and not t.failed]
    passed = [(sum(s is not None and s >= threshold for s in group), len(group)) for group in scores]
    return {
        "prompts": len(groups),
        "episodes": len(episodes),
        "failed": sum(score is None for score in episodes),
        "truncated": sum(t.truncated for t in samples),
        "turns, mean": _mean([len(t.turns) for t in samples]),
        "reward, mean": _mean(rewards),
        "score, mean": _mean([score for score in episodes if score is not None]),
        **{f"pass@{k}": _mean([unbiased_pass_at_k(c, n, k) for c, n in passed if n >= k]) for k in ks},
    }


def _scores(group: Group) -> list[float | None]:
    """One for each episode; None for one that failed."""
    by_episode: dict[int, list[float | None]] = {}
    for t in group:
        by_episode.setdefault(t.sample_index, []).append(None if t.failed else t.score)
    found = ([s for s in scores if s is not None] for scores in by_episode.values())
    return [statistics.fmean(scores) if scores else None for scores in found]


def table(found: dict[str, float | None]) -> str:
    """The metrics in a few lines."""
    width = max(map(len, found))
    return "\n".join(f"{name.ljust(width)}  {'-' if v is None else f'{v:.4g}'}" for name, v in found.items())


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
