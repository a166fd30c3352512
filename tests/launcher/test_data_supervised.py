"""Supervised rows of the shapes that people have: what is trained on, what is dropped, what is refused and how."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from openrlhf.launcher.data.readers import NO_ANSWER, SAME_ANSWERS
from openrlhf.launcher.data.supervised import SupervisedDataset, collate, load_supervised
from openrlhf.launcher.supervised.task import make_task
from openrlhf.launcher.supervised_config import (
    PreferenceDataConfig,
    RmModelConfig,
    SftDataConfig,
    SftModelConfig,
    TrainRMConfig,
    TrainSFTConfig,
)
from support.launcher_tokenizer import CHATML, WITH_TOOLS, byte_tokenizer
from support.token_caches import token_cache

E = "<|im_end|>"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: Sequence[Any]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def load(
    config: TrainSFTConfig | TrainRMConfig, path: str, template: str = CHATML, **options: Any
) -> SupervisedDataset:
    task = make_task(config, byte_tokenizer(chat_template=template))
    return load_supervised(path, task.reader, token_cache(path), **{"max_samples": 1000, "seed": 1, **options})


def sft(path: str, *, template: str = CHATML, model: SftModelConfig | None = None, **data: Any) -> SupervisedDataset:
    fields = {"apply_chat_template": True, **data}
    return load(TrainSFTConfig(data=SftDataConfig(**fields), model=model or SftModelConfig()), path, template)


def pairs(path: str, *, margins: bool = False, **data: Any) -> SupervisedDataset:
    fields = {"apply_chat_template": True, **data}
    model = RmModelConfig(margin_loss_enable=margins)
    return load(TrainRMConfig(data=PreferenceDataConfig(**fields), model=model), path)


def shown(dataset: SupervisedDataset) -> list[list[str]]:
    """Every unit's texts, with brackets around what is trained on."""
    decode = byte_tokenizer().decode

    def text(row: Any) -> str:
        start = row.mask.index(True)
        end = len(row.mask) - row.mask[::-1].index(True)
        return f"{decode(row.tokens[:start])}[[{decode(row.tokens[start:end])}]]{decode(row.tokens[end:])}"

    return [[text(row) for row in dataset.unit(i).rows] for i in range(len(dataset))]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def wrapped(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}{E}\n<|im_start|>assistant\n[[{answer}{E}]]"


# -- pairs


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f07_message_lists_with_margins(tmp_path: Path, kind: str) -> None:
    question = turn("user", "q")
    rows = [
        {"chosen": [question, turn("assistant", "good")], "rejected": [question, turn("assistant", "")], "margin": m}
        for m in (0.5, None, 2.0)
    ]
    found = pairs(write(tmp_path / f"a.{kind}", rows), margins=True)
    assert shown(found)[0] == [wrapped("q", "good"), wrapped("q", "")]
    assert [found.unit(i).margin for i in range(3)] == [0.5, 0.0, 2.0]


def test_f07_odd_rows(tmp_path: Path) -> None:
    question, good, bad = turn("user", "q"), turn("assistant", "g"), turn("assistant", "b")
    path = write(tmp_path / "a.jsonl", [{"chosen": [question, good], "rejected": [question, good]}] * 2)
    with pytest.raises(ValueError, match=f"no row is left to train on .{SAME_ANSWERS}"):
        pairs(path)
    for rejected, message in (
        ([turn("user", "r"), bad], "expected chosen and rejected to share every message but the last, .* message 0"),
        ([question, good, question, bad], "share every message but the last, they differ in message 1"),
        ([question, turn("user", "b")], "expected the last message to be the assistant's answer, the last role is"),
        (7, "expected a string or a list of messages, got int: 7"),
        (None, "expected a text or messages in field 'rejected', got null"),
        ("text", "expected a list of messages, got a text: 'text'; add --data.prompt_key"),
    ):
        path = write(tmp_path / "b.jsonl", [{"chosen": [question, good], "rejected": rejected}])
        with pytest.raises(ValueError, match=f"b.jsonl, line 1: .*{message}"):
            pairs(path)
    path = write(tmp_path / "c.jsonl", [{"chosen": [question, good], "rejected": [question, bad], "margin": "big"}])
    with pytest.raises(ValueError, match="line 1: expected a number in field 'margin', got 'big'"):
        pairs(path, margins=True)
    with pytest.raises(ValueError, match=r"needs the field 'margin': .* no such field; it has chosen, rejected"):
        pairs(write(tmp_path / "d.jsonl", [{"chosen": [question, good], "rejected": [question, bad]}]), margins=True)


def test_f08_split_prompt(tmp_path: Path) -> None:
    human = "\n\nHuman: hi\n\nHuman: there\n\nAssistant:"
    row = {"prompt": human, "response": " hello", "chosen": " hello", "rejected": ""}
    found = pairs(write(tmp_path / "a.jsonl", [row]), apply_chat_template=False, prompt_key="prompt")
    assert shown(found) == [[f"{human}[[ hello{E}]]", f"{human}[[{E}]]"]]


def test_f08b_whole_transcripts_train_on_what_differs(tmp_path: Path) -> None:
    start = "\n\nHuman: hi\n\nAssistant: "
    row = {"chosen": f"{start}hello", "rejected": f"{start}no"}
    found = pairs(write(tmp_path / "a.jsonl", [row]), apply_chat_template=False)
    assert shown(found) == [[f"{start}[[hello{E}]]", f"{start}[[no{E}]]"]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_f09_prompt_as_text_beside_whole_conversations(tmp_path: Path, kind: str) -> None:
    question = turn("user", "q")
    row = {
        "prompt": "q",
        "prompt_id": "1",
        "chosen": [question, turn("assistant", "good")],
        "rejected": [question, turn("assistant", "")],
        "messages": [question, turn("assistant", "good")],
        "score_chosen": 5.0,
        "score_rejected": 5.0,
    }
    path = write(tmp_path / f"a.{kind}", [row])
    want = [[wrapped("q", "good"), wrapped("q", "")]]
    assert shown(pairs(path)) == want
    assert shown(pairs(path, prompt_key="prompt")) == want
    answers = {"prompt": "q", "chosen": "good", "rejected": [turn("assistant", "")]}
    assert (
        shown(pairs(write(tmp_path / f"b.{kind}", [answers]), prompt_key="prompt")) == want if kind == "jsonl" else True
    )


def test_b031_pairs_that_the_cut_makes_equal_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "ppp", "chosen": "123456", "rejected": r} for r in ("12345x", "1234x6", "12x456", "x")]
    rows.append({"prompt": "p" * 9, "chosen": "a", "rejected": "b"})
    with caplog.at_level(logging.WARNING):
        found = pairs(write(tmp_path / "a.jsonl", rows), apply_chat_template=False, prompt_key="prompt", max_len=8)
    assert [u[1] for u in shown(found)] == ["ppp[[1234x]]", "ppp[[12x45]]", f"ppp[[x{E}]]"]
    assert found.dropped == {SAME_ANSWERS: 2}
    assert f"--data.dataset: 2 rows dropped: {SAME_ANSWERS}" in caplog.text


# -- instructions


def test_f10_question_and_response_with_the_default_template(tmp_path: Path) -> None:
    row = {"id": "1", "system_prompt": "", "question": "Why?", "response": "Because."}
    path = write(tmp_path / "a.jsonl", [row])
    found = sft(path, apply_chat_template=False, input_key="question", output_key="response")
    assert shown(found) == [[f"User: Why?\nAssistant: [[Because.{E}]]"]]
    chat = sft(path, input_key="question", output_key="response")
    assert shown(chat) == [[wrapped("Why?", "Because.")]]


def test_f11_tool_calls_are_trained_on_as_the_template_writes_them(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Paris"}'}}
    messages = [turn("user", "q"), turn("assistant", None) | {"tool_calls": [call]}]
    path = write(tmp_path / "a.jsonl", [{"input": messages}])
    (text,) = shown(sft(path, template=WITH_TOOLS))[0]
    assert text.startswith('{"role": "user", "content": "q"}[[{"role": "assistant"')
    assert '"arguments": {"city": "Paris"}' in text


def test_conversations_one_turn_or_all(tmp_path: Path) -> None:
    messages = [turn("user", "q"), turn("assistant", "a"), turn("user", "r"), turn("assistant", "b")]
    path = write(tmp_path / "a.jsonl", [{"input": messages}])
    whole = sft(path, multiturn=True).unit(0).rows[0]
    last = sft(path).unit(0).rows[0]
    assert whole.tokens == last.tokens
    assert (sum(whole.mask), sum(last.mask)) == (4, 2)
    split = write(tmp_path / "b.jsonl", [{"input": messages[:3], "output": "b"}])
    assert sft(split, output_key="output").unit(0) == sft(path).unit(0)


def test_b032_a_long_last_prompt_leaves_the_early_turns(tmp_path: Path) -> None:
    messages = [turn("user", "q"), turn("assistant", "a"), turn("user", "r" * 99), turn("assistant", "b")]
    path = write(tmp_path / "a.jsonl", [{"input": messages}])
    found = sft(path, multiturn=True, max_len=40)
    (row,) = found.unit(0).rows
    start = row.mask.index(True)
    assert [i for i, m in enumerate(row.mask) if m] == [start, start + 1]
    assert byte_tokenizer().decode(row.tokens[start : start + 2]) == f"a{E}"
    assert len(row.tokens) == 40
    with pytest.raises(ValueError, match=rf"no row is left to train on \({NO_ANSWER}\); raise --data\.max_len"):
        sft(path, max_len=40)


def test_pretraining_trains_on_the_text_as_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"input": "abc"}])
    found = sft(path, apply_chat_template=False, model=SftModelConfig(pretrain_mode_enable=True))
    assert shown(found) == [[f"a[[bc{E}]]"]]


def test_refusals_name_place_field_and_fix(tmp_path: Path) -> None:
    good, key = {"input": "q", "o": "a"}, {"output_key": "o"}
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([{"question": "q"}], {}, r"--data\.input_key 'input': .* has no such field; it has question"),
        ([{"input": "q", "a": "b"}], {"output_key": "answer"}, r"--data\.output_key 'answer': .* it has input, a"),
        ([good, {"input": 3, "o": "a"}], key, "line 2: expected a string, got int"),
        (
            [{"input": "q", "o": "a"}, {"input": "q"}],
            {"output_key": "o"},
            "line 2: expected a field 'o', the row has input",
        ),
        (
            [{"input": [turn("user", "q")], "o": "a"}],
            {"output_key": "o"},
            "line 1: expected a string, got a list of mess",
        ),
        ([], {}, "has no rows"),
    ]
    for rows, options, message in cases:
        with pytest.raises(ValueError, match=message):
            sft(write(tmp_path / "a.jsonl", rows), apply_chat_template=False, **options)


def test_sources_are_mixed_and_capped(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"input": f"a{i}", "output": "x"} for i in range(9)])
    b = write(tmp_path / "b.jsonl", [{"input": f"b{i}", "output": "x"} for i in range(3)])
    config = TrainSFTConfig(data=SftDataConfig(output_key="output", input_template="{}"))
    assert [t[0][:2] for t in shown(load(config, f"{a},{b}", max_samples=10))] == [
        *(f"a{i}" for i in range(9)),
        "b0",
    ]
    mixed = [t[0][:2] for t in shown(load(config, f"{a},{b}", probs="0.5,0.5"))]
    assert {t for t in mixed if t[0] == "a"} == {f"a{i}" for i in range(9)}
    with pytest.raises(ValueError, match="2 datasets and 1 probabilities"):
        load(config, f"{a},{b}", probs="1")


def test_collate_pads_on_the_right_and_keeps_pairs_together(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "abc", "rejected": "d", "margin": 0.5}]
    found = pairs(write(tmp_path / "a.jsonl", rows), apply_chat_template=False, prompt_key="prompt", margins=True)
    batch = collate([(7, found.unit(0))], margins=True)
    assert batch.index.tolist() == [7, 7]
    assert batch.attention_mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert batch.action_mask.tolist() == [[False] + [True] * 4, [False, True, True, False, False]]
    assert batch.margins is not None
    assert batch.margins.tolist() == [0.5, 0.5]
    assert found.lengths.tolist() == [8]
    empty = collate([], margins=True)
    assert (empty.size, empty.tokens.shape) == (0, torch.Size([0, 0]))
