"""`openrlhf-agents check FILE`: runs episodes, shows them with their masks and names what breaks the contract.

`openrlhf-agents template MODEL`: does its chat template keep history as the model wrote it, and what follows?
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.agents.chat.analysis import analyse_template
from openrlhf.agents.cli.models import DEFAULT_ANSWERS, add_model_arguments, make_engine, make_tokenizer
from openrlhf.agents.cli.subject import make_context, opened, read_file, read_prompts, render, run_watched
from openrlhf.agents.cli.trials import (
    Finding,
    Trial,
    cheap_rewards,
    measure,
    play,
    play_adversaries,
    replay,
    spread,
)
from openrlhf.agents.files import CodeFile
from openrlhf.agents.types import PromptItem, StopReason, Trajectory

GREEN, RED, OFF = "\033[32m", "\033[31m", "\033[0m"
SCRIPT = "the script"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What came of a check. trials: the given model first, then the adversaries."""

    trials: Sequence[Trial]
    speed: dict[str, float]
    findings: Sequence[Finding]


def add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="run an environment or a reward file and name what breaks its contract",
        description="Runs FILE (an agent or a reward file) against a scripted model, against models that misbehave, "
        "and against the same answers twice. Exits with 1 where something is wrong.",
    )
    parser.add_argument("file", help="the agent file, or a file with reward_func")
    parser.add_argument("--prompt", default="Hello! ", help="the prompt (default: %(default)r)")
    parser.add_argument("--label", default="", help="the ground truth")
    parser.add_argument("--data", help="a JSONL file: its first row gives prompt, label and columns")
    parser.add_argument("--input-key", default="prompt")
    parser.add_argument("--label-key", default="label")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--chat-template", action="store_true", help="render the prompt with the chat template")
    parser.add_argument("--random", action="store_true", help="the same answers may get different rewards here")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_model_arguments(parser)


def run_check(arguments: argparse.Namespace) -> int:
    code = read_file(arguments.file)
    tokenizer = make_tokenizer(arguments.tokenizer)
    item = _prompt(arguments, tokenizer)
    checked = run_watched(lambda: _check(code, item, arguments, tokenizer), arguments.timeout)
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    findings = list(dict.fromkeys(checked.findings))
    if arguments.json:
        print(json.dumps(_as_json(checked, findings), ensure_ascii=False, indent=1))
    else:
        for trajectory in checked.trials[0].episodes:
            print(show(trajectory, tokenizer, color))
        print(summary(checked))
        print(report(findings, color))
    return int(any(finding.error for finding in findings))


def _prompt(arguments: argparse.Namespace, tokenizer: Any) -> PromptItem:
    if arguments.data:
        (item,) = read_prompts(Path(arguments.data), arguments.input_key, arguments.label_key, 1)
    else:
        item = PromptItem(group_id="check", prompt=arguments.prompt, label=arguments.label)
    return render(item, tokenizer, arguments.chat_template)


async def _check(code: CodeFile, item: PromptItem, arguments: argparse.Namespace, tokenizer: Any) -> Checked:
    async with opened(code, arguments.timeout) as executor:
        context = make_context(arguments, make_engine(arguments, tokenizer), tokenizer, arguments.episodes)
        first = await play(arguments.model or SCRIPT, executor, item, context)
        adverse = await play_adversaries(executor, item, arguments, tokenizer)
        findings = [f for t in first.episodes for f in inspect_trajectory(t, tokenizer, arguments.chat_template)]
        findings += [f for trial in adverse for t in trial.episodes for f in _survived(trial, t)]
        for trial in (first, *adverse[:-1]):
            findings += await replay(executor, item, trial, arguments, tokenizer)
        speed = await measure(executor, item, arguments, tokenizer, arguments.answer or DEFAULT_ANSWERS)
    findings += cheap_rewards([first], adverse)
    if "graders.code" in code.source:
        findings += _programs()
    return Checked(trials=[first, *adverse], speed=speed, findings=findings)


def _programs() -> list[Finding]:
    from openrlhf.agents.graders.code import isolation, missing_isolation

    fix = f": {missing_isolation()}" if missing_isolation() else ""
    return [Finding(error=False, text=f"programs that it grades are kept apart by {isolation()} here{fix}")]


def _survived(trial: Trial, trajectory: Trajectory) -> list[Finding]:
    """An environment may end an adversary's episode as it likes, with a reward; it may not fail."""
    name = f"with a model that {trial.model}"
    if trajectory.failure is not None:
        failure = trajectory.failure
        text = f"{name}: {failure.border}: {failure.message}\n{failure.traceback}".rstrip()
        return [Finding(error=True, text=text)]
    if trajectory.reward is None:
        return [Finding(error=True, text=f"{name}: no reward came back")]
    return []


def show(trajectory: Trajectory, tokenizer: Any, color: bool) -> str:
    """The episode as text: what the model wrote stands in ⟦ ⟧ (and green), and is what training sees."""
    parts = []
    position = 0
    for turn in trajectory.turns:
        parts.append(tokenizer.decode(trajectory.token_ids[position : turn.start], skip_special_tokens=False))
        sampled = tokenizer.decode(trajectory.token_ids[turn.start : turn.end], skip_special_tokens=False)
        parts.append(f"{GREEN}⟦{sampled}⟧{OFF}" if color else f"⟦{sampled}⟧")
        position = turn.end
    parts.append(tokenizer.decode(trajectory.token_ids[position:], skip_special_tokens=False))
    head = (
        f"--- sample {trajectory.sample_index}: reward {trajectory.reward}, score {trajectory.score}, "
        f"{len(trajectory.turns)} turn(s), {len(trajectory.token_ids)} tokens, ended: {trajectory.stop_reason.value}"
    )
    logs = f"\nlogs: {dict(trajectory.extra_logs)}" if trajectory.extra_logs else ""
    return f"{head}\n{''.join(parts)}{logs}"


def summary(checked: Checked) -> str:
    """A line per model, what would be trained on, how rewards spread, and how fast the environment is."""
    head = ("a model that", "reward", "turns", "trained / all tokens", "ended")
    rows = [head, *(_row(trial.model, t) for trial in checked.trials for t in trial.episodes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rewards = spread(checked.trials)
    if rewards["count"] and rewards["min"] == rewards["max"]:
        lines.append(
            f"rewards: {rewards['min']:g} for every answer; try one that is right (--answer, --label or --data)"
        )
    elif rewards["count"]:
        numbers = f"{rewards['min']:g} to {rewards['max']:g}, mean {rewards['mean']:.3g}"
        lines.append(f"rewards: {numbers}, deviation {rewards['deviation']:.3g}, {rewards['count']} episodes")
    episodes, turns = checked.speed["episodes_per_second"], checked.speed["turns_per_second"]
    lines.append(f"throughput: {episodes:.0f} episodes/s, {turns:.0f} turns/s with a model that answers at once")
    return "\n".join(lines)


def _row(model: str, trajectory: Trajectory) -> tuple[str, ...]:
    reward = "failed" if trajectory.failed else f"{trajectory.reward:g}" if trajectory.reward is not None else "none"
    tokens = f"{trajectory.num_trainable} / {len(trajectory.token_ids)}"
    return model, reward, str(len(trajectory.turns)), tokens, trajectory.stop_reason.value


def _as_json(checked: Checked, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "episodes": [
            {
                "model": trial.model,
                "reward": t.reward,
                "score": t.score,
                "turns": len(t.turns),
                "trained_tokens": t.num_trainable,
                "tokens": len(t.token_ids),
                "ended": t.stop_reason.value,
                "failure": t.failure.message if t.failure else None,
                "extra_logs": dict(t.extra_logs),
            }
            for trial in checked.trials
            for t in trial.episodes
        ],
        "rewards": spread(checked.trials),
        "throughput": checked.speed,
        "findings": [asdict(finding) for finding in findings],
    }


def inspect_trajectory(trajectory: Trajectory, tokenizer: Any, templated: bool) -> list[Finding]:
    """What is wrong with one episode."""
    if trajectory.failure is not None:
        failure = trajectory.failure
        return [Finding(error=True, text=f"{failure.border}: {failure.message}\n{failure.traceback}".rstrip())]
    findings = []
    if trajectory.stop_reason is StopReason.MAX_TURNS:
        text = f"never done: step() had not returned done=True after {len(trajectory.turns)} turns"
        findings.append(Finding(error=True, text=text))
    if trajectory.stop_reason is StopReason.LENGTH:
        text = "an answer was cut by its length (--max-new-tokens), or the context was full (--max-len)"
        findings.append(Finding(error=False, text=text))
    if trajectory.reward is None:
        findings.append(Finding(error=True, text="no reward came back"))
    if not trajectory.num_trainable:
        findings.append(Finding(error=True, text="the model wrote nothing: there is nothing to train on"))
    return findings + _inspect_feedback(trajectory, tokenizer, templated)


def _inspect_feedback(trajectory: Trajectory, tokenizer: Any, templated: bool) -> list[Finding]:
    """Feedback that does not go with the chat template: a doubled end token, no header for the next answer."""
    findings = []
    eos = tokenizer.eos_token_id
    header = generation_header(tokenizer) if templated else ""
    for i, (turn, following) in enumerate(zip(trajectory.turns, trajectory.turns[1:], strict=False), 1):
        ids = list(trajectory.token_ids[turn.end : following.start])
        if ids and eos is not None and ids[0] == eos == trajectory.token_ids[turn.end - 1]:
            text = f"the feedback of turn {i} begins with the end token that the model had already written"
            findings.append(Finding(error=False, text=text))
        said = tokenizer.decode(ids, skip_special_tokens=False)
        if header and not said.endswith(header):
            text = f"the feedback of turn {i} does not end with {header!r}: the model goes on in somebody else's turn"
            findings.append(Finding(error=True, text=text))
    return findings


def generation_header(tokenizer: Any) -> str:
    """What the chat template writes before an answer."""
    messages = [{"role": "user", "content": "x"}]
    without = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
    full = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return full[len(without) :] if full.startswith(without) else ""


def report(findings: Sequence[Finding], color: bool) -> str:
    """A line per finding."""
    if not findings:
        return "ok: nothing found"
    lines = []
    for finding in findings:
        mark = "error" if finding.error else "hint"
        start, end = (RED, OFF) if color and finding.error else ("", "")
        lines.append(f"{start}{mark}: {finding.text}{end}")
    return "\n".join(lines)


def add_template(commands: Any) -> None:
    parser = commands.add_parser("template", help="is a model's chat template append-only? (needs the [hf] extra)")
    parser.add_argument("model", help="a Hugging Face model name or folder")


def run_template(arguments: argparse.Namespace) -> int:
    report = analyse_template(make_tokenizer(arguments.model))
    print(report)
    return int(not report.usable)
