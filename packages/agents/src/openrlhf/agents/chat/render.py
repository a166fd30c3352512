"""Messages to text with the tokenizer's own chat template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from openrlhf.agents.chat.fields import bad_request

PROBE = "probe7f3a"
MARK = "xOpenEnd7f3ax"  # stands behind a message that is to be continued, while it is rendered
# Parameters of `apply_chat_template`: no variables of a template.
RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "add_special_tokens", "reasoning_effort",
})  # fmt: skip

_ASK = {"role": "user", "content": "x"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {"key": PROBE}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_PROBES: Mapping[str, Sequence[Mapping[str, Any]]] = {  # role: a conversation that holds the probe in that role
    "system": ({"role": "system", "content": PROBE}, _ASK),
    "user": ({"role": "user", "content": PROBE},),
    "assistant": (_ASK, {"role": "assistant", "content": PROBE}, _ASK),
    "tool": (
        _ASK,
        {**_CALLING, "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": PROBE},
    ),
}


class Ending(StrEnum):
    """How a rendered conversation ends."""

    ANSWER = "answer"  # with the beginning of the assistant's message
    CLOSED = "closed"  # behind the last message (add_generation_prompt: false)
    CONTINUED = "continued"  # within the last message, which goes on (continue_final_message)


class ChatRenderer:
    """Renders whole conversations; finds out by trying what the template takes: content as text or as parts, arguments
    as objects or as text, which roles, tools and documents it writes at all."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: use MultiTurnAgentExecutor, or a model with a chat template"
            )
        self.tokenizer = tokenizer
        self._roles: dict[str, bool] = {}
        self.wants_parts = not self._accepts(PROBE) and self._accepts([{"type": "text", "text": PROBE}])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
    ) -> str:
        """The text of a conversation. A template's refusal is a 400 with the template's own words."""
        prepared = [self._prepare(message) for message in messages]
        if ending is Ending.CONTINUED:
            prepared[-1] = _marked(prepared[-1], f"messages[{len(prepared) - 1}]")
        try:
            text = self._apply(prepared, tools, options or {}, generation_prompt=ending is Ending.ANSWER)
        except Exception as error:
            raise bad_request(f"the chat template refused the messages: {error}", "messages") from error
        if not isinstance(text, str):
            raise bad_request(f"the chat template gave no text but {type(text).__name__}", "chat_template_kwargs")
        return text if ending is not Ending.CONTINUED else _open_end(text)

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> None:
        """Raises a 400 that names what the template would leave out: a role, reasoning, tools, documents, an option."""
        for i, message in enumerate(messages):
            if not self.writes_role(message["role"]):
                raise bad_request(
                    f"messages[{i}]: the policy's chat template does not write messages of role {message['role']!r}",
                    f"messages[{i}].role",
                )
            if message.get("reasoning_content") and not self._knows("reasoning_content"):
                where = f"messages[{i}].reasoning_content"
                raise bad_request(f"{where}: the policy's chat template does not write it; put it into content", where)
        if tools and not self.writes_tools:
            raise bad_request(
                "the policy's chat template does not write 'tools': describe them in the messages and read the calls "
                "from the answer's text, or take a chat template that knows tools",
                "tools",
            )
        for name in options:
            known = self.writes_documents if name == "documents" else self._knows(name)
            if not known:
                param = name if name in ("documents", "reasoning_effort") else f"chat_template_kwargs.{name}"
                raise bad_request(f"the policy's chat template has no use for {name!r}: it would be ignored", param)

    def check_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises a 400 where the template would leave the tool calls of a message out."""
        for i, message in enumerate(messages):
            if message.get("tool_calls") and not self.writes_calls:
                where = f"messages[{i}].tool_calls"
                raise bad_request(f"{where}: the policy's chat template does not write tool calls", where)

    @functools.cached_property
    def writes_tools(self) -> bool:
        parameters = {"type": "object", "properties": {}, "required": []}
        tool = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": parameters}}
        return self._writes([_ASK], [tool], {})

    @functools.cached_property
    def writes_documents(self) -> bool:
        return self._writes([_ASK], None, {"documents": [{"title": PROBE, "text": PROBE}]})

    @functools.cached_property
    def writes_calls(self) -> bool:
        return self._writes([_ASK, _CALLING], None, {})

    @functools.cached_property
    def text_arguments(self) -> bool:
        """The template joins the arguments of a call to text, so it wants them as JSON text and not as an object."""
        as_object, as_text = self._arguments_probe({"key": PROBE}), self._arguments_probe(json.dumps({"key": PROBE}))
        return as_text is not None and (as_object is None or f"'{PROBE}'" in as_object)

    def writes_role(self, role: str) -> bool:
        """Whether a message of this role is found in the rendered text."""
        if role not in self._roles:
            self._roles[role] = self._writes([self._with_content(m) for m in _PROBES[role]], None, {})
        return self._roles[role]

    def _knows(self, variable: str) -> bool:
        """Whether the template mentions the variable."""
        template = self.tokenizer.chat_template
        text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
        return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", text) is not None

    def _writes(self, messages: Sequence[Any], tools: Any, options: Mapping[str, Any]) -> bool:
        """The probe is found. A template that refuses the trial has its say when the real messages come."""
        try:
            return PROBE in self._apply([self._prepare(m) for m in messages], tools, options, generation_prompt=True)
        except Exception:  # templates raise whatever they like
            return True

    def _arguments_probe(self, arguments: Any) -> str | None:
        call = {**_CALL, "function": {"name": "f", "arguments": arguments}}
        messages = [_ASK, {**_CALLING, "content": self._content(""), "tool_calls": [call]}]
        try:
            return self._apply(messages, None, {}, generation_prompt=False)
        except Exception:  # templates raise whatever they like
            return None

    def _accepts(self, content: Any) -> bool:
        try:
            return PROBE in self._apply([{"role": "user", "content": content}], None, {}, generation_prompt=True)
        except Exception:  # templates raise whatever they like
            return False

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        prepared = self._with_content(message)
        if prepared.get("tool_calls") and self.text_arguments:
            prepared["tool_calls"] = [_as_text(call) for call in prepared["tool_calls"]]
        return prepared

    def _with_content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._content(message.get("content"))}

    def _content(self, content: Any) -> Any:
        return [{"type": "text", "text": content}] if self.wants_parts and isinstance(content, str) else content

    def _apply(self, messages: Any, tools: Any, options: Mapping[str, Any], *, generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False, **options
        )


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


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
