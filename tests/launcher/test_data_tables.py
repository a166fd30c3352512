"""One reading for all containers: the same rows give the same values; what cannot be read is named with its place."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value

from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.locate import open_file
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.data.rows import Rows
from openrlhf.launcher.data.text_files import open_utf8
from support.launcher_tokenizer import byte_tokenizer

ROWS = [
    {"prompt": "one\u2028two", "label": "2024-01-31", "number": 2, "nested": {"a": [1, None], "b": None}},
    {"prompt": "ü", "label": "2024-02-01T10:00:00", "number": 2.5, "nested": {"b": {"c": "x"}}},
    {"prompt": "three", "label": "007", "number": 3, "nested": {}},
]
PACKED: dict[str, Any] = {"": lambda data: data, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zipped(data: bytes, path: Path, name: str = "a.jsonl") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)


def rows_of(path: Path, data: bytes) -> Rows:
    path.write_bytes(data)
    return open_file(path)


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_r05_r03_compressed_rows_are_the_rows(tmp_path: Path, kind: str, suffix: str) -> None:
    data = b"\xef\xbb\xbf" + (lines(*ROWS) if kind == "jsonl" else json.dumps(ROWS).encode())
    rows = rows_of(tmp_path / f"a.{kind}{suffix}", PACKED[suffix](data))
    assert list(rows) == [rows[i] for i in range(3)] == ROWS
    assert [rows.spelled(i, "number") for i in range(3)] == ["2", "2.5", "3"]
    assert [rows.spelled(i, "label") for i in range(3)] == [row["label"] for row in ROWS]
    assert rows.where(1).startswith(f"{tmp_path}/a.{kind}{suffix}, ")


def test_r05_zipped_rows(tmp_path: Path) -> None:
    zipped(lines(*ROWS), tmp_path / "a.jsonl.zip")
    assert list(open_file(tmp_path / "a.jsonl.zip")) == ROWS
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "a") as archive:
        archive.writestr("b.jsonl", "")
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.zip: cannot be unpacked as \.zip \(expected one file inside, got 2"
    ):
        open_file(tmp_path / "a.jsonl.zip")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
def test_r05_what_is_not_compressed_is_named(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix}: cannot be unpacked as \{suffix} \("):
        rows_of(tmp_path / f"a.jsonl{suffix}", lines(*ROWS))


def test_r03_marks_inside_a_file_that_was_put_together(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    rows = rows_of(tmp_path / "a.jsonl", mark + lines(ROWS[0]) + mark + lines(ROWS[1]))
    assert list(rows) == ROWS[:2]


def test_e01_utf16_files_are_read(tmp_path: Path) -> None:
    for number, codec in enumerate(("utf-16", "utf-16-le", "utf-16-be")):
        mark = "" if codec == "utf-16" else "\ufeff"
        text = lines(*ROWS).decode()
        assert list(rows_of(tmp_path / f"{number}.jsonl", (mark + text).encode(codec))) == ROWS
        table = rows_of(tmp_path / f"{number}.csv", f"{mark}prompt,label\nü,7\n".encode(codec))
        assert list(table) == [{"prompt": "ü", "label": "7"}]


TYPED = {
    "when": datetime.datetime(2024, 1, 31, 9, 30),
    "day": datetime.date(2024, 1, 31),
    "price": Decimal("1.50"),
    "raw": b"text",
    "odd": float("nan"),
    "big": float("-inf"),
    "list": [Decimal("2.00"), None],
}
AS_JSON = {
    "when": "2024-01-31T09:30:00",
    "day": "2024-01-31",
    "price": "1.50",
    "raw": "text",
    "odd": "NaN",
    "big": "-Infinity",
    "list": ["2.00", None],
}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_r05_what_json_does_not_have_is_text(tmp_path: Path, kind: str) -> None:
    table = Dataset.from_list([TYPED])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        table.to_parquet(str(path))
    else:
        table.save_to_disk(str(path))
        path = path if kind == "saved" else next(path.glob("*.arrow"))
    data = DataConfig(prompt_dataset=str(path), input_key="day", label_key="list")
    assert [i.label for i in load_prompts(data, byte_tokenizer()).items()] == [["2.00", None]]
    for key, value in AS_JSON.items():
        data = DataConfig(prompt_dataset=str(path), input_key="day", label_key=key)
        assert load_prompts(data, byte_tokenizer()).items()[0].label == value
    assert load_prompts(data, byte_tokenizer()).items()[0].prompt == "2024-01-31"


def test_r05_not_a_number_is_the_same_text_in_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"p": "q", "odd": NaN, "big": -Infinity}\n')
    for key in ("odd", "big"):
        data = DataConfig(prompt_dataset=str(path), input_key="p", label_key=key)
        assert load_prompts(data, byte_tokenizer()).items()[0].label == AS_JSON[key]


def test_r05_bytes_that_are_no_text_are_refused_where_a_text_belongs(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"p": "q", "l": {"v": b"x"}, "b": b"x"}, {"p": "q", "l": {"v": b"\xff\xd8"}, "b": b"\xff\xd8"}]
    Dataset.from_list(rows).to_parquet(str(path))
    for key in ("l", "b"):
        with pytest.raises(
            ValueError, match=rf"a\.parquet, row 1, field '{key}': expected a text, .* bytes that are no"
        ):
            load_prompts(DataConfig(prompt_dataset=str(path), input_key="p", label_key=key), byte_tokenizer())
    with pytest.raises(ValueError, match=r"a\.parquet, row 1, field 'b': expected a string, got bytes"):
        load_prompts(DataConfig(prompt_dataset=str(path), input_key="b"), byte_tokenizer())


def test_r05_a_saved_format_changes_nothing(tmp_path: Path) -> None:
    table = Dataset.from_list([{"p": "q", "n": 2}]).with_format("numpy")
    table.save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(prompt_dataset=str(tmp_path / "saved"), input_key="p", label_key="n")
    assert load_prompts(data, byte_tokenizer()).items()[0].label == "2"


def test_r05_whole_numbers_stay_whole(tmp_path: Path) -> None:
    for path in (tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"):
        data = lines({"p": "q", "n": 2}, {"p": "q", "n": 2.5})
        rows = rows_of(path, gzip.compress(data) if path.suffix == ".gz" else data)
        assert [rows.spelled(i, "n") for i in (0, 1)] == ["2", "2.5"]
    features = Features({"p": Value("string"), "n": Value("int64")})
    Dataset.from_list([{"p": "q", "n": 2}, {"p": "q", "n": None}], features=features).to_parquet(
        str(tmp_path / "a.parquet")
    )
    assert [open_file(tmp_path / "a.parquet").spelled(i, "n") for i in (0, 1)] == ["2", None]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_e01_a_broken_table_is_named_with_the_reason(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"a.{kind}").write_bytes(b"no table at all")
    with pytest.raises(ValueError, match=rf"a\.{kind}: cannot be read as {kind} \(\w+: "):
        open_file(tmp_path / f"a.{kind}")


def csv(path: Path, text: str, encoding: str = "utf-8") -> Rows:
    path.write_bytes(text.encode(encoding))
    return open_file(path)


def test_e01_an_index_column_without_a_name(tmp_path: Path) -> None:
    rows = csv(tmp_path / "a.csv", ",prompt,label\n0,one,1\n1,two,\n")
    assert rows.columns == ["Unnamed: 0", "prompt", "label"]
    assert [dict(r) for r in rows] == [
        {"Unnamed: 0": "0", "prompt": "one", "label": "1"},
        {"Unnamed: 0": "1", "prompt": "two", "label": ""},
    ]
    assert [rows.spelled(i, "label") for i in (0, 1)] == ["1", None]


def test_e01_quotes_line_ends_and_blank_lines(tmp_path: Path) -> None:
    rows = csv(tmp_path / "a.csv", 'p,l\r\n"a, ""b""\r\nc\u2028d",1\r\n\r\n5" pipe,2\r\nshort\r\n')
    assert [r["p"] for r in rows] == ['a, "b"\r\nc\u2028d', '5" pipe', "short"]
    assert [rows.where(i).rpartition(", ")[2] for i in range(3)] == ["line 2", "line 5", "line 6"]
    assert rows.spelled(2, "l") is None
    long = "x" * 300_000
    assert csv(tmp_path / "b.csv", f"p\n{long}\n")[0] == {"p": long}
    assert gzipped_csv(tmp_path / "c.csv.gz")[0] == {"p": "007"}


def gzipped_csv(path: Path) -> Rows:
    path.write_bytes(gzip.compress(b"p\n007\n"))
    return open_file(path)


@pytest.mark.parametrize(
    ("text", "encoding", "reason"),
    [
        ('p,l\na,1\n"b,2\nc,3\n', "utf-8", r"line 3: a quote is opened and never closed"),
        ('p,l\n"a" b,1\n', "utf-8", r"line 2: ',' expected after '\"'"),
        ("p,l\na,1\nü,2\n", "latin-1", r"line 3: not UTF-8 text \(.*0xfc.*iconv -f WINDOWS-1252 -t UTF-8"),
        ("p,l\na,1,2\n", "utf-8", r"line 2: 3 cells, but there are 2 columns"),
        ("p,p\na,1\n", "utf-8", r"column 'p' stands twice in the first line"),
    ],
)
def test_e01_what_is_no_csv_is_named_with_line_and_reason(
    tmp_path: Path, text: str, encoding: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"a\.csv(, |: ){reason}"):
        csv(tmp_path / "a.csv", text, encoding)


def test_e01_other_encodings_in_json(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.jsonl", '{"p": "a"}\n{"p": "ü"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not UTF-8 text \(.*iconv"):
        list(rows)
    with pytest.raises(ValueError, match=r"b\.json: not UTF-8 text \(.*iconv"):
        rows_of(tmp_path / "b.json", '[{"p": "ü"}]'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"c\.json: begins as UTF-16, but is none"):
        rows_of(tmp_path / "c.json", b"\xff\xfe[\x00\x00\xd8")


def test_a_file_that_is_read_as_it_is_has_no_copy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*ROWS))
    with open_utf8(tmp_path / "a.jsonl") as file:
        assert file.name == str(tmp_path / "a.jsonl")
