"""Tries a chat template on typical conversations: where does it rewrite what the model wrote?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.fields import ApiError
from openrlhf.agents.chat.messages import message_key, read_messages
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.context import SampleEngine
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.testing.engine import ScriptedEngine

SHOWN = 60  # characters around a break
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A conversation: what the user side says, what the model answers, and why it matters."""

    name: str
    asked: Sequence[dict[str, Any]]
    answers: Sequence[str]
    tools: bool = False
    system: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a scenario. error: the template's refusal. detail: where history was rewritten."""

    name: str
    branches: int = 1
    error: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"  {self.name:<34} refused: {self.error}"
        if self.detail:
            return f"  {self.name:<34} rewrites history ({self.branches} samples)\n{self.detail}"
        return f"  {self.name:<34} keeps history"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateReport:
    """outcomes: one per scenario. usable: plain conversations can be rendered."""

    outcomes: Sequence[Outcome]
    advice: str
    usable: bool

    def __str__(self) -> str:
        return "\n".join([*(str(o) for o in self.outcomes), "", self.advice])


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SCENARIOS = (
    Scenario(name="plain turns", asked=[_user("One?"), _user("Two?"), _user("Three?")], answers=["1", "2", "3"]),
    Scenario(
        name="with a system message", asked=[_user("One?"), _user("Two?")], answers=["1", "2"], system="Be brief."
    ),
    Scenario(
        name="reasoning in <think>",
        asked=[_user("One?"), _user("Two?")],
        answers=["<think>\nhm\n</think>\n\n1", "<think>\nhm\n</think>\n\n2"],
    ),
    Scenario(name="blanks around an answer", asked=[_user("One?"), _user("Two?")], answers=[" 1 \n", "2"]),
    Scenario(
        name="a tool call",
        asked=[_user("1+1?"), {"role": "tool", "name": "add", "tool_call_id": "call_0001", "content": "2"}],
        answers=['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "2"],
        tools=True,
    ),
)


def analyse_template(tokenizer: Any) -> TemplateReport:
    """Runs every scenario through a chat session with a scripted model."""
    try:
        renderer = ChatRenderer(tokenizer)
    except ValueError as error:
        return TemplateReport(outcomes=[], advice=f"unusable for chat: {error}", usable=False)
    outcomes = [_try(scenario, renderer, tokenizer) for scenario in SCENARIOS]
    return TemplateReport(outcomes=outcomes, advice=_advice(outcomes), usable=not outcomes[0].error)


def _try(scenario: Scenario, renderer: ChatRenderer, tokenizer: Any) -> Outcome:
    engine = ScriptedEngine(scenario.answers, tokenizer=tokenizer)
    session = ChatSession(renderer, tokenizer, SampleEngine(engine), SamplingParams(), 1_000_000)
    messages: list[dict[str, Any]] = [{"role": "system", "content": scenario.system}] if scenario.system else []
    detail = ""
    try:
        for asked, answer in zip(scenario.asked, scenario.answers, strict=True):
            messages.append(asked)
            before = session.branches[-1].text if session.branches else ""
            text = _say(session, messages, answer, TOOLS if scenario.tools else None)
            if session.template_breaks and not detail:
                detail = _difference(before, text)
    except ApiError as error:
        return Outcome(name=scenario.name, error=error.message)
    return Outcome(name=scenario.name, branches=len(session.branches), detail=detail)


def _say(session: ChatSession, messages: list[dict[str, Any]], answer: str, tools: Any) -> str:
    """One call; appends the reply to `messages` and returns the text that the model saw."""
    conversation = read_messages(messages)
    plan = session.plan(conversation, tools, {})
    generation = asyncio.run(session.generate(plan, SamplingParams()))
    reply: dict[str, Any] = {"role": "assistant", "content": answer}
    if "<tool_call>" in answer:
        reply = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call_0001"}]}
    session.commit(plan, generation, message_key(reply), answer)
    messages.append(reply)
    return plan.text


def _difference(before: str, after: str) -> str:
    """Where the new rendering leaves what the model saw and wrote."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    start = max(0, same - 20)
    return f"      it wrote  {before[start : same + SHOWN]!r}\n      rendered  {after[start : same + SHOWN]!r}"


def _advice(outcomes: Sequence[Outcome]) -> str:
    plain = outcomes[0]
    if plain.error:
        return "unusable for chat: it refuses plain turns. Use MultiTurnAgentExecutor with your own turn markers."
    if plain.detail:
        return (
            "it rewrites plain turns: every call of the chat server becomes a sample of its own. "
            "MultiTurnAgentExecutor keeps one sample per episode."
        )
    broken = [o.name for o in outcomes if o.detail]
    refused = [o.name for o in outcomes if o.error]
    lines = ["append-only for plain turns: the chat server keeps one sample per episode."]
    if broken:
        lines.append(
            f"It rewrites history in: {', '.join(broken)}. There the chat server starts a new sample at every rewrite "
            "(both are trained on); MultiTurnAgentExecutor keeps one sample, with history as it was written."
        )
    if refused:
        lines.append(f"It refuses: {', '.join(refused)}.")
    return "\n".join(lines)
