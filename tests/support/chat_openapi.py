"""An OpenAPI description of the chat server's three formats, made of its own tables of fields."""

from typing import Any

from openrlhf.agents.chat import fields
from openrlhf.agents.chat.wires import anthropic, responses

TEXT, FLAG, COUNT, OBJECT = (
    {"type": "string"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 1},
    {"type": "object"},
)
SCHEMA = {"type": "object", "properties": {"type": {"const": "object"}}, "additionalProperties": False}


def of_kind(kind: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required, **optional}
    return {"type": "object", "properties": properties, "required": ["type", *required], "additionalProperties": False}


def fraction(highest: float) -> dict[str, Any]:
    return {"type": "number", "minimum": 0.01, "maximum": highest}


def choice(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def some(items: dict[str, Any], least: int = 0, most: int = 4) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def said_by(roles: list[str], parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    properties = {"role": choice(*roles), "content": {"anyOf": [TEXT, some(parts, 1)]}, **more}
    return {"type": "object", "properties": properties, "required": ["role", "content"], "additionalProperties": False}


NAME = {"type": "string", "pattern": "^[a-z]{1,8}$"}
FUNCTION = {
    "type": "object",
    "properties": {"name": NAME, "description": TEXT, "parameters": SCHEMA, "strict": FLAG},
    "required": ["name"],
    "additionalProperties": False,
}
CALL = of_kind("function", {"id": NAME, "function": {
    "type": "object", "properties": {"name": NAME, "arguments": choice("{}", '{"a": 1}')},
    "required": ["name", "arguments"], "additionalProperties": False,
}})  # fmt: skip
SHARED = {
    "model": choice("policy"), "stream": FLAG, "temperature": fraction(1.0), "top_p": fraction(1.0),
    "session_id": {"type": "null"}, "metadata": OBJECT, "user": TEXT,
}  # fmt: skip
CHAT = {
    **SHARED,
    "messages": some({"anyOf": [
        said_by(["user", "system", "developer"], of_kind("text", {"text": TEXT})),
        said_by(["assistant"], of_kind("text", {"text": TEXT}), tool_calls=some(CALL, 1)),
        said_by(["tool"], of_kind("text", {"text": TEXT}), tool_call_id=NAME),
    ]}, 1),
    "request_id": TEXT, "top_k": COUNT, "min_p": fraction(1.0), "presence_penalty": fraction(2.0),
    "frequency_penalty": fraction(2.0), "repetition_penalty": fraction(2.0), "seed": {"type": "integer"},
    "max_tokens": COUNT, "max_completion_tokens": COUNT, "min_tokens": {"type": "integer", "minimum": 0, "maximum": 3},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, some({"type": "string", "minLength": 1})]},
    "stop_token_ids": some({"type": "integer", "minimum": 0, "maximum": 255}), "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG, "n": {"type": "integer", "minimum": 1, "maximum": 4}, "stream_options": OBJECT,
    "logprobs": FLAG,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "response_format": {"anyOf": [of_kind("text", {}), of_kind("json_object", {})]},
    "tools": some(of_kind("function", {"function": FUNCTION})), "tool_choice": choice("none", "auto", "required"),
    "parallel_tool_calls": FLAG, "chat_template_kwargs": OBJECT, "documents": some(OBJECT),
    "reasoning_effort": choice("low", "high"), "add_generation_prompt": FLAG, "continue_final_message": FLAG,
    "skip_special_tokens": FLAG, "return_token_ids": FLAG, "return_tokens_as_token_ids": FLAG,
    "return_prompt_text": FLAG, "safety_identifier": TEXT,
}  # fmt: skip
BLOCK = {"anyOf": [
    of_kind("text", {"text": TEXT}, cache_control=of_kind("ephemeral", {})),
    of_kind("tool_use", {"id": NAME, "name": NAME, "input": OBJECT}),
    of_kind("tool_result", {"tool_use_id": NAME}, content=TEXT, is_error=FLAG),
    of_kind("thinking", {"thinking": TEXT, "signature": TEXT}),
]}  # fmt: skip
MESSAGES = {
    **SHARED, "max_tokens": COUNT, "messages": some(said_by(["user", "assistant"], BLOCK), 1),
    "system": {"anyOf": [TEXT, some(of_kind("text", {"text": TEXT}), 1)]}, "top_k": COUNT,
    "stop_sequences": some({"type": "string", "minLength": 1}),
    "tools": some({
        "type": "object", "properties": {"name": NAME, "description": TEXT, "input_schema": SCHEMA},
        "required": ["name", "input_schema"], "additionalProperties": False,
    }),
    "tool_choice": {"anyOf": [of_kind(kind, {}) for kind in ("auto", "any", "none")]},
    "thinking": {"anyOf": [of_kind("adaptive", {}), of_kind("disabled", {})]}, "output_config": OBJECT,
}  # fmt: skip
ITEM = {"anyOf": [
    said_by(["user", "system", "developer"], of_kind("input_text", {"text": TEXT})),
    said_by(["assistant"], of_kind("output_text", {"text": TEXT})),
    of_kind("function_call", {"call_id": NAME, "name": NAME, "arguments": choice("{}", '{"a": 1}')}),
    of_kind("function_call_output", {"call_id": NAME, "output": TEXT}),
    of_kind("reasoning", {"summary": some(OBJECT)}, encrypted_content=TEXT),
]}  # fmt: skip
RESPONSES = {
    **SHARED, "input": {"anyOf": [TEXT, some(ITEM, 1)]}, "instructions": TEXT, "max_output_tokens": COUNT,
    "previous_response_id": TEXT, "reasoning": OBJECT, "store": FLAG, "stream_options": OBJECT,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20}, "text": OBJECT,
    "tool_choice": choice("none", "auto", "required"),
    "tools": some(of_kind("function", {"name": NAME}, parameters=SCHEMA)),
    "include": some(choice(responses.ENCRYPTED, responses.LOGPROBS)), "parallel_tool_calls": FLAG,
}  # fmt: skip


def body(types: dict[str, Any], table: Any, required: list[str]) -> dict[str, Any]:
    """The schema of a body: each field of the table, those without a type of ours as anything."""
    names = sorted({*table.HONOURED, *table.LABELS})
    assert set(types) - {"user", "metadata"} <= set(names), set(types) - set(names)
    properties = {name: types.get(name, {}) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def description() -> dict[str, Any]:
    bodies = {
        "/chat/completions": body(CHAT, fields, ["model", "messages"]),
        "/messages": body(MESSAGES, anthropic, ["model", "messages", "max_tokens"]),
        "/messages/count_tokens": body(MESSAGES, anthropic, ["model", "messages"]),
        "/responses": body(RESPONSES, responses, ["model", "input"]),
    }
    answers = {"200": {"description": "an answer"}, "400": {"description": "a refusal"}}
    paths = {
        path: {"post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": answers,
        }}
        for path, schema in bodies.items()
    }  # fmt: skip
    return {"openapi": "3.1.0", "info": {"title": "chat server", "version": "1"}, "paths": paths}
