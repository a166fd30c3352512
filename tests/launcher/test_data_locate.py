from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value

from openrlhf.launcher.data.locate import open_dataset, split_entries
from openrlhf.launcher.data.rows import Rows, spell

FLAG = "--data.prompt_dataset"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(n: int, tag: str = "r") -> list[dict[str, Any]]:
    return [{"prompt": f"{tag}{i}", "label": i} for i in range(n)]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1))
    elif suffix == ".csv":
        path.write_text("prompt,label\n" + "".join(f'"{r["prompt"]}",{r["label"]}\n' for r in rows))
    elif suffix == ".parquet":
        Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        table = Dataset.from_list(list(rows))
        table.save_to_disk(str(path.with_suffix("")))
        next(path.with_suffix("").glob("*.arrow")).rename(path)
    return path


def prompts(rows: Rows) -> list[str]:
    by_number = [rows[i]["prompt"] for i in range(len(rows))]
    assert by_number == [r["prompt"] for r in rows]
    return by_number


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.json", "a.csv", "a.parquet", "a.arrow", "a b/data.v1.jsonl"])
def test_f18_files_by_extension(tmp_path: Path, name: str) -> None:
    rows = open_dataset(str(write(tmp_path / name, rows_of(3))), split="train", flag=FLAG)
    assert prompts(rows) == ["r0", "r1", "r2"]
    assert list(rows.columns) == ["prompt", "label"]
    assert [rows.spelled(i, "label") for i in range(3)] == ["0", "1", "2"]
    assert name in rows.where(1)


def test_json_lines_in_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\ufeff{"prompt": "a"}\n\n{"prompt": "b"}', encoding="utf-8")
    rows = open_dataset(str(path), split="train", flag=FLAG)
    assert prompts(rows) == ["a", "b"]
    assert rows.where(1).endswith("line 3")


def test_csv_cells_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,label\n"two\nlines, ""quoted""",007\nNA,\nx,1.50\n')
    rows = open_dataset(str(path), split="train", flag=FLAG)
    assert prompts(rows) == ['two\nlines, "quoted"', "NA", "x"]
    assert [rows.spelled(i, "label") for i in range(3)] == ["007", None, "1.50"]


def test_labels_of_a_json_array_keep_their_spelling(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"label": 1.0}, {"label": 1e2}, {"label": false}, {"label": {"v": 1.0}}]')
    rows = open_dataset(str(path), split="train", flag=FLAG)
    assert [rows.spelled(i, "label") for i in range(4)] == ["1.0", "1e2", "false", {"v": 1.0}]


def test_spell() -> None:
    assert [spell(v) for v in (True, 42, 42.0, "x", None, [1])] == ["true", "42", "42.0", "x", None, [1]]


def test_b041_a_folder_keeps_its_splits_apart(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.jsonl", rows_of(3, "train"))
    write(tmp_path / "d" / "test.jsonl", rows_of(2, "test"))
    folder = str(tmp_path / "d")
    assert prompts(open_dataset(folder, split="train", flag=FLAG)) == ["train0", "train1", "train2"]
    assert prompts(open_dataset(folder, split="test", flag=FLAG)) == ["test0", "test1"]
    with pytest.raises(ValueError, match=r"has no split 'validation'; it has test, train"):
        open_dataset(folder, split="validation", flag=FLAG)


def test_b041_other_layouts(tmp_path: Path) -> None:
    write(tmp_path / "one" / "data.jsonl", rows_of(2))
    assert len(open_dataset(str(tmp_path / "one"), split="train", flag=FLAG)) == 2
    for i in range(2):
        write(tmp_path / "shards" / "data" / f"train-0000{i}-of-00002.parquet", rows_of(2, f"s{i}-"))
    shards = open_dataset(str(tmp_path / "shards"), split="train", flag=FLAG)
    assert prompts(shards) == ["s0-0", "s0-1", "s1-0", "s1-1"]
    assert "train-00001-of-00002.parquet, row 0" in shards.where(2)
    assert shards.spelled(3, "label") == "1"
    Dataset.from_list(rows_of(2)).save_to_disk(str(tmp_path / "saved"))
    assert len(open_dataset(str(tmp_path / "saved"), split="train", flag=FLAG)) == 2
    splits = DatasetDict({"train": Dataset.from_list(rows_of(2)), "test": Dataset.from_list(rows_of(1))})
    splits.save_to_disk(str(tmp_path / "dict"))
    assert len(open_dataset(str(tmp_path / "dict"), split="test", flag=FLAG)) == 1
    with pytest.raises(ValueError, match=r"has no split 'dev'; it has train, test"):
        open_dataset(str(tmp_path / "dict"), split="dev", flag=FLAG)


def test_data_dir_after_the_at_sign(tmp_path: Path) -> None:
    write(tmp_path / "d" / "main" / "train.jsonl", rows_of(2, "main"))
    write(tmp_path / "d" / "other" / "train.jsonl", rows_of(1, "other"))
    assert prompts(open_dataset(f"{tmp_path}/d@main", split="train", flag=FLAG)) == ["main0", "main1"]


def test_b042_a_local_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = write(tmp_path / "a,b@c.jsonl", rows_of(1))
    assert len(open_dataset(str(odd), split="train", flag=FLAG)) == 1
    plain = write(tmp_path / "plain.jsonl", rows_of(1))
    assert split_entries(f"{plain}, {odd},org/name@folder") == [str(plain), str(odd), "org/name@folder"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_dataset("plain.jsonl", split="train", flag=FLAG)) == 1
    assert len(open_dataset("~/plain.jsonl", split="train", flag=FLAG)) == 1
    write(tmp_path / "my" / "data" / "train.jsonl", rows_of(1))
    assert len(open_dataset("my/data", split="train", flag=FLAG)) == 1


@pytest.mark.parametrize("name", ["missing.jsonl", "./folder", "/no/such/thing", "some/deep/folder"])
def test_b042_missing_files(name: str) -> None:
    with pytest.raises(ValueError, match=r"--data\.prompt_dataset: not found: "):
        open_dataset(name, split="train", flag=FLAG)


def test_b042_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not found: 'no-such-org/no-such-data' .*as a hub name"):
        open_dataset("no-such-org/no-such-data", split="train", flag=FLAG)


def test_hub_names_go_to_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, **options: Any) -> Dataset:
        asked.append((name, options))
        return Dataset.from_list(rows_of(4))

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = open_dataset("org/name@main", split="train[1:3]", flag=FLAG)
    assert prompts(rows) == ["r1", "r2"]
    assert asked == [("org/name", {"data_dir": "main", "split": "train"})]


@pytest.mark.parametrize(
    ("split", "expected"), [("train[:2]", [0, 1]), ("train[50%:]", [2, 3]), ("train[-1:]", [3]), ("train[1:3]", [1, 2])]
)
def test_split_slices(tmp_path: Path, split: str, expected: list[int]) -> None:
    rows = open_dataset(str(write(tmp_path / "a.jsonl", rows_of(4))), split=split, flag=FLAG)
    assert prompts(rows) == [f"r{i}" for i in expected]
    assert rows.spelled(0, "label") == str(expected[0])
    assert rows.where(0).endswith(f"line {expected[0] + 1}")


def test_splits_and_files_that_are_not_understood(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"split 'train\[:\]x' is not understood"):
        open_dataset("a.jsonl", split="train[:]x", flag=FLAG)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"unknown extension '\.txt'; datasets are read from \.arrow, \.csv"):
        open_dataset(str(tmp_path / "notes.txt"), split="train", flag=FLAG)
    with pytest.raises(ValueError, match=r"holds no .*csv.* file"):
        open_dataset(str(tmp_path), split="train", flag=FLAG)
    with pytest.raises(ValueError, match="an empty name between commas"):
        split_entries("a,,b")


def test_b039_objects_that_arrow_merged_lose_the_foreign_keys(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "tools": [{"args": {"a": 1}}]}, {"prompt": "q", "tools": [{"args": {"b": 2}}]}]
    for name in ("a.jsonl", "a.parquet"):
        read = open_dataset(str(write(tmp_path / name, rows)), split="train", flag=FLAG)
        assert [dict(r) for r in read] == rows
        assert read[1] == rows[1]


def test_images_stay_undecoded(tmp_path: Path) -> None:
    features = Features({"one": Image(), "many": List(Image()), "prompt": Value("string")})
    raw = {"bytes": b"not an image", "path": None}
    table = Dataset.from_dict({"one": [raw], "many": [[raw, raw]], "prompt": ["p"]}, features=features)
    table.save_to_disk(str(tmp_path / "d"))
    row = open_dataset(str(tmp_path / "d"), split="train", flag=FLAG)[0]
    assert row == {"one": {"bytes": b"not an image"}, "many": [{"bytes": b"not an image"}] * 2, "prompt": "p"}
