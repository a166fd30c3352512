"""The script that writes geometry3k as the guide's JSONL."""

from __future__ import annotations

import importlib.util
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from openrlhf.rollout.images import decode_image

SCRIPT = Path(__file__).parents[2] / "examples" / "python" / "prepare_geometry3k.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("prepare_geometry3k", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png(colour: str) -> dict[str, Any]:
    out = BytesIO()
    Image.new("RGB", (4, 4), colour).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def test_rows_in_the_guides_form(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "images": [[png("red")], [png("red"), png("blue")], [png("red")], [png("blue")]],
        "problem": ["<image>Find x.", "<image> and <image>: y?", "<image><image>?", "Find z."],
        "answer": ["3", "2 \\sqrt { 3 }", "1", "4"],
    }
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    script.main([str(tmp_path / "train.parquet"), "--output", str(tmp_path / "out")])
    written = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert "row 2: 1 images for '<image><image>?': left out" in capsys.readouterr().err
    assert [row["label"] for row in written] == ["3", "2 \\sqrt { 3 }", "4"]
    kinds = [[part["type"] for part in row["prompt"][0]["content"]] for row in written]
    assert kinds == [["image", "text"], ["image", "text", "image", "text"], ["image", "text"]]
    assert written[0]["prompt"][0]["content"][1]["text"].startswith("Find x.\n")
    assert [len(row["images"]) for row in written] == [1, 2, 1]
    assert all(decode_image(Path(path).read_bytes()).size == (4, 4) for row in written for path in row["images"])


def test_other_columns_are_named(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"images": [], "question": "x"}\n')
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")])
    assert "has no column answer, problem; it has images, question" in capsys.readouterr().err
