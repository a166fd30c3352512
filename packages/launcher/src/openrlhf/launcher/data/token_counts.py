"""Counts the tokens of texts, in this process or in `--data.dataloader_num_workers` others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any

SHARE = 256
"""Texts per process and call: enough to cover what a message costs."""


class TokenCounter:
    """A tokenizer's lengths of texts. workers: processes besides this one; 0 counts here.

    Example::

        with TokenCounter(tokenizer, workers=4) as counter:
            counter.count(texts)  # -> [12, 7, ...]
    """

    def __init__(self, tokenizer: Any, *, workers: int = 0) -> None:
        self._tokenizer = tokenizer
        self.batch = SHARE * max(workers, 1)
        """How many texts a call should have."""
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                workers, mp_context=get_context("spawn"), initializer=_keep, initargs=(tokenizer,)
            )

    def count(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, without any that a tokenizer adds."""
        if self._pool is None:
            return _lengths(self._tokenizer, texts)
        shares = [texts[i : i + SHARE] for i in range(0, len(texts), SHARE)]
        return [length for lengths in self._pool.map(_count_kept, shares) for length in lengths]

    def __enter__(self) -> TokenCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_kept: Any = None
"""The tokenizer of a worker process."""


def _keep(tokenizer: Any) -> None:
    global _kept
    _kept = tokenizer


def _count_kept(texts: Sequence[str]) -> list[int]:
    return _lengths(_kept, texts)


def _lengths(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [len(tokens) for tokens in ids]
