"""vLLM's tool-call and reasoning parsers for the policy's endpoints: some fifty formats, by name or by family.

What a parser makes of an answer is for the client alone: recorded tokens stay as they were sampled. vLLM is imported
when a parser is made; its names are read from its files.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from openrlhf.agents.chat.call import ToolChoice
from openrlhf.agents.chat.reasoning import split_reasoning, untagged
from openrlhf.agents.chat.tool_formats import checked_call
from openrlhf.agents.chat.tools import Parsed, drafts, hermes_form, parse_answer, read_offered
from openrlhf.agents.failures import warn_once

logger = logging.getLogger(__name__)

AUTO = "auto"
SHOWN = 200
"""Characters of an answer that a parser could not read, in its warning."""
TOOL_MARKS = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<｜DSML｜", "deepseek_v32"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("function<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "lfm2"),
    ("<start_function_call>", "functiongemma"),
    ("<|channel|>commentary", "openai"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|python_tag|>", "llama3_json"),
    ("<|action_start|>", "internlm"),
    ("<tool_call>", "hermes"),
)
"""What a family's chat template writes around calls, and the parser for it. The first that is found counts."""
REASONING_MARKS = (
    ("<|channel|>analysis", "openai_gptoss"),
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("enable_thinking", "qwen3"),
    ("<think>", "deepseek_r1"),
)


def parser_names(kind: Literal["tool_parsers", "reasoning"]) -> frozenset[str]:
    """The parsers that vLLM has, read without importing it; none where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        text = (Path(folder) / kind / "__init__.py").read_text(encoding="utf-8")
        return frozenset(re.findall(r'^ +"([^"]+)": \(', text, re.MULTILINE))
    return frozenset()


def find_parser(name: str, marks: Sequence[tuple[str, str]], chat_template: str) -> str:
    """The name itself, or for `auto` that of the family whose marks the template writes; empty where there are none."""
    if name != AUTO:
        return name
    return next((parser for mark, parser in marks if mark in chat_template), "")


class VllmParser:
    """An `AnswerParser` over vLLM's parsers. tool, reasoning: their names, `auto`, or empty for our own."""

    def __init__(self, tokenizer: Any, tool: str = "", reasoning: str = "") -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        template = str(tokenizer.chat_template)
        self.tool = find_parser(tool, TOOL_MARKS, template)
        self.reasoning = find_parser(reasoning, REASONING_MARKS, template)
        for asked, found in ((tool, self.tool), (reasoning, self.reasoning)):
            if asked and not found:
                logger.warning("no parser of vLLM is known for this model's chat template: our own reads its answers")
        self._tokenizer: Any = get_cached_tokenizer(tokenizer)
        self._tools = ToolParserManager.get_tool_parser(self.tool) if self.tool else None
        self._thoughts = ReasoningParserManager.get_reasoning_parser(self.reasoning) if self.reasoning else None

    def read(self, text: str, tools: Sequence[Any], closing: str | None, *, separate: bool) -> Parsed:
        """A parser that fails leaves the text as it is, which counts as malformed."""
        try:
            return self._read(text, tools, closing, separate)
        except Exception as error:
            warn_once(logger, "parser failed", "vLLM's parser could not read %r: %r", text[:SHOWN], error)
            return Parsed(text=text, malformed=[text[:SHOWN]])

    def _read(self, text: str, tools: Sequence[Any], closing: str | None, separate: bool) -> Parsed:
        thought, said, before = "", text, ""
        if self._thoughts is not None and separate:
            thought, said = self._split(text, tools)
        elif self._tools is not None:
            parts = split_reasoning(text, closing)
            before = "".join(part for is_reasoning, part in parts if is_reasoning)
            said = "".join(part for is_reasoning, part in parts if not is_reasoning)
            thought = untagged(before) if separate else ""
        if self._tools is None:
            found = parse_answer(said, read_offered(tools), closing if not thought else None, separate=separate)
            return Parsed(text=found.text, calls=found.calls, reasoning=thought or found.reasoning,
                          malformed=found.malformed)  # fmt: skip
        if not tools:
            return Parsed(text=said.strip() if separate and thought else text, reasoning=thought)
        request = _request(tools)
        found = self._tools(self._tokenizer, request.tools).extract_tool_calls(said, request)
        offered = read_offered(tools)
        calls = [checked_call(c.function.name, c.function.arguments, offered, c.id) for c in found.tool_calls]
        if None in calls:
            return Parsed(text=said if separate else text, reasoning=thought, malformed=[said[:SHOWN]])
        if not calls:
            text = said if separate else text
            return Parsed(text=text, reasoning=thought, malformed=drafts(said, offered))
        kept = (found.content or "").strip()
        return Parsed(text=kept if separate else f"{before}{kept}", calls=[c for c in calls if c], reasoning=thought)

    def _split(self, text: str, tools: Sequence[Any]) -> tuple[str, str]:
        assert self._thoughts is not None
        thought, said = self._thoughts(self._tokenizer).extract_reasoning(text, _request(tools))
        return (thought or "").strip(), (said or "").lstrip("\n")

    def form(self, tools: Sequence[Any], choice: ToolChoice) -> Mapping[str, Any]:
        """Raises ValueError where vLLM has no grammar of the parser's format."""
        if self._tools is None or self.tool == "hermes":
            return hermes_form(tools, choice)
        from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call

        model = self._tools.structural_tag_model
        if model is None:
            raise ValueError(f"vLLM has no grammar for the calls that its parser {self.tool!r} reads")
        wanted: Any = "required"
        if choice.mode == "named":
            wanted = {"type": "function", "function": {"name": choice.name}}
        request = _request(tools, wanted)
        tag = get_model_structural_tag(model, request.tools, request.tool_choice, reasoning=False)
        if tag is not None and not choice.parallel:
            tag = limit_to_single_tool_call(tag)
        assert tag is not None, "there are tools, and a call is asked for"
        return json.loads(tag.model_dump_json(exclude_none=True))["format"]


def _request(tools: Sequence[Any], choice: Any = None) -> Any:
    """What vLLM's parsers want to know of the request."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields = {"tools": list(tools), "tool_choice": choice or "auto"} if tools else {}
    return ChatCompletionRequest(model="policy", messages=[{"role": "user", "content": ""}], **fields)
