"""Graders: text, numbers, patterns, JSON schemas, math."""

import asyncio
import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from openrlhf.agents.graders.math import extract_answer, grade_math, last_boxed, math_equal
from openrlhf.agents.graders.patterns import matches, schema_errors, valid_json
from openrlhf.agents.graders.text import exact, numeric, response_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"

EQUAL = [
    ("2.5", r"2\frac{1}{2}"), ("5/4", "1 1/4"), ("-1 1/2", "-1.5"), ("11 5/6", "71/6"),  # B138
    (r"\frac12", r"\frac{1}{2}"), ("2/3", r"\frac{2}{3}"), (r"\dfrac{9}{7}", "9/7"), (r"\tfrac{1}{2}", "0.5"),  # B142
    (r"50\%", "0.5"), ("1,000", "1000"), (r"\$5", "5"), (r"5\text{ cm}", "5"), ("x=3", "3"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"), (r"7.41\%", r"7.41\%"),  # B136
    ("#### -3", "-3"), ("72, in total, so", "72"), ("1.50", "1.5"), ("70,000", "70000"),  # B144
    (r"a \boxed{840}. b \boxed{840}", "840"), (r"\boxed{004} c \boxed{004}", "4"), (r"\boxed{1} d \boxed{2}", "2"),
    # B140 above and below
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}"), (r"\boxed {3}", "3"), (r"\fbox{3}", "3"),
    (r"The answer is 42.", "42"), ("So we get $x^2+1$.", "1+x^2"), (r"\boxed{\text{yes}}", "yes"), ("{1,2}", "{2,1}"),
    (r"\boxed{12}<|im_end|>", r"\boxed{12}"), (r"so it is \boxed{7}</s>", "7"),
]  # fmt: skip
DIFFERENT = [
    ("2", "2 2/3"), ("10", "4 10/3"), ("#### 3", "-3"), ("150", "15"), ("10", "100"),  # B138, B144
    ("9007199254740993", "9007199254740992"), (r"\boxed{1} e \boxed{2}", "1"), (r"\boxed{1", "1"), (r"\boxed{}", "0"),
    ("", "5"), ("no idea", "5"), ("1/0", "1"), ("9" * 5000, "9" * 4999), (r"\boxed{10^{10^{10}}}", "1"),
    (r"\boxed{\frac}", "1"), (r"\boxed{3}", ""),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal_math(answer, label):
    assert grade_math(answer, label)


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_math(answer, label):
    assert not grade_math(answer, label)


def test_boxed():  # B140
    assert last_boxed(r"x \boxed{\frac{1}{\sqrt{2}}} y") == r"\frac{1}{\sqrt{2}}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None
    assert extract_answer("the result is 5", require_boxed=True) is None


def test_control_characters_are_repaired_with_a_warning(caplog):  # B142
    with caplog.at_level(logging.WARNING):
        assert math_equal("0.5", "\x0crac{1}{2}")
    assert "control character" in caplog.text


def test_math_works_off_the_main_thread():  # B136
    assert asyncio.run(asyncio.to_thread(grade_math, r"\boxed{x+1}", "1+x"))


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_math_reward_grades_the_response_only():  # O10
    reward_func = load_example("math_reward_func").reward_func
    prompt = r"Write \boxed{5} like this: what is 2+3?"
    queries = [prompt, prompt[9:], prompt + r"\boxed{5}", prompt[20:] + r" \boxed{6}"]
    result = reward_func(queries, [prompt] * 4, ["5"] * 4)
    assert result["rewards"] == [0.0, 0.0, 1.0, 0.0]
    assert reward_func([prompt], [prompt], ["5"], responses=[""])["rewards"] == [0.0]
    with pytest.raises(ValueError, match="does not start with the prompt"):
        reward_func([r"other \boxed{5}"], [prompt], ["5"])


def test_guides_reward_function():
    result = load_example("reward_func").reward_func(["p42<|end|>", "p41"], ["p", "p"], ["42", None])
    assert result["rewards"] == [1.0, 0.0]
    assert result["extra_logs"]["group_solved"] == 1.0


def test_response_of_a_long_cut_prompt():
    prompt = "ab" * 50_000 + "c"
    assert response_of(prompt[77:] + "answer", prompt) == "answer"


def test_exact_and_numeric():
    assert exact(" Paris\n", "paris<|end|>")
    assert not exact("Paris", "paris", ignore_case=False)
    assert numeric("it is 1,000.50 or so", "1000.5")
    assert not numeric("-3", "3")
    assert numeric("3.14", "3.1416", tolerance=0.01)
    assert not numeric("none", "1")


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("2e5", "5", False),
        ("2e5", "200000", True),
        ("2 x 10^5", "200000", True),
        (r"2 \times 10^{5}", "5", False),
        ("10^5", "5", False),
        ("2^{10}", "1024", True),
        ("3/4", "4", False),
        ("3/4", "0.75", True),
        ("7-3", "3", True),
        ("−3", "-3", True),
        ("1/0", "0", False),
        ("1.5e-3", "0.0015", True),
        ("1,000,000", "1000000", True),
        ("it is 5.", "5", True),
    ],
)
def test_g09_numbers_with_their_exponents(answer, label, equal):
    assert numeric(answer, label) is equal
    assert numeric(label, answer) is equal


def test_patterns():
    assert matches("<think>a\nb</think>ok", r"<think>.*</think>")
    assert matches(" 12 ", r"\d+", whole=True)
    assert not matches("12a", r"\d+", whole=True)
    assert matches("\ud800x\n", "\ud800.\n")
    with pytest.raises(ValueError, match="is none"):
        matches("x", "(")


def test_a_pattern_that_does_not_end_on_an_answer_does_not_match():
    assert not matches("a" * 5000, r"(a+)+b")
    assert matches("aab", r"(a+)+b")


SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "more": {"anyOf": [{"type": "null"}, {"const": 1}]},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"name": "Ann", "age": 3}', True),
        ('Sure:\n```json\n{"name": "Ann", "age": 3.0, "tags": ["a"], "more": null}\n```', True),
        ('{"name": "ann", "age": 3}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Ann", "age": 151}', False),
        ('{"name": "Ann", "age": 3, "x": 1}', False),
        ('{"name": "Ann", "age": 3, "tags": ["c"]}', False),
        ('{"name": "Ann", "age": 3, "more": true}', False),
        ('{"name": "Ann", "age": NaN}', False),
        ("no json", False),
    ],
)
def test_json_schema(answer, valid):
    assert valid_json(answer, SCHEMA) is valid


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minimun": 3}, "schema keyword 'minimun' is not supported"),
        ({"items": {"anyOf": [{"typo": 1}]}}, "schema keyword 'typo' is not supported"),
        ({"type": "strin"}, r"the schema is wrong at \$\.type"),
        ({"pattern": "("}, r"the schema is wrong at \$\.pattern"),
        ({"$ref": "#"}, "the schema cannot be checked"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "Unresolvable: http://127.0.0.1:9/schema.json"),
    ],
)
def test_a_schema_that_is_none_is_an_error(schema, message):
    with pytest.raises(ValueError, match=message):
        schema_errors("x", schema)


def test_schema_errors_name_the_place():
    assert schema_errors({"a": [1, "x"]}, {"properties": {"a": {"items": {"type": "integer"}}}}) == [
        "$.a[1]: 'x' is not of type 'integer'"
    ]
    assert schema_errors({"a": 1}, {"dependentSchemas": {"a": {"required": ["b"]}}}) == [
        "$: 'b' is a required property"
    ]
    assert schema_errors([1], {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}) == []
    assert schema_errors(1, True) == []


def test_unknown_keywords_may_be_passed_over():
    schema = {"x-ours": 1, "required": ["b"]}
    assert schema_errors({"a": 1}, schema, lenient=True) == ["$: 'b' is a required property"]
    with pytest.raises(ValueError, match="'x-ours' is not supported"):
        schema_errors({"a": 1}, schema)


def test_without_jsonschema_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema.validators", None)
    with pytest.raises(ImportError, match=r"pip install 'openrlhf-agents\[schema\]'"):
        schema_errors(1, {"maximum": 7})
