"""Counting tokens in this process and in others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.data.token_counts import TokenCounter
from support.launcher_tokenizer import PlacedTokenizer, byte_tokenizer


@pytest.mark.parametrize(("workers", "length"), [(0, 1), (1, 2)])
def test_texts_are_counted_where_they_should(workers: int, length: int) -> None:
    with TokenCounter(PlacedTokenizer(), workers=workers) as counter:
        assert counter.count(["a", "b"]) == [length, length]


def test_workers_count_as_this_process_does(tmp_path: Path) -> None:
    rows = [{"prompt": "\u00e4" * (i % 40 + 1)} for i in range(900)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [
        load_prompts(
            DataConfig(
                prompt_dataset=str(path),
                input_key="prompt",
                max_len=41,
                overlong_prompts="drop",
                dataloader_num_workers=workers,
            ),
            byte_tokenizer(),
        ).items()
        for workers in (0, 2)
    ]
    assert kept[0] == kept[1]
    assert {len(item.prompt.encode()) for item in kept[0]} == set(range(2, 41, 2))
