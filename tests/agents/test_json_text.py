"""JSON from models and clients: values, and errors that are always ValueErrors."""

import json

import pytest

from openrlhf.agents.graders.patterns import valid_json
from openrlhf.agents.json_text import MAX_DEPTH, parse_json, parse_json_prefix

DEEP = {
    "lists": "[" * 100_000,
    "closed lists": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "just too deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_n13_depth_is_a_value_error(text):
    for parse in (parse_json, parse_json_prefix):
        with pytest.raises(ValueError, match=r"deep|Expecting"):
            parse(text)
    assert not valid_json(text)
    assert not valid_json(f"```json\n{text}\n```", {"type": "array"})


def test_n13_values_that_are_not_too_deep():
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == json.loads(text)
    assert parse_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert valid_json(text, {"type": "array"})


def test_constants():
    assert parse_json("Infinity") == float("inf")
    with pytest.raises(ValueError, match="NaN is no JSON"):
        parse_json("[NaN]", strict=True)


def test_prefix():
    assert parse_json_prefix('a \n {"b": 1} c', 1) == ({"b": 1}, 12)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json_prefix("  ")
