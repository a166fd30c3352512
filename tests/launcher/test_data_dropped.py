"""Texts of a row that a chat template leaves out: counted, said once, or refused; in prompts, turns and pairs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.chat.template import ChatTemplate
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.dropped import lost_texts
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.data.supervised import load_supervised
from openrlhf.launcher.supervised.task import make_task
from openrlhf.launcher.supervised_config import PreferenceDataConfig, SftDataConfig, TrainRMConfig, TrainSFTConfig
from support.chat_families import FAMILIES
from support.chat_sweep import family_tokenizer
from support.launcher_tokenizer import CHATML, byte_tokenizer
from support.token_caches import token_cache

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "First I look at it."}
INLINE = {"role": "assistant", "content": "<think>First I look at it.</think>a"}
QWQ = family_tokenizer(FAMILIES["qwq"].template(), eos=FAMILIES["qwq"].eos)
"""Its template takes reasoning out of every content and does not know `reasoning_content`."""


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(path: str, policy: str) -> int:
    data = DataConfig(prompt_dataset=path, input_key="chat", apply_chat_template=True, dropped_text=policy)  # pyright: ignore[reportArgumentType]
    return load_prompts(data, QWQ).counts.lossy


def sft(path: str, policy: str, **options: Any) -> None:
    data = SftDataConfig(input_key="chat", apply_chat_template=True, **options)
    load_supervised(
        path,
        make_task(TrainSFTConfig(data=data), QWQ).reader,
        token_cache(path),
        max_samples=99,
        seed=1,
        dropped_text=policy,
    )


def pairs(path: str, policy: str) -> None:
    task = make_task(TrainRMConfig(data=PreferenceDataConfig(apply_chat_template=True)), QWQ)
    load_supervised(path, task.reader, token_cache(path), max_samples=99, seed=1, dropped_text=policy)


@pytest.mark.parametrize(("turn", "key"), [(THOUGHT, "reasoning_content"), (INLINE, "content")])
def test_t05_one_warning_with_the_share_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, turn: dict[str, Any], key: str
) -> None:
    path = write(
        tmp_path / "a.jsonl", {"chat": [Q]}, {"chat": [Q, turn, Q]}, {"chat": [Q, turn, Q]}, {"chat": [Q, A, Q]}
    )
    with caplog.at_level(logging.WARNING):
        assert prompts(path, "warn") == 2
    (said,) = caplog.messages
    assert said.startswith(
        "--data.prompt_dataset: the chat template drops a text of 2 of 4 rows (50.0%), first in "
        f"{path}, line 2, message 1 (assistant), {key}: "
    )
    assert said.endswith("or make it an error with --data.dropped_text error")
    with pytest.raises(
        ValueError, match=rf"a\.jsonl, line 2, field 'chat': the chat template drops message 1 \(assi.*, {key}: "
    ):
        prompts(path, "error")


@pytest.mark.parametrize("turn", [THOUGHT, INLINE])
@pytest.mark.parametrize("multiturn", [True, False])
def test_t05_turns_that_are_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, turn: dict[str, Any], multiturn: bool
) -> None:
    path = write(tmp_path / "a.jsonl", {"chat": [Q, A]}, {"chat": [Q, turn, Q, A]}, {"chat": [Q, A, Q, turn]})
    with caplog.at_level(logging.WARNING):
        sft(path, "warn", multiturn=multiturn)
    (said,) = caplog.messages
    assert said.startswith("--data.dataset: the chat template drops a text of 2 of 3 rows (66.7%), first in ")
    assert "--data.tokenizer_chat_template" in said
    with pytest.raises(ValueError, match=r"line 2: the chat template drops message 1 .*or --data\.dropped_text warn$"):
        sft(path, "error", multiturn=multiturn)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_t05_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture, side: str) -> None:
    row = {"chosen": [Q, {**A, "content": "good"}], "rejected": [Q, {**A, "content": "bad"}]}
    row[side] = [Q, {**INLINE, "content": INLINE["content"] + side}]
    path = write(tmp_path / "a.jsonl", row)
    with caplog.at_level(logging.WARNING):
        pairs(path, "warn")
    assert "drops a text of 1 of 1 rows (100.0%)" in caplog.messages[0]
    with pytest.raises(ValueError, match=r"line 1: the chat template drops message 1 \(assistant\), content: "):
        pairs(path, "error")


def test_t05_nothing_is_said_of_a_template_that_keeps_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = family_tokenizer(FAMILIES["qwen3"].template(), eos="<|im_end|>")
    data = SftDataConfig(input_key="chat", apply_chat_template=True, multiturn=True)
    path = write(tmp_path / "a.jsonl", {"chat": [Q, THOUGHT, Q, THOUGHT]})
    reader = make_task(TrainSFTConfig(data=data), tokenizer).reader
    load_supervised(path, reader, token_cache(path), max_samples=9, seed=1, dropped_text="error")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("a  b\n\nc ", "x a b c y"),
        ('say "ß"\n', '{"content": "say \\"ß\\"\\n"}'),
        ('say "ß"', '{"content": "say \\"\\u00df\\""}'),
        ("<think>one</think>two", "<think>\none\n</think>\n\ntwo"),
        ("see <image>this", "see <|vision|>this"),
    ],
)
def test_what_a_template_may_do_with_a_text(content: str, written: str) -> None:
    assert lost_texts([{"role": "user", "content": content}], None, [written], {}, template()) == []


@pytest.mark.parametrize(("content", "written"), [("one two", "one, two"), ("a</think>b", "b"), ("A", "a")])
def test_what_it_may_not(content: str, written: str) -> None:
    (lost,) = lost_texts([{"role": "user", "content": content}], None, [written], {}, template())
    assert (lost.where, lost.text) == ("message 0 (user), content", content)


def test_offered_tools_that_a_template_does_not_mention() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}, {"name": "find"}]
    lost = lost_texts([{"role": "user", "content": "find it"}], tools, ["find it"], {}, template())
    assert [str(entry) for entry in lost] == ["tools: 'look_up'"]


def template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(chat_template=CHATML))
