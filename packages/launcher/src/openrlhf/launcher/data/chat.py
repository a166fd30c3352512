"""A prompt field as the text that the model continues: chat template, input template, special tokens in user text.

The text is complete: tokenised **without** adding special tokens it gives exactly the ids of the prompt. A templated
prompt is what the template wrote, with or without a BOS (as in the tokenizer's own `apply_chat_template`); plain text
gets the BOS in front when the tokenizer would add one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ZERO_WIDTH_SPACE = "\u200b"
ESCAPE = "escape"
IMAGE_TAG = "<image>"
SPECIAL_TOKEN_POLICIES = ("warn", ESCAPE)


class PromptError(ValueError):
    """A row that cannot become a prompt; the caller adds the row's place and the field."""


@dataclass
class ChatRenderer:
    """Renders prompt fields with one tokenizer.

    tokenizer: a Hugging Face tokenizer. apply_chat_template: render message lists (a string is one user message).
    input_template: text with one `{}` for the prompt, used where no chat template is applied.
    special_tokens: what happens to special tokens spelled out in message text (`<|im_end|>` typed by a user):
    "warn" leaves them (they become real special tokens; `injected` counts the prompts), "escape" puts a zero-width
    space after their first character, so that they stay text in training and serving alike.
    image_token: what stands for an image in the text of a vision-language model. In the texts of a prompt with images
    every `<image>` is the place of one.
    """

    tokenizer: Any
    apply_chat_template: bool = False
    input_template: str | None = None
    special_tokens: str = "warn"
    injected: int = 0
    image_token: str | None = None

    def __post_init__(self) -> None:
        if self.special_tokens not in SPECIAL_TOKEN_POLICIES:
            raise ValueError(f"special_tokens must be one of {SPECIAL_TOKEN_POLICIES}, got {self.special_tokens!r}")
        if self.apply_chat_template and self.input_template is not None:
            raise ValueError("--data.input_template has no effect with --data.apply_chat_template; drop one of them")
        if self.apply_chat_template and self.tokenizer.chat_template is None:
            raise ValueError(
                f"--data.apply_chat_template: the tokenizer of {self.tokenizer.name_or_path!r} has no chat template; "
                "drop the flag or use a model with one"
            )
        if self.input_template is not None and self.input_template.count("{}") != 1:
            raise ValueError(f"--data.input_template must contain {{}} exactly once, got {self.input_template!r}")
        self._special = _special_pattern(self.tokenizer)
        bos = self.tokenizer.bos_token
        adds_bos = bos is not None and self.tokenizer("a")["input_ids"][0] == self.tokenizer.bos_token_id
        self._bos = bos if adds_bos else ""
        self._wants_parts = self.image_token is not None and self.apply_chat_template and self._drops_strings()

    def render(self, value: Any, tools: Any = None, images: int = 0) -> str:
        """The prompt text of one field. `tools` is handed to the chat template. images: how many belong to it.

        Raises PromptError, also where the text has not one place for every image.
        """
        if images and self.image_token is None:
            raise PromptError(f"{images} images, but the model is no vision-language model")
        if self.apply_chat_template:
            text = self.template(self.messages(value, images), tools, answer_next=True)
        else:
            text = self.plain(value, images)
        if self.image_token is not None:
            self._check_places(text, images)
        if not text:
            raise PromptError("expected a prompt, got an empty string")
        return valid_unicode(text)

    def _check_places(self, text: str, images: int) -> None:
        assert self.image_token is not None
        places = text.count(self.image_token)
        if places != images:
            raise PromptError(
                f'{places} places for {images} images: write {IMAGE_TAG} in the text (or a {{"type": "image"}} part) '
                f"once for every image; {self.image_token!r} stands for one too"
            )

    def _drops_strings(self) -> bool:
        """Whether the chat template loses a message whose content is a string; some only know lists of parts."""
        probe = [{"role": "user", "content": "openrlhf"}]
        try:
            return "openrlhf" not in self.tokenizer.apply_chat_template(probe, tokenize=False)
        except Exception:  # templates raise whatever they like
            return True

    def plain(self, value: Any, images: int = 0) -> str:
        """Text without a chat template: the input template filled in, the BOS in front where the tokenizer adds one."""
        text = self.text(value)
        if images and self.image_token is not None:
            text = text.replace(IMAGE_TAG, self.image_token)
        if self.input_template is not None:
            text = self.input_template.replace("{}", text)
        return text if not self._bos or text.startswith(self._bos) else self._bos + text

    def text(self, value: Any) -> str:
        """A field that must be a string, with special tokens in it handled. Raises PromptError."""
        if isinstance(value, list):
            raise PromptError("expected a string, got a list of messages; add --data.apply_chat_template")
        if not isinstance(value, str):
            raise PromptError(f"expected a string, got {type(value).__name__}: {value!r:.80}")
        return valid_unicode(self._clean(value))

    def messages(self, value: Any, images: int = 0) -> list[dict[str, Any]]:
        """A field as checked messages (a string is one user message), special tokens in them handled."""
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        check_messages(messages)
        if images:
            messages = [{**m, "content": split_tags(m.get("content"))} for m in messages]
        if self._wants_parts:
            messages = [{**m, "content": as_parts(m.get("content"))} for m in messages]
        before = self.injected
        messages = [self._clean_message(m) for m in messages]
        self.injected = min(self.injected, before + 1)
        return messages

    def template(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, answer_next: bool) -> str:
        """What the chat template writes for these messages; answer_next opens the assistant's turn after them."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=answer_next
            )
        except Exception as error:  # templates raise whatever they like: a TemplateError, a TypeError, a KeyError
            raise PromptError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error

    def last_special(self, text: str) -> int:
        """Where the last special token in the text ends; 0 when there is none."""
        ends = [m.end() for m in self._special.finditer(text)] if self._special is not None else []
        return ends[-1] if ends else 0

    def _clean_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        changed = {} if calls is None else {"tool_calls": _parse_arguments(calls)}
        return {**message, "content": self._clean_content(message.get("content")), **changed}

    def _clean_content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._clean(content)
        if isinstance(content, list):
            return [{**p, "text": self._clean(p["text"])} if isinstance(p.get("text"), str) else p for p in content]
        return content

    def _clean(self, text: str) -> str:
        if self._special is None or self._special.search(text) is None:
            return text
        self.injected += 1
        if self.special_tokens != ESCAPE:
            return text
        return self._special.sub(lambda m: m[0][0] + ZERO_WIDTH_SPACE + m[0][1:], text)


def valid_unicode(text: str) -> str:
    """The text itself. PromptError for text that no file can hold, such as half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start : error.end]
        raise PromptError(f"expected valid Unicode, got {wrong!r} ({error.reason})") from None
    return text


def split_tags(content: Any) -> Any:
    """Content with every `<image>` in its texts as a part of its own."""
    if isinstance(content, str):
        return _split(content) if IMAGE_TAG in content else content
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if part.get("type") in ("image", "image_url"):
            parts.append({"type": "image"})  # whatever it carries went to the images
        elif isinstance(part.get("text"), str) and IMAGE_TAG in part["text"]:
            parts.extend(_split(part["text"]))
        else:
            parts.append(part)
    return parts


def _split(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def as_parts(content: Any) -> Any:
    """A string as a list with one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def check_messages(messages: Any) -> None:
    """PromptError unless these are chat messages: a non-empty list of objects with a role and a content."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise PromptError(f"expected a string or a list of messages, got {type(messages).__name__}: {messages!r:.80}")
    if not messages:
        raise PromptError("expected at least one message, got an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f'message {i}: expected an object with "role" and "content", got {message!r:.80}')
        content = message.get("content")
        parts_ok = isinstance(content, list) and all(isinstance(p, Mapping) for p in content)
        if not (content is None or isinstance(content, str) or parts_ok):
            raise PromptError(f"message {i}: content must be a string or a list of parts, got {content!r:.80}")


def row_tools(row: Mapping[str, Any]) -> Any:
    """A row's tool descriptions for the chat template: a list, or JSON text of one. Raises PromptError."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise PromptError(f"field 'tools': expected a list or its JSON text ({error})") from error
    return tools or None


def _parse_arguments(calls: Sequence[Any]) -> list[Any]:
    """Tool calls with `function.arguments` as a mapping: JSON text on the wire, but templates want the object."""
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                call = {**call, "function": {**call["function"], "arguments": json.loads(arguments or "{}")}}
            except json.JSONDecodeError as error:
                raise PromptError(f"tool call arguments are not JSON: {arguments!r:.80} ({error})") from None
        parsed.append(call)
    return parsed


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the special tokens of more than one character that text can spell out."""
    names = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    names |= set(tokenizer.all_special_tokens)
    names = {n for n in names if len(n) > 1}
    return re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))) if names else None
