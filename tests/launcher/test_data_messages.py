"""Fields as messages: text that holds messages, rows of other spellings, prompts that repeat, refusals with reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.messages import joined, parsed, read_messages, same_messages
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.data.supervised import SupervisedDataset, load_supervised
from openrlhf.launcher.supervised.task import make_task
from openrlhf.launcher.supervised_config import PreferenceDataConfig, SftDataConfig, TrainRMConfig, TrainSFTConfig
from support.launcher_tokenizer import CHATML, byte_tokenizer
from support.token_caches import token_cache

U, A, E = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(dataset: SupervisedDataset, row: int = 0) -> str:
    return byte_tokenizer().decode(dataset.unit(0).rows[row].tokens)


def sft(path: str, **options: Any) -> SupervisedDataset:
    data = SftDataConfig(input_key="chat", apply_chat_template=True, **options)
    task = make_task(TrainSFTConfig(data=data), byte_tokenizer(chat_template=CHATML))
    return load_supervised(path, task.reader, token_cache(path), max_samples=9, seed=1)


def pairs(path: str, **options: Any) -> SupervisedDataset:
    data = PreferenceDataConfig(apply_chat_template=True, **options)
    task = make_task(TrainRMConfig(data=data), byte_tokenizer(chat_template=CHATML))
    return load_supervised(path, task.reader, token_cache(path), max_samples=9, seed=1)


@pytest.mark.parametrize("spell", [json.dumps, repr, lambda m: json.dumps(m, indent=1), lambda m: " " + json.dumps(m)])
def test_t07_messages_as_text(tmp_path: Path, spell: Any) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"chat": spell(CHAT), "chosen": spell(CHAT), "rejected": spell([CHAT[0], CHAT[1] | {"content": "b"}])},
    )
    assert text(sft(path)) == f"{U}q{E}\n{A}a{E}"
    assert [text(pairs(path), i) for i in (0, 1)] == [f"{U}q{E}\n{A}{c}{E}" for c in "ab"]
    data = DataConfig(prompt_dataset=path, input_key="chat", apply_chat_template=True)
    assert load_prompts(data, byte_tokenizer(chat_template=CHATML)).items()[0].prompt == f"{U}q{E}\n{A}a{E}\n{A}"
    with pytest.raises(ValueError, match=r"expected a string, got a list of messages; add --data.apply_chat_template"):
        load_prompts(DataConfig(prompt_dataset=path, input_key="chat"), byte_tokenizer())


@pytest.mark.parametrize(
    "value", ["[1, 2]", '[{"a": 1}]', "[{", "[{'role': x}]", '{"role": "user", "content": "q"}', "[x] [{"]
)
def test_t07_other_texts_stay_texts(value: str) -> None:
    assert parsed(value) is value


def test_t08_rows_of_from_and_value(tmp_path: Path) -> None:
    rows = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = write(
        tmp_path / "a.jsonl", {"chat": rows, "chosen": rows, "rejected": [*rows[:2], {"from": "gpt", "value": "b"}]}
    )
    start = f"<|im_start|>system\ns{E}\n{U}q{E}\n{A}"
    assert text(sft(path)) == f"{start}a{E}"
    assert [text(pairs(path), i) for i in (0, 1)] == [f"{start}{c}{E}" for c in "ab"]


def test_t08_calls_as_messages_of_their_own() -> None:
    call = {"name": "look_up", "arguments": {"place": "x"}}
    want = [{"type": "function", "function": call}]
    for message in (
        {"from": "function_call", "value": json.dumps(call)},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {**call}, "type": "function"}]},
    ):
        assert read_messages([message]) == [{"role": "assistant", "content": None, "tool_calls": want}]
    with pytest.raises(PromptError, match="message 0: the call is not JSON: 'look up'"):
        read_messages([{"from": "function_call", "value": "look up"}])
    for wrong in ("look_up", {}, {"function": "look_up"}, {"function": {"arguments": {}}}):
        with pytest.raises(PromptError, match=r"message 0: expected a tool call \{\"function\": "):
            read_messages([{"role": "assistant", "content": None, "tool_calls": [wrong]}])


def test_t09_null_where_a_text_belongs() -> None:
    with pytest.raises(PromptError, match="message 0: the content of role 'user' is null"):
        read_messages([{"role": "user"}])


def test_t11_a_prompt_that_differs_by_blanks_from_the_conversation(tmp_path: Path) -> None:
    answers = {"chosen": CHAT, "rejected": [{"role": "user", "content": "q"}, CHAT[1] | {"content": "b"}]}
    want = [f"{U}q{E}\n{A}{c}{E}" for c in "ab"]
    for prompt in ("q ", "\nq", [{"role": "user", "content": " q\n"}], [{"role": "human", "content": "q"}]):
        path = write(tmp_path / "a.jsonl", {"prompt": prompt, **answers})
        assert [text(pairs(path, prompt_key="prompt"), i) for i in (0, 1)] == want
    blank = {**answers, "rejected": [{"role": "user", "content": "q \n"}, CHAT[1] | {"content": "b"}]}
    assert [text(pairs(write(tmp_path / "b.jsonl", blank)), i) for i in (0, 1)] == want
    assert text(sft(write(tmp_path / "c.jsonl", {"chat": " q", "output": CHAT}), output_key="output")) == want[0]


def test_t11_messages_that_differ_in_more_than_blanks() -> None:
    assert not same_messages([CHAT[0]], [{"role": "user", "content": "Q"}])
    assert not same_messages(CHAT[:1], CHAT)
    assert joined([CHAT[0]], CHAT) == CHAT
    assert joined([CHAT[0]], CHAT[1:]) == CHAT
    assert joined([], CHAT) == CHAT
