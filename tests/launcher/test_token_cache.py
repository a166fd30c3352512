from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.launcher.data.examples import TokenRow
from openrlhf.launcher.data.readers import SftReader, Unit, UnitReader
from openrlhf.launcher.data.supervised import SupervisedDataset, load_supervised
from openrlhf.launcher.data.token_cache import About, TokenCache, key_of
from openrlhf.launcher.supervised.task import make_task
from openrlhf.launcher.supervised_config import SftDataConfig, SftModelConfig, TrainSFTConfig
from support.launcher_tokenizer import CHATML, byte_tokenizer
from support.token_caches import token_cache, tokenise_and_note

ROWS = [{"input": f"question {i} " * (1 + 9 * (i == 3)), "output": "answer " * (i % 5 + 1), "o": i} for i in range(30)]
ROW = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9)
UNIT = st.tuples(st.lists(ROW, min_size=1, max_size=2), st.floats(allow_nan=False))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", ROWS)


def reader_of(*, tokenizer: Any = None, pretrain: bool = False, **data: Any) -> UnitReader:
    fields = SftDataConfig(**{"output_key": "output", **data})
    config = TrainSFTConfig(data=fields, model=SftModelConfig(pretrain_mode_enable=pretrain))
    return make_task(config, tokenizer or byte_tokenizer()).reader


def load(data: str, reader: UnitReader, **options: Any) -> SupervisedDataset:
    return load_supervised(data, reader, token_cache(data), **{"max_samples": 100, "seed": 1, **options})


def units(dataset: SupervisedDataset) -> list[Unit]:
    return [dataset.unit(i) for i in range(len(dataset))]


def entries(data: str) -> list[Path]:
    return sorted(path.parent for path in token_cache(data).folder.glob("*/about.json"))


def test_a_second_run_reads_no_row_and_sees_the_same(
    data: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its warnings too, and with another file of the same contents."""
    caplog.set_level(logging.WARNING)
    first = load(data, reader_of(max_len=60))
    said = [r.getMessage() for r in caplog.records]
    assert any("rows dropped" in line for line in said)
    caplog.clear()
    monkeypatch.setattr(SftReader, "read", lambda *_: pytest.fail("a row was tokenised again"))
    moved = write(Path(data).with_name("moved.jsonl"), ROWS)
    again = load(moved, reader_of(max_len=60))
    assert units(again) == units(first)
    assert again.lengths.tolist() == [unit.length for unit in units(first)]
    assert again.dropped == first.dropped
    assert [r.getMessage() for r in caplog.records] == said


def test_what_changes_the_tokens_makes_another_entry(data: str) -> None:
    chat: Any = byte_tokenizer(chat_template=CHATML)
    dated: Any = byte_tokenizer(chat_template=CHATML + "{{ strftime_now('') if false }}")
    readers = [
        reader_of(),
        reader_of(max_len=30),
        reader_of(input_template="Q: {}"),
        reader_of(output_key="input"),
        reader_of(pretrain=True),
        reader_of(tokenizer=chat),
        reader_of(tokenizer=chat, apply_chat_template=True),
        reader_of(tokenizer=chat, apply_chat_template=True, multiturn=True),
        reader_of(tokenizer=dated, apply_chat_template=True),
    ]
    for reader in readers:
        load(data, reader)
        load(data, reader)
    assert len(entries(data)) == len(readers)
    load(data, readers[0], max_samples=7)
    load(write(Path(data).with_name("fewer.jsonl"), ROWS[:-1]), readers[0])
    assert len(entries(data)) == len(readers) + 2


def test_mixed_sources_and_a_cut_are_those_of_the_rows(data: str) -> None:
    other = write(Path(data).with_name("other.jsonl"), [{"input": "x", "output": str(i)} for i in range(4)])
    whole = units(load(data, reader_of())) + units(load(other, reader_of()))
    mixed = load(f"{data},{other}", reader_of())
    assert units(mixed) == whole
    assert mixed.lengths.tolist() == [unit.length for unit in whole]
    assert units(mixed.first(3)) == whole[:3]
    assert units(load(f"{data},{other}", reader_of(), max_samples=5)) == whole[:5]
    assert units(load(data, reader_of()).first(2)) == whole[:2]


def test_processes_that_start_together_tokenise_once(data: str) -> None:
    note = Path(data).with_name("note")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=tokenise_and_note, args=(data, str(note))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    readers, lengths = zip(*(line.split() for line in note.read_text().splitlines()), strict=True)
    assert sorted(readers) == ["0", "0", "0", str(len(ROWS))]
    assert len(set(lengths)) == 1


def test_what_a_killed_process_left_is_no_entry(data: str) -> None:
    cache, reader = token_cache(data), reader_of()
    new = cache.folder / f".new-{key_of('', reader, limit=1)}"
    new.mkdir(parents=True)
    (new / "tokens.arrow").write_bytes(b"half")
    table = cache.table(new.name.removeprefix(".new-"), lambda add: About({"none": 3}))
    assert (len(table), table.about.dropped) == (0, {"none": 3})
    assert not new.exists()


def test_a_row_that_is_refused_leaves_nothing_and_is_named_again(data: str) -> None:
    bad = write(Path(data).with_name("bad.jsonl"), [*ROWS, {"input": None, "output": "a"}])
    for _ in range(2):
        with pytest.raises(ValueError, match="line 31"):
            load(bad, reader_of())
    assert list(token_cache(bad).folder.glob("*/")) == []


@pytest.mark.parametrize("used", [True, False])
def test_what_was_used_longest_ago_goes_first_unless_it_is_in_use(data: str, used: bool) -> None:
    old = load(data, reader_of())
    (oldest,) = entries(data)
    os.utime(oldest, (1, 1))
    if not used:
        del old
    load_supervised(data, reader_of(max_len=30), token_cache(data, most_bytes=1), max_samples=9, seed=1)
    assert (oldest in entries(data)) is used
    assert len(entries(data)) == 1 + used


def test_a_folder_that_cannot_be_written_is_named(data: str) -> None:
    cache = TokenCache(Path(data) / "tokens", most_bytes=1)
    with pytest.raises(ValueError, match=r"--data.cache_dir .*tokens'.*give another folder"):
        load_supervised(data, reader_of(), cache, max_samples=9, seed=1)


@given(st.lists(UNIT, max_size=5))
def test_units_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    made = [
        Unit(rows=tuple(TokenRow(tokens=[t for t, _ in row], mask=[m for _, m in row]) for row in rows), margin=margin)
        for rows, margin in drawn
    ]

    def write(add: Any) -> About:
        for unit in made:
            add(unit)
        return About({})

    table = TokenCache(tmp_path_factory.mktemp("tokens"), most_bytes=1 << 30).table("key", write)
    assert [table.unit(i) for i in range(len(table))] == made
    assert table.lengths.tolist() == [unit.length for unit in made]
