"""Rows of the shapes that public datasets have, each through the prompt loader: what comes out, or what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.prompts import load_prompts
from support.launcher_tokenizer import CHATML, WITH_TOOLS, byte_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def items(path: Path, rows: Sequence[dict[str, Any]], template: str = CHATML, **options: Any) -> list[PromptItem]:
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = DataConfig(prompt_dataset=str(path), **{"apply_chat_template": True, "input_key": "prompt", **options})
    return load_prompts(data, byte_tokenizer(chat_template=template)).items()


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def rendered(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def verl_row(number: int, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "demo/sums",
        "prompt": user(f"What is {number} + 1? Put the number last."),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "answer": f"#### {number + 1}", "question": "q", **extra},
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f01_question_and_worked_answer(tmp_path: Path, kind: str) -> None:
    answers = ["2+2=<<2+2=4>>4\n#### 4", "#### -3", "#### 70,000", "a #### b\n#### $5 ", "#### 1.50"]
    rows = [{"question": f"Question {i}?", "answer": a} for i, a in enumerate(answers)]
    found = items(tmp_path / f"a.{kind}", rows, input_key="question", label_key="answer")
    assert [i.label for i in found] == answers
    assert found[1].prompt == rendered("Question 1?")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f02_nested_ground_truth(tmp_path: Path, kind: str) -> None:
    rows = [verl_row(1), verl_row(2)]
    found = items(tmp_path / f"a.{kind}", rows, label_key="reward_model.ground_truth")
    assert [i.label for i in found] == ["2", "3"]
    assert found[0].prompt == rendered("What is 1 + 1? Put the number last.")
    whole = items(tmp_path / f"b.{kind}", rows, label_key="reward_model")
    assert whole[0].label == {"style": "rule", "ground_truth": "2"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f03_tool_agent_rows_of_two_tools(tmp_path: Path, kind: str) -> None:
    tools = [{"adder": {"create_kwargs": {"ground_truth": "2"}}}, {"search": {"create_kwargs": {"ground_truth": "3"}}}]
    rows = [verl_row(i + 1, need_tools_kwargs=True, tools_kwargs=t) for i, t in enumerate(tools)]
    for row in rows:
        row["agent_name"] = "tool_agent"
        row["prompt"] = [{"role": "system", "content": "Use the tool."}, *row["prompt"]]
    found = items(tmp_path / f"a.{kind}", rows, label_key="extra_info.tools_kwargs")
    assert [i.label for i in found] == tools
    assert found[0].prompt.startswith("<|im_start|>system\nUse the tool.<|im_end|>\n")


def test_f04_images(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Find x."}]
    row = {"prompt": user(parts), "images": ["/path.png"], "label": "3"}
    text_only = {"prompt": user("the tag <image> in a text"), "label": "4"}
    with pytest.raises(ValueError, match=r"1 images in field 'images', but --data\.max_images_per_prompt is 0"):
        items(tmp_path / "a.jsonl", [row])
    found = items(tmp_path / "b.jsonl", [text_only], WITH_TOOLS, label_key="label", max_images_per_prompt=1)
    assert found[0].images == ()
    assert json.loads(found[0].prompt)["content"] == "the tag <image> in a text"
    raw = {"images": ["/a.png"], "problem": "<image>Find x.", "answer": "3"}
    line = r"it has images, problem, answer; try --data\.input_key problem --data\.label_key answer$"
    with pytest.raises(ValueError, match=rf"--data\.input_key 'prompt': .* {line}"):
        items(tmp_path / "raw.jsonl", [raw], label_key="label")


def test_f05_repeated_prompts(tmp_path: Path) -> None:
    rows = [verl_row(i % 3) for i in range(30)]
    found = items(tmp_path / "a.parquet", rows, label_key="reward_model.ground_truth")
    assert len({i.group_id for i in found}) == 30
    assert len({i.prompt for i in found}) == 3


def test_f06_context_messages_without_label(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, *user("u"), {"role": "assistant", "content": "a"}, *user("v")]
    row = {"context_messages": chat, "context": "u", "dataset": "demo", "id": "7"}
    found = items(tmp_path / "a.jsonl", [row], input_key="context_messages")
    assert found[0].label == ""
    assert found[0].prompt.count("<|im_start|>") == 5


def test_f08_transcripts_as_text(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: hi\n\nAssistant:", "response": " hello", "chosen": " hello", "rejected": " go away"}
    assert items(tmp_path / "a.jsonl", [row], apply_chat_template=False)[0].prompt == "\n\nHuman: hi\n\nAssistant:"


def test_f10_question_with_an_input_template(tmp_path: Path) -> None:
    row = {"id": "1", "system_prompt": "", "question": "Why?", "response": "Because."}
    options: dict[str, Any] = {"input_key": "question", "input_template": "User: {}\nAssistant: "}
    found = items(tmp_path / "a.jsonl", [row], apply_chat_template=False, **options)
    assert found[0].prompt == "User: Why?\nAssistant: "


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f11_b039_tool_calls_of_two_tools_stay_apart(tmp_path: Path, kind: str) -> None:
    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
        chat = [
            *user("q"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
        return {"prompt": chat, "tools": [{"name": name, "parameters": dict.fromkeys(arguments, "int")}]}

    rows = [row("add", {"a": 1}), row("find", {"b": 2})]
    first, second = items(tmp_path / f"a.{kind}", rows, WITH_TOOLS)
    assert '"arguments": {"a": 1}' in first.prompt
    assert '"arguments": {"b": 2}' in second.prompt
    assert '"parameters": {"b": "int"}' in second.prompt
    assert '"a"' not in second.prompt


def test_f11_arguments_as_json_text(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Paris"}'}}
    chat = [*user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"arguments": {"city": "Paris"}' in items(tmp_path / "a.jsonl", [{"prompt": chat}], WITH_TOOLS)[0].prompt
    call["function"]["arguments"] = "{"
    with pytest.raises(ValueError, match=r"line 1, field 'prompt': tool call arguments are not JSON: '\{'"):
        items(tmp_path / "a.jsonl", [{"prompt": chat}], WITH_TOOLS)


def test_odd_messages(tmp_path: Path) -> None:
    for value, message in (
        ([], "expected at least one message, got an empty list"),
        ([{"content": "x"}], 'message 0: expected an object with "role" and "content"'),
        ([{"role": "user", "content": 3}], "message 0: content must be a string or a list of parts, got 3"),
        (7, "expected a string or a list of messages, got int: 7"),
        ({"role": "user"}, "expected a string or a list of messages, got dict"),
    ):
        with pytest.raises(ValueError, match=message):
            items(tmp_path / "a.jsonl", [{"prompt": value}])
