"""`openrlhf-agents check FILE`: runs episodes, shows them with their masks and names what breaks the contract.

`openrlhf-agents template MODEL`: does its chat template keep history as the model wrote it, and what follows?
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.chat.analysis import analyse_template
from openrlhf.agents.cli.models import add_model_arguments, make_engine, make_tokenizer
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, GroupContext
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.types import PromptItem, StopReason, Trajectory

GREEN, RED, OFF = "\033[32m", "\033[31m", "\033[0m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """error: the contract is broken. Otherwise a hint."""

    error: bool
    text: str


def add_check(commands: Any) -> None:
    parser = commands.add_parser("check", help="run an agent file and name what breaks its contract")
    parser.add_argument("file", help="the agent file")
    parser.add_argument("--prompt", default="Hello! ", help="the prompt (default: %(default)r)")
    parser.add_argument("--label", default="", help="the ground truth")
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--chat-template", action="store_true", help="render the prompt with the chat template")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    add_model_arguments(parser)


def run_check(arguments: argparse.Namespace) -> int:
    executor = load_executor(arguments.file)
    tokenizer = make_tokenizer(arguments.tokenizer)
    prompt = arguments.prompt
    if arguments.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    item = PromptItem(group_id="check", prompt=prompt, label=arguments.label)
    context = make_cli_context(arguments, tokenizer, arguments.episodes)
    trajectories = asyncio.run(run_and_close(executor, [item], context))[0]
    color = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    findings: list[Finding] = []
    for trajectory in trajectories:
        print(show(trajectory, tokenizer, color))
        findings += inspect_trajectory(trajectory, tokenizer, prompt, arguments.chat_template)
    return report(findings, color)


def make_cli_context(arguments: argparse.Namespace, tokenizer: Any, n_samples: int) -> GroupContext:
    """A context with the limits of the command line."""
    return GroupContext(
        engine=make_engine(arguments, tokenizer),
        tokenizer=tokenizer,
        settings=EpisodeSettings(
            n_samples=n_samples,
            sampling=SamplingParams(temperature=arguments.temperature),
            max_length=arguments.max_len,
            max_new_tokens=arguments.max_new_tokens,
            agent=AgentConfig(timeout=arguments.timeout, max_turns=arguments.max_turns),
        ),
        seeds=lambda sample, turn: sample_seed(0, False, 0, 0, sample, turn),
    )


async def run_and_close(executor: Any, items: list[PromptItem], context: GroupContext) -> list[list[Trajectory]]:
    """All groups, at the same time; then the executor's server or clients are closed."""
    try:
        return list(await asyncio.gather(*(executor.run_group(item, context) for item in items)))
    finally:
        if hasattr(executor, "close"):
            await executor.close()


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


def inspect_trajectory(trajectory: Trajectory, tokenizer: Any, prompt: str, templated: bool) -> list[Finding]:
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
    return findings + _inspect_feedback(trajectory, tokenizer, prompt, templated)


def _inspect_feedback(trajectory: Trajectory, tokenizer: Any, prompt: str, templated: bool) -> list[Finding]:
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


def report(findings: list[Finding], color: bool) -> int:
    """Prints every finding once; 1 where one is an error."""
    unique = list(dict.fromkeys(findings))
    for finding in unique:
        mark = "error" if finding.error else "hint"
        start, end = (RED, OFF) if color and finding.error else ("", "")
        print(f"{start}{mark}: {finding.text}{end}")
    if not unique:
        print("ok: nothing found")
    return int(any(finding.error for finding in unique))


def add_template(commands: Any) -> None:
    parser = commands.add_parser("template", help="is a model's chat template append-only? (needs the [hf] extra)")
    parser.add_argument("model", help="a Hugging Face model name or folder")


def run_template(arguments: argparse.Namespace) -> int:
    report = analyse_template(make_tokenizer(arguments.model))
    print(report)
    return int(not report.usable)
