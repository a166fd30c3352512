"""Names of the files of a record, and how a Parquet file gets onto the disk: complete or absent.

record.json        format, run id and name, number of ranks
config.toml        the resolved configuration, secrets masked
tokenizer.json     of the library `tokenizers`
steps.jsonl        two lines per step: the batch before it is trained on, and the metrics after
alarms.jsonl       a line per alarm that came or went
samples/           00000005.rank0.parquet: the samples of a step on a rank
images/            00000005.rank0.parquet: name and content of their images
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

ABOUT = "record.json"
CONFIG = "config.toml"
TOKENIZER = "tokenizer.json"
STEPS = "steps.jsonl"
ALARMS = "alarms.jsonl"
SAMPLES = "samples"
IMAGES = "images"
TEMPORARY = ".new-"

LEVEL = 3
"""Of zstd."""
_NAME = re.compile(r"(\d{8})\.rank(\d+)\.parquet")
_FLOATS = ["engine_logprobs.list.element", "trainer_logprobs.list.element"]
"""Columns whose bytes are stored apart by their significance, which zstd can then use."""

IMAGE_SCHEMA = pa.schema([pa.field("name", pa.string()), pa.field("content", pa.large_binary())])


@dataclass(frozen=True, order=True)
class StepFile:
    """What one rank wrote of a step."""

    step: int
    rank: int
    path: Path


def step_name(step: int, rank: int) -> str:
    """The name of a rank's file."""
    return f"{step:08d}.rank{rank}.parquet"


def step_files(folder: Path) -> list[StepFile]:
    """The files of all ranks by rising step."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("*.parquet"))
    return sorted(StepFile(int(match[1]), int(match[2]), path) for path, match in matches if match)


def write_columns(columns: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Write arrays of one length as a Parquet file, complete or absent."""
    write_table(pa.table(dict(columns)), path)


def write_table(table: pa.Table, path: Path) -> int:
    """Write a Parquet file under a temporary name, then rename it. Returns its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(TEMPORARY + path.name)
    floats = [name for name in _FLOATS if name.partition(".")[0] in table.column_names]
    others = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    others += ["versions.list.element", "tokens.list.element"] if floats else []
    pq.write_table(
        table,
        new,
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=others,  # pyright: ignore[reportArgumentType]
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_statistics=False,
        store_schema=False,
        write_page_index=False,
    )
    size = new.stat().st_size
    os.replace(new, path)
    return size
