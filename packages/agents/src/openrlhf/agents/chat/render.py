"""Messages to text with the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat.errors import bad_request

PROBE = "probe-7f3a"


class ChatRenderer:
    """Renders whole conversations; finds out once whether the template wants content as text or as a list of parts."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: use MultiTurnAgentExecutor, or a model with a chat template"
            )
        self.tokenizer = tokenizer
        self.wants_parts = not self._accepts(PROBE) and self._accepts([{"type": "text", "text": PROBE}])

    def _accepts(self, content: Any) -> bool:
        try:
            return PROBE in self._apply([{"role": "user", "content": content}], None, {}, True)
        except Exception:  # templates raise whatever they like
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation. A template's refusal is a 400 with the template's own words."""
        prepared = [self._prepare(message) for message in messages]
        try:
            return self._apply(prepared, tools, options or {}, generation_prompt)
        except Exception as error:
            raise bad_request(f"the chat template refused the messages: {error}", "messages") from error

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if self.wants_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return dict(message)

    def _apply(self, messages: Any, tools: Any, options: Mapping[str, Any], generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False, **options
        )
