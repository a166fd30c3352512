"""A conversation request and its answer as the recorder knows them, whatever wire format they came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.agents.chat.messages import Conversation
from openrlhf.agents.chat.render import Ending
from openrlhf.agents.engine import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """mode: "named" calls the tool `name`, "required" any, "auto" none or some. parallel: several calls at once."""

    mode: Literal["auto", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True
    field: str = "tool_choice"
    """What the wire format calls it, for errors."""

    @property
    def free(self) -> bool:
        """Whether it asks for nothing that a model does not do by itself."""
        return self.mode == "auto" and self.parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """JSON that the text of an answer must be. field: what the wire format calls it, for errors."""

    schema: Mapping[str, Any]
    field: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Display:
    """How an answer is shown; nothing here changes what is sampled."""

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_names: bool = False  # tokens of the log-probs as "token_id:N"
    prompt_ids: bool = False
    prompt_text: bool = False
    stop_string: bool = False  # the stop string stays in the text
    skip_special: bool = False
    request_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A checked request. sampling: the session's template with what the request changes; seed None: the session's.

    separate: the answer has its reasoning apart from its text. body: the request as it came, for answers that repeat
    parts of it.
    """

    model: str
    conversation: Conversation
    sampling: SamplingParams
    tools: Sequence[Any] | None = None
    tool_choice: ToolChoice = ToolChoice()
    answer_format: AnswerFormat | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    ending: Ending = Ending.ANSWER
    separate: bool = False
    display: Display = field(default_factory=Display)
    id_prefix: str = "chatcmpl-"
    body: Mapping[str, Any] = field(default_factory=dict)
