"""Rubrics: what a judge is asked, and how every kind of answer becomes a score or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.launcher.rewards.rubric import RubricError, ScoreRule, read_rubric

TEXT = """
system = "Grade."
user = "Q: {{ prompt }} A: {{ response }} R: {{ label }} L: {{ columns.level }} { } {% if label %}yes{% endif %}"
[score]
"""


def rule(words: str) -> ScoreRule:
    return read_rubric(TEXT + words, ["level"]).score


def test_a_rubric_is_a_chat_with_everything_in_its_place() -> None:
    rubric = read_rubric(TEXT + 'by = "last_number"', ["level"])
    messages = rubric.messages(prompt="2+2?", response="{{ 4 }} <b>", label="4", columns={"level": 3})
    assert messages == [
        {"role": "system", "content": "Grade."},
        {"role": "user", "content": "Q: 2+2? A: {{ 4 }} <b> R: 4 L: 3 { } yes"},
    ]


REGEX = r"""by = "regex"
pattern = 'Score:\s*(-?[\d.]+)'
"""
TEN = "range = [1, 10]\nto = [0, 1]\n"
CHOICES = 'by = "choices"\nchoices = { A = 1, B = 0.5, AB = 0.25, "not good" = 0 }\n'


@pytest.mark.parametrize(
    ("words", "answer", "score"),
    [
        (REGEX, "Score: 3, no: Score: 7.5", 7.5),
        (REGEX, "I give it a 7", None),
        (REGEX, "Score: .", None),
        (REGEX + TEN, "Score: 10", 1.0),
        (REGEX + TEN, "Score: 1", 0.0),
        (REGEX + TEN, "Score: 5.5", 0.5),
        (REGEX + TEN, "Score: 11", None),
        (REGEX + "range = [0, 1]", "Score: 0.25", 0.25),
        (REGEX, f"Score: {'9' * 400}", None),
        ('by = "last_number"', "between 3 and -4.5e1.", -45.0),
        ('by = "last_number"', "none", None),
        ('by = "json"', 'first {"score": 1} then ```json\n{"why": {"score": 9}, "score": "2.5"}\n```', 2.5),
        ('by = "json"', '{"score": 3} and {"other": 4} and {broken', 3.0),
        ('by = "json"', '{"score": [1]}', None),
        ('by = "json"', '{"score": NaN}', None),
        ('by = "json"\nkey = "grade"', '{"score": 3, "grade": 4}', 4.0),
        ('by = "json"', '{"a":' * 3000, None),
        (CHOICES, "A is better than B", 0.5),
        (CHOICES, "So: AB", 0.25),
        (CHOICES, "it is not good.", 0.0),
        (CHOICES, "BAD", None),
    ],
)
def test_answers_and_their_scores(words: str, answer: str, score: float | None) -> None:
    assert rule(words).read(answer) == score


@given(st.text())
@pytest.mark.parametrize("words", [REGEX + TEN, 'by = "last_number"\n' + TEN, 'by = "json"\n' + TEN, CHOICES])
def test_no_answer_is_an_error_and_no_score_out_of_range(words: str, answer: str) -> None:
    score = rule(words).read(answer)
    assert score is None or 0 <= score <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user = ", "it is no TOML"),
        ('user = "x"', r"\[score\] must say how a score is found: by = one of regex"),
        ('user = "x"\n[score]\nby = "magic"', r"by = one of regex, json, last_number, choices"),
        ('user = 3\n[score]\nby = "last_number"', "`user` must be a text"),
        ('[score]\nby = "last_number"', "`user` must be a text"),
        ('user = "x"\nprompt = "y"\n[score]\nby = "json"', "it has 'prompt'; expected system, user"),
        ('user = "x"\n[score]\nby = "json"\nfield = "s"', r"\[score\] has 'field'; it knows by, pattern, key"),
        ('user = "{{ answer }}"\n[score]\nby = "json"', "'answer' is undefined"),
        ('user = "{{ columns.grade }}"\n[score]\nby = "json"', "has no attribute 'grade'"),
        ('user = "{% if %}"\n[score]\nby = "json"', "its text cannot be written"),
        ('user = "{{ prompt.__class__.__mro__ }}"\n[score]\nby = "json"', "unsafe"),
        ('user = "x"\n[score]\nby = "regex"', "a regular expression with a group"),
        ('user = "x"\n[score]\nby = "regex"\npattern = "["', r"\[score\] pattern: unterminated"),
        ('user = "x"\n[score]\nby = "choices"', "a table of words and their numbers"),
        ('user = "x"\n[score]\nby = "choices"\nchoices = { a = "b" }', "a table of words and their numbers"),
        (
            'user = "x"\n[score]\nby = "json"\nrange = [2, 1]',
            r"range must be two numbers, .* got \[2, 1\]",
        ),
        ('user = "x"\n[score]\nby = "json"\nto = [0, 1]', "without `range`"),
    ],
)
def test_what_is_wrong_with_a_rubric_is_said(text: str, message: str) -> None:
    with pytest.raises(RubricError, match=message):
        read_rubric(text)


def test_the_example_grades_from_one_to_ten() -> None:
    rubric = read_rubric((Path(__file__).parents[2] / "examples" / "judge.toml").read_text())
    assert "A right answer is:\n7" in rubric.messages(prompt="p", response="r", label="7", columns={})[1]["content"]
    assert "right answer" not in rubric.messages(prompt="p", response="r", label="", columns={})[1]["content"]
    assert rubric.score.read("Fine. Score: 10") == 1.0


def test_a_placeholder_without_a_value_in_one_row_is_an_error() -> None:
    rubric = read_rubric(TEXT + 'by = "json"', ["level"])
    values: dict[str, Any] = {"prompt": "p", "response": "r", "label": None, "columns": {}}
    with pytest.raises(RubricError, match="'level'"):
        rubric.messages(**values)
