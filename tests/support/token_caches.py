"""A cache of tokens beside the data of a test, and a process that uses it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from openrlhf.launcher.data.readers import SftReader
from openrlhf.launcher.data.supervised import load_supervised
from openrlhf.launcher.data.token_cache import TokenCache
from openrlhf.launcher.supervised.task import make_task
from openrlhf.launcher.supervised_config import SftDataConfig, TrainSFTConfig
from support.launcher_tokenizer import byte_tokenizer


def token_cache(data: str, *, most_bytes: int = 1 << 30) -> TokenCache:
    """In the folder of this file."""
    return TokenCache(Path(data).parent / "tokens", most_bytes=most_bytes)


def tokenise_and_note(data: str, note: str) -> None:
    """Load the data, and write down how many rows this process tokenised for it, and the tokens that it got."""
    task = make_task(TrainSFTConfig(data=SftDataConfig(output_key="output")), byte_tokenizer())
    with patch.object(SftReader, "read", autospec=True, side_effect=SftReader.read) as read:
        dataset = load_supervised(data, task.reader, token_cache(data), max_samples=100, seed=1)
    with Path(note).open("a") as file:
        file.write(f"{read.call_count} {dataset.lengths.sum()}\n")
