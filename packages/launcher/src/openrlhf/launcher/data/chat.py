"""A prompt field as the text that the model continues: chat template, input template, special tokens in user text.

The text is complete: tokenised **without** adding special tokens it gives exactly the ids of the prompt. A templated
prompt is what the template wrote, with or without a BOS (as in the tokenizer's own `apply_chat_template`); plain text
gets the BOS in front when the tokenizer would add one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from openrlhf.agents.chat.template import ChatTemplate, PromptError
from openrlhf.launcher.data.dropped import Lost, lost_texts
from openrlhf.launcher.data.messages import parsed, read_messages
from openrlhf.launcher.data.turns import TurnEnds, stop_token_ids

ZERO_WIDTH_SPACE = "\u200b"
ESCAPE = "escape"
IMAGE_TAG = "<image>"
SPECIAL_TOKEN_POLICIES = ("warn", ESCAPE)


def template_problem(text: str) -> str:
    """What keeps a text from being the template of a prompt; empty where nothing does."""
    if text.count("{}") == 1:
        return ""
    return "it has several places for the prompt" if "{}" in text else "it has no place for the prompt"


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

    lost: the texts of the last conversation that the chat template left out.
    """

    tokenizer: Any
    apply_chat_template: bool = False
    input_template: str | None = None
    special_tokens: str = "warn"
    injected: int = 0
    image_token: str | None = None
    lost: list[Lost] = field(default_factory=list)

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
        if self.input_template is not None and (problem := template_problem(self.input_template)):
            raise ValueError(f"--data.input_template {self.input_template!r}: {problem}")
        self._special = _special_pattern(self.tokenizer)
        bos = self.tokenizer.bos_token
        adds_bos = bos is not None and self.tokenizer("a")["input_ids"][0] == self.tokenizer.bos_token_id
        self._bos = bos if adds_bos else ""
        self.chat = ChatTemplate(self.tokenizer)
        self.ends = TurnEnds(self.chat, self._special)

    def render(self, value: Any, tools: Any = None, images: int = 0) -> str:
        """The prompt text of one field. `tools` is handed to the chat template. images: how many belong to it.

        Raises PromptError, also where the text has not one place for every image.
        """
        if images and self.image_token is None:
            raise PromptError(f"{images} images, but the model is no vision-language model")
        self.lost = []
        if self.apply_chat_template:
            messages = self.messages(value, images)
            text = self.chat.write(messages, tools, answer_next=True)
            self.check(messages, tools, [text])
        else:
            text = self.plain(parsed(value), images)
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

    def check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        written: Sequence[str],
        own: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Keep in `lost` what the messages hold and the texts do not. own: the text that a message must be found in.

        Raises PromptError for lost tool calls.
        """
        self.lost = lost_texts(messages, tools, written, own, self.chat)

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
        """A field as messages (see `read_messages`), special tokens in them handled. Raises PromptError."""
        messages = read_messages(value)
        if images:
            messages = [{**m, "content": split_tags(m.get("content"))} for m in messages]
        before = self.injected
        messages = [self._clean_message(m) for m in messages]
        self.injected = min(self.injected, before + 1)
        return messages

    def last_special(self, text: str) -> int:
        """Where the last special token in the text ends; 0 when there is none."""
        ends = [m.end() for m in self._special.finditer(text)] if self._special is not None else []
        return ends[-1] if ends else 0

    def without_special(self, text: str) -> str:
        """The text without its special tokens."""
        return text if self._special is None else self._special.sub("", text)

    def special_at(self, text: str, start: int) -> int | None:
        """Where the special token ends that begins at `start`, or behind blanks there; None where there is none."""
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        match = self._special.match(text, begin) if self._special is not None else None
        return None if match is None else match.end()

    def _clean_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._clean_content(message["content"])}

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


def turn_stops(tokenizer: Any) -> tuple[int, ...]:
    """Ids at which an engine stops beside the end-of-sequence token: those that end a turn in the chat template."""
    if tokenizer.chat_template is None:
        return ()
    return stop_token_ids(tokenizer, ChatRenderer(tokenizer, apply_chat_template=True).ends)


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


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the special tokens of more than one character that text can spell out."""
    names = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    names |= set(tokenizer.all_special_tokens)
    names = {n for n in names if len(n) > 1}
    return re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))) if names else None
