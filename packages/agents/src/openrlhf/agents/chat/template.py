"""A tokenizer's chat template, and the forms in which it takes messages: they differ, and the wrong one loses text.

Each form is found out once, by what the template writes of a short conversation: content as text or as a list of
parts (by role), the arguments of a tool call as an object or as JSON text, what stands for the content of a message
that only calls tools, and the key of the reasoning. The chat server and the readers of data share it, so a conversation
has the same tokens in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

PROBE = "openrlhf-7f3a"
PROBE_NAME, PROBE_KEY, PROBE_VALUE = "openrlhf_name", "openrlhf_key", "openrlhf_value"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
STAND_INS = {
    "developer": "system",
    **dict.fromkeys(("function", "function_response", "observation", "ipython"), "tool"),
}
"""Role that a message gets where the template writes nothing of its own."""
PROBE_CALL = {"id": "call00000", "type": "function"}  # the id as strict templates want it: 9 letters and digits
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "What."}}},
    },
}
_EMPTY: tuple[Any, ...] = (None, "", [])
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class PromptError(ValueError):
    """Messages that cannot become a prompt; the caller adds their place."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How calls are written. arguments: "object" or "text"; content: in place of null. problems: form -> what it did.

    writes: whether the template writes calls at all.
    """

    arguments: str = "object"
    content: Any = ""
    writes: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)


class ChatTemplate:
    """Writes conversations with one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._takes: dict[str, tuple[bool | None, bool | None]] = {}
        self._reasoning: dict[str, str] = {}

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, answer_next: bool) -> str:
        """As `render`. Raises PromptError also where the template would leave out a tool call."""
        if any(m.get("tool_calls") for m in messages):
            self._check_calls()
        return self.render(messages, tools, answer_next=answer_next)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        *,
        answer_next: bool,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> str:
        """The text of these messages; answer_next opens the assistant's turn after them. options: variables of the
        template. Raises PromptError where the template refuses them.
        """
        fillers: list[Any] = [None]
        if any(m.get("tool_calls") for m in messages):
            fillers = sorted(_EMPTY, key=lambda content: content != self.calls.content)
        refusal: Exception | None = None
        for content in fillers:
            try:
                return self._apply([self._form(m, content) for m in messages], tools, answer_next, options)
            except Exception as error:  # templates raise whatever they like: a TemplateError, a TypeError, a KeyError
                refusal = refusal or error
        assert refusal is not None
        what = f"{type(refusal).__name__}: {refusal}"
        raise PromptError(f"the chat template refused the messages: {what}") from refusal

    def takes(self, role: str) -> tuple[bool, bool]:
        """Whether the template writes content of this role given as text, and given as a list of parts."""
        text, parts = self._tried(role)
        return text is True, parts is True

    def drops(self, role: str) -> bool:
        """Whether the template writes a conversation with this role and leaves its content out."""
        tried = self._tried(self.role(role))
        return True not in tried and False in tried

    def _tried(self, role: str) -> tuple[bool | None, bool | None]:
        if role not in self._takes:
            parts = [{"type": "text", "text": PROBE}]
            self._takes[role] = self._writes(role, PROBE), self._writes(role, parts)
        return self._takes[role]

    @cached_property
    def calls(self) -> CallForm:
        """How tool calls are written."""
        problems: dict[str, str] = {}
        for arguments in ("object", "text"):
            texts: list[tuple[Any, str]] = []
            for content in _EMPTY:
                try:
                    texts.append((content, self._apply([self.question, self.call(arguments, content)], [PROBE_TOOL])))
                except Exception as error:  # see `write`
                    problems.setdefault(arguments, f"{type(error).__name__}: {error}")
            written = [(c, t) for c, t in texts if PROBE_VALUE in t]
            if not written:
                if texts:
                    problems.pop(arguments, None)  # it writes the message, but no call
                continue
            content, text = min(written, key=lambda found: found[1].count("None"))  # the first of the best
            if f"'{PROBE_KEY}'" not in text and f'\\"{PROBE_KEY}' not in text:
                return CallForm(arguments=arguments, content=content, writes=True)
            problems[arguments] = "its keys are not written as JSON"
        return CallForm(problems=problems)

    def call(self, arguments: str, content: Any) -> dict[str, Any]:
        """A message that calls a tool, for a look at what the template does with it."""
        given = {PROBE_KEY: PROBE_VALUE}
        function = {"name": PROBE_NAME, "arguments": given if arguments == "object" else json.dumps(given)}
        return {"role": "assistant", "content": content, "tool_calls": [{**PROBE_CALL, "function": function}]}

    @property
    def question(self) -> dict[str, Any]:
        """A user's message in the form that the template takes."""
        return {"role": "user", "content": self._content("user", "u")}

    def _check_calls(self) -> None:
        form = self.calls
        if form.writes:
            return
        if len(form.problems) == 2:
            raise PromptError(
                "the chat template takes the arguments of a tool call neither as an object "
                f"({form.problems['object']}) nor as JSON text ({form.problems['text']})"
            )
        raise PromptError("the chat template does not write tool calls; use one that does, or drop such rows")

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        answer_next: bool = False,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools or None, tokenize=False, add_generation_prompt=answer_next, **options
        )

    def _writes(self, role: str, content: Any) -> bool | None:
        """Whether the content is in the text, and as content: not printed as a list. None: the template refuses."""
        message: dict[str, Any] = {"role": role, "content": content}
        tools = None
        if role == "user":
            conversation = [message]
        elif role in ("system", "developer"):
            conversation = [message, self.question]
        elif role == "assistant" or STAND_INS.get(role, role) != "tool":
            conversation = [self.question, message]
        else:
            form, tools = self.calls, [PROBE_TOOL]
            message |= {"name": PROBE_NAME, "tool_call_id": PROBE_CALL["id"]}
            conversation = [self.question, self.call(form.arguments, form.content), message]
        try:
            text = self._apply(conversation, tools)
        except Exception:  # see `write`
            return None
        return PROBE in text and not any(shown in text for shown in ("'type': 'text'", '"type": "text"'))

    def _form(self, message: Mapping[str, Any], filler: Any) -> dict[str, Any]:
        """The message as the template takes it. filler: the content of a message that only calls tools."""
        role, content, calls = self.role(message["role"]), message["content"], message.get("tool_calls")
        formed = {**message, "role": role}
        if calls:
            text = self.calls.arguments == "text"
            formed["tool_calls"] = [_with_arguments(call, text=text) for call in calls]
        formed["content"] = filler if calls and not content else self._content(role, content)
        for key in REASONING_KEYS:
            if message.get(key):
                formed[self._reasoning_key(key)] = formed.pop(key)
        return formed

    def role(self, role: str) -> str:
        """The role itself, or its stand-in where the template writes nothing of it."""
        return STAND_INS[role] if role in STAND_INS and not any(self.takes(role)) else role

    def _content(self, role: str, content: Any) -> Any:
        text, parts = self.takes(role)
        content = "" if content is None else content
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if parts and not text else content
        return text_of(content) if text and not parts and is_text(content) else content

    def _reasoning_key(self, given: str) -> str:
        if given not in self._reasoning:
            keys = [given, *(key for key in REASONING_KEYS if key != given)]
            self._reasoning[given] = next((key for key in keys if self._writes_key(key)), given)
        return self._reasoning[given]

    def _writes_key(self, key: str) -> bool:
        answer = {"role": "assistant", "content": self._content("assistant", "a"), key: PROBE}
        try:
            return PROBE in self._apply([self.question, answer])
        except Exception:  # see `write`
            return False


def _with_arguments(call: Mapping[str, Any], *, text: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def is_text(content: Any) -> bool:
    """Whether content is a list of parts that are all text."""
    return isinstance(content, list) and all(
        isinstance(p.get("text"), str) and p.get("type") == "text" for p in content
    )


def text_of(content: Any) -> str:
    """Content as one text, its text parts a line each, as OpenAI-compatible servers join them."""
    if isinstance(content, list):
        return "\n".join(p["text"] for p in content if isinstance(p.get("text"), str))
    return content or ""
