"""The formats in which models write tool calls, one recogniser each, by the names of the models that made them common.

A recogniser takes a part of an answer and the tools that were offered, and returns the text outside of the calls that
it understood, and those calls. What is malformed or calls a tool that was not offered stays in the text. Everything
is linear in the length of the text, and no text makes it raise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.json_text import parse_json, parse_json_prefix, well_formed

Span = tuple[int, int, str]  # from where to where a call stands with its marks, and what is between them


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """An offered tool. properties: the JSON schema of each parameter. accepts: whether it may be called with these
    arguments; anything goes unless the tool is strict."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    accepts: Callable[[dict[str, Any]], bool] = lambda arguments: True


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """id: as the model wrote it, empty where its format has none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


Offered = Mapping[str, Tool]
Found = tuple[str, list[ToolCall]]
Recogniser = Callable[[str, Offered], Found]


def _spans(text: str, opening: str, closing: str, *, open_end: bool = False, nested: bool = True) -> Iterator[Span]:
    """Every `opening ... closing`. open_end: also a last one that is not closed.

    nested: of several openings in a row the last counts, for the others began drafts; else the first, for the others
    are part of a value.
    """
    start = 0
    while (end := text.find(closing, start)) >= 0:
        begin = (text.rfind if nested else text.find)(opening, start, end)
        if begin >= 0:
            yield begin, end + len(closing), text[begin + len(opening) : end]
        start = end + len(closing)
    begin = text.find(opening, start) if open_end else -1
    if begin >= 0:
        yield begin, len(text), text[begin + len(opening) :]


def _collect(text: str, spans: Iterator[Span], read: Callable[[str], ToolCall | None]) -> Found:
    """The calls in those spans that can be read, and the text without them."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    done = 0
    for begin, end, body in spans:
        call = read(body)
        if call is not None:
            kept.append(text[done:begin])
            calls.append(call)
            done = end
    kept.append(text[done:])
    return "".join(kept), calls


def _without(found: Found, *marks: str) -> Found:
    """The text without the marks around a whole section of calls, where there were calls."""
    text, calls = found
    for mark in marks if calls else ():
        text = text.replace(mark, "")
    return text, calls


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _from_object(value: Any, offered: Offered) -> ToolCall | None:
    """`{"name": ..., "arguments": {...}}`; "parameters" is another name of the arguments, which may be JSON text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return checked_call(value["name"], value.get("arguments", value.get("parameters")), offered)


def checked_call(name: str, arguments: Any, offered: Offered, call_id: str = "") -> ToolCall | None:
    """The call, None where no such tool is offered or it does not take these arguments (an object, or JSON of one)."""
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if name not in offered or not isinstance(arguments, dict) or not offered[name].accepts(arguments):
        return None
    return ToolCall(name=name, arguments=well_formed(arguments), id=call_id)


def hermes(text: str, offered: Offered) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the last end missing or not."""
    spans = _spans(text, "<tool_call>", "</tool_call>", open_end=True)
    return _collect(text, spans, lambda body: _from_object(_json(body), offered))


def qwen3_coder(text: str, offered: Offered) -> Found:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, or without the outer tag.

    One newline at each end of a value belongs to the format.
    """

    def read(body: str) -> ToolCall | None:
        name, sep, _ = body.partition(">")
        arguments: dict[str, Any] = {}
        position = body.find("<parameter=")
        while position >= 0 and sep and name in offered:
            begin, end = body.find(">", position), body.find("</parameter>", position)
            if not 0 <= begin < end:
                return None
            key = body[position + len("<parameter=") : begin]
            value = body[begin + 1 : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, offered[name].properties.get(key))
            position = body.find("<parameter=", end)
        return checked_call(name, arguments, offered) if sep else None

    rest, calls = _collect(text, _spans(text, "<function=", "</function>", nested=False), read)
    if calls:  # the outer tags are often incomplete
        rest = re.sub(r"<tool_call>\s*</tool_call>", "", rest)
        if ("<tool_call>" in rest) != ("</tool_call>" in rest):
            rest = rest.replace("<tool_call>", "").replace("</tool_call>", "")
    return rest, calls


def glm(text: str, offered: Offered) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>` (GLM-4.5 and later)."""

    def read(body: str) -> ToolCall | None:
        head, *pairs = body.split("<arg_key>")
        name, arguments = head.strip(), {}
        for pair in pairs if name in offered else ():
            key, _, value = pair.partition("</arg_key>")
            value = value.strip()
            if not (value.startswith("<arg_value>") and value.endswith("</arg_value>")):
                return None
            value = value.removeprefix("<arg_value>").removesuffix("</arg_value>")
            arguments[key.strip()] = _typed(value, offered[name].properties.get(key.strip()))
        return checked_call(name, arguments, offered)

    return _collect(text, _spans(text, "<tool_call>", "</tool_call>"), read)


def kimi_k2(text: str, offered: Offered) -> Found:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section."""

    def read(body: str) -> ToolCall | None:
        call_id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        name = call_id.strip().removeprefix("functions.").partition(":")[0]
        return checked_call(name, arguments, offered, call_id.strip())

    found = _collect(text, _spans(text, "<|tool_call_begin|>", "<|tool_call_end|>"), read)
    return _without(found, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def deepseek_v3(text: str, offered: Offered) -> Found:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, then the arguments in a JSON fence (V3, R1)."""

    def read(body: str) -> ToolCall | None:
        kind, _, rest = body.partition("<｜tool▁sep｜>")
        name, _, arguments = rest.partition("```json")
        arguments, fence, _ = arguments.rpartition("```")
        return checked_call(name.strip(), arguments, offered) if kind.strip() == "function" and fence else None

    return _deepseek(text, read)


def deepseek_v31(text: str, offered: Offered) -> Found:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in a section (V3.1)."""

    def read(body: str) -> ToolCall | None:
        name, _, arguments = body.partition("<｜tool▁sep｜>")
        return checked_call(name.strip(), arguments, offered)

    return _deepseek(text, read)


def _deepseek(text: str, read: Callable[[str], ToolCall | None]) -> Found:
    found = _collect(text, _spans(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), read)
    return _without(found, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def mistral(text: str, offered: Offered) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}` per call."""
    before, *sections = text.split("[TOOL_CALLS]")
    kept, calls = [before], []
    for section in sections:
        rest, found = _mistral_list(section, offered)
        if not found:
            rest, found = _mistral_named(section, offered)
        kept.append(rest if found else f"[TOOL_CALLS]{section}")
        calls += found
    return "".join(kept), calls


def _mistral_list(section: str, offered: Offered) -> Found:
    try:
        values, end = parse_json_prefix(section)
    except ValueError:
        return section, []
    calls = [_from_object(value, offered) for value in values] if isinstance(values, list) else []
    return (section, []) if None in calls else (section[end:], [call for call in calls if call is not None])


def _mistral_named(section: str, offered: Offered) -> Found:
    start = max(section.find("{"), 0)
    name, _, call_id = section[:start].strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    try:
        arguments, end = parse_json_prefix(section, start)
    except ValueError:
        return section, []
    call = checked_call(name.strip(), arguments, offered, call_id.strip())
    return (section, []) if call is None else (section[end:], [call])


def lfm2(text: str, offered: Offered) -> Found:
    """`<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>`, in Python's or in JSON's notation."""
    kept, calls, done = [], [], 0
    for begin, end, body in _spans(text, "<|tool_call_start|>", "<|tool_call_end|>"):
        found = _python_calls(body.strip(), offered) or _json_calls(body, offered)
        if found:
            kept.append(text[done:begin])
            calls += found
            done = end
    return "".join([*kept, text[done:]]), calls


def _json_calls(text: str, offered: Offered) -> list[ToolCall]:
    value = _json(text)
    calls = [_from_object(item, offered) for item in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _python_calls(text: str, offered: Offered) -> list[ToolCall]:
    """The calls in a Python list of calls, or in one call; none where anything else is in it."""
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [_python_call(node, offered) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [] if None in calls else [call for call in calls if call is not None]


def _python_call(node: ast.expr, offered: Offered) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    return checked_call(ast.unparse(node.func), arguments, offered)


def _python_value(node: ast.expr) -> Any:
    """A literal as JSON has them; true, false and null are known, too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return _json(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("keys of JSON objects are text")
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON value")
    return value


def llama_json(text: str, offered: Offered) -> Found:
    """The whole text is `{"name": ..., "parameters": {...}}`, several of them separated by `;`, maybe behind a tag."""
    calls: list[ToolCall] = []
    position, body = 0, text.strip().removeprefix("<|python_tag|>").strip()
    while position < len(body):
        try:
            value, position = parse_json_prefix(body, position)
        except ValueError:
            return text, []
        call = _from_object(value, offered)
        if call is None:
            return text, []
        calls.append(call)
        while position < len(body) and (body[position].isspace() or body[position] == ";"):
            position += 1
    return ("", calls) if calls else (text, [])


def _typed(value: str, schema: Any) -> Any:
    """The value of an argument that came as text. Text stays text where the schema asks for text; without a schema
    what is JSON is read as JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    if "string" in kinds and not (value == "null" and "null" in kinds):
        return value
    plain = value.strip()
    if "boolean" in kinds and plain in ("True", "False"):
        return plain == "True"
    try:
        return parse_json(plain, strict=True)
    except ValueError:
        return value


FORMATS: Mapping[str, Recogniser] = {
    "hermes": hermes,  # also Qwen2.5, Qwen3
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "kimi_k2": kimi_k2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "mistral": mistral,
    "lfm2": lfm2,
    "llama_json": llama_json,
}
