"""What a request asks of the policy's chat template (see `template`), and what the template cannot do of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from openrlhf.agents.chat.fields import bad_request
from openrlhf.agents.chat.template import PROBE, PROBE_NAME, PROBE_TOOL, REASONING_KEYS, ChatTemplate, PromptError

MARK = "xOpenEnd7f3ax"  # stands behind a message that is to be continued, while it is rendered
# Parameters of `apply_chat_template`: no variables of a template.
RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "add_special_tokens", "reasoning_effort",
})  # fmt: skip


class Ending(StrEnum):
    """How a rendered conversation ends."""

    ANSWER = "answer"  # with the beginning of the assistant's message
    CLOSED = "closed"  # behind the last message (add_generation_prompt: false)
    CONTINUED = "continued"  # within the last message, which goes on (continue_final_message)


class ChatRenderer:
    """Renders whole conversations, and says what their template would leave out: roles, calls, tools, documents."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: use MultiTurnAgentExecutor, or a model with a chat template"
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
    ) -> str:
        """The text of a conversation. A template's refusal is a 400 with the template's own words."""
        if ending is Ending.CONTINUED:
            messages = [*messages[:-1], _marked(messages[-1], f"messages[{len(messages) - 1}]")]
        try:
            text = self.template.render(messages, tools, answer_next=ending is Ending.ANSWER, options=options or {})
        except PromptError as error:
            raise bad_request(f"the chat template refused the messages: {error.__cause__}", "messages") from error
        if not isinstance(text, str):
            raise bad_request(f"the chat template gave no text but {type(text).__name__}", "chat_template_kwargs")
        return text if ending is not Ending.CONTINUED else _open_end(text)

    def check(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any], places: Sequence[str] = ()
    ) -> None:
        """Raises a 400 that names what the template would leave out: a role, reasoning, tools, documents, an option.

        places: what the request calls the messages, `messages[0]` and so on where it is not given.
        """
        for i, message in enumerate(messages):
            place = places[i] if places else f"messages[{i}]"
            if self.template.drops(message["role"]):
                raise bad_request(
                    f"{place}: the policy's chat template does not write messages of role {message['role']!r}",
                    f"{place}.role",
                )
            if message.get("reasoning_content") and not self.knows_reasoning:
                where = f"{place}.reasoning_content"
                raise bad_request(f"{where}: the policy's chat template does not write it; put it into content", where)
        if tools and not self._writes_tools:
            raise bad_request(
                "the policy's chat template does not write 'tools': describe them in the messages and read the calls "
                "from the answer's text, or take a chat template that knows tools",
                "tools",
            )
        for name in options:
            known = self._writes_documents if name == "documents" else self.knows(name)
            if not known:
                param = name if name in ("documents", "reasoning_effort") else f"chat_template_kwargs.{name}"
                raise bad_request(f"the policy's chat template has no use for {name!r}: it would be ignored", param)

    def check_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises a 400 where the template would leave the tool calls of a message out."""
        for i, message in enumerate(messages):
            if message.get("tool_calls") and not self.template.calls.writes:
                where = f"messages[{i}].tool_calls"
                raise bad_request(f"{where}: the policy's chat template does not write tool calls", where)

    @functools.cached_property
    def _writes_tools(self) -> bool:
        return self._writes(PROBE_NAME, [PROBE_TOOL], {})

    @functools.cached_property
    def _writes_documents(self) -> bool:
        return self._writes(PROBE, None, {"documents": [{"title": PROBE, "text": PROBE}]})

    @functools.cached_property
    def knows_reasoning(self) -> bool:
        """Whether the template mentions the reasoning of a message under any name."""
        return any(self.knows(key) for key in REASONING_KEYS)

    def knows(self, variable: str) -> bool:
        """Whether the template mentions the variable."""
        template = self.tokenizer.chat_template
        text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
        return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", text) is not None

    def _writes(self, probe: str, tools: Any, options: Mapping[str, Any]) -> bool:
        """The probe is found. A template that refuses the trial has its say when the real messages come."""
        try:
            return probe in self.template.render([self.template.question], tools, answer_next=True, options=options)
        except PromptError:
            return True


def _marked(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message with the mark at the end of its text."""
    content = message["content"]
    if message.get("tool_calls"):
        raise bad_request(f"{where} has tool calls and cannot be continued", "continue_final_message")
    if isinstance(content, str):
        return {**message, "content": content + MARK}
    if not content or content[-1]["type"] != "text":
        raise bad_request(f"{where} does not end with text and cannot be continued", "continue_final_message")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + MARK}]}


def _open_end(text: str) -> str:
    before, mark, _ = text.rpartition(MARK)
    if not mark:
        raise bad_request("the chat template does not write the last message", "continue_final_message")
    return before
