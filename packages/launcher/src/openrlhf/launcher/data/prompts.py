"""Prompt data of RL: rows -> `PromptItem`s, checked in one pass before any model is loaded.

Rows are read again when drawn, so memory stays at a few dozen bytes per row, however many rows repeat a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.agents.chat.template import PromptError
from openrlhf.agents.context import prompt_budget
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.blend import Blend, blend
from openrlhf.launcher.data.chat import ESCAPE, ChatRenderer
from openrlhf.launcher.data.dropped import DroppedText, Lost
from openrlhf.launcher.data.images import as_list, check_source, inline_images, read_image
from openrlhf.launcher.data.locate import list_entries, mixing_probabilities, open_dataset
from openrlhf.launcher.data.messages import parsed, row_tools
from openrlhf.launcher.data.rows import Row, Rows, has_key, lookup, no_field, require_fields, spell
from openrlhf.launcher.data.token_counts import TokenCounter
from openrlhf.launcher.data.values import check_label

log = logging.getLogger(__name__)

_CACHE_LIMIT = 200_000  # lengths of distinct prompts that are remembered while scanning
REMEDY = "use a tokenizer whose chat template writes it"
_EXTRA_TOKENS = 8  # tokens that a tokenizer may add without text: prefix space, BOS


@dataclass(frozen=True, kw_only=True)
class PromptCounts:
    """What the scan found: rows read, prompts over their budget, of those dropped, prompts with special tokens.

    lossy: rows of which the chat template leaves a text out.
    """

    rows: int
    overlong: int
    dropped: int
    injected: int
    lossy: int


class PromptDataset:
    """Prompts by number, 0..len-1, in file order; `PromptSampler` shuffles them.

    Two rows with the same prompt are two prompts: `group_id` is made of episode and row, never of the text.
    """

    def __init__(self, sources: Sequence[Rows], plan: Blend, reader: PromptReader, counts: PromptCounts) -> None:
        self._sources = sources
        self._plan = plan
        self._reader = reader
        self.counts = counts

    def __len__(self) -> int:
        return len(self._plan)

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        """Prompt number `index`, as place `position` of an episode."""
        rows = self._sources[int(self._plan.source[index])]
        row_index = int(self._plan.row[index])
        prompt, label, images, datasource = self._reader.read(rows, row_index)
        return PromptItem(
            group_id=f"e{episode}-p{index}",
            prompt=prompt,
            label=label,
            images=images,
            datasource=datasource,
            position=position,
            episode=episode,
        )

    def items(self) -> list[PromptItem]:
        """All prompts in file order, as an evaluation uses them: their group ids are never those of an episode."""
        return [replace(self.item(i, position=i), group_id=f"eval-p{i}") for i in range(len(self))]


class UnreadPrompts(PromptDataset):
    """So many prompts of which only the number is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        raise RuntimeError("these prompts were not read")


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    *,
    max_new_tokens: int | None = None,
    seed: int = 42,
    dataset: str | None = None,
    split: str | None = None,
    special_tokens: str = "warn",
    image_token: str | None = None,
) -> PromptDataset:
    """Find, check and measure the prompts. Needs the tokenizer, no model.

    max_new_tokens: `--rollout.max_new_tokens`; the prompt budget is `data.max_len` minus this (or minus 1).
    dataset, split: the evaluation's, in place of `data.prompt_dataset` and `data.prompt_split`.
    special_tokens: see `ChatRenderer`. image_token: what stands for an image in the texts of a vision-language model.
    Raises ValueError: nothing found at a path, a key that no row has (with the available columns), a bad row (with
    its place, field and what was expected), an overlong prompt under `--data.overlong_prompts error`.
    """
    flag = "--data.prompt_dataset" if dataset is None else "--eval.dataset"
    entries = list_entries(dataset or data.prompt_dataset, flag=flag)
    mixed = dataset is None and data.prompt_probs is not None
    probs = mixing_probabilities(data.prompt_probs or "", len(entries)) if mixed else None
    renderer = ChatRenderer(
        tokenizer,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
        special_tokens=special_tokens,
        image_token=image_token,
    )
    reader = PromptReader(data, renderer, prompt_budget(data.max_len, max_new_tokens))
    sources = [open_dataset(e, split=split or data.prompt_split, flag=flag) for e in entries]
    lossy = DroppedText(flag, data.dropped_text, remedy=REMEDY)
    with TokenCounter(tokenizer, workers=data.dataloader_num_workers) as counter:
        overlong = [_scan(rows, reader, counter, lossy, limit=data.max_samples) for rows in sources]
    plan = blend([len(o) for o in overlong], probs=probs, max_samples=data.max_samples, seed=seed)
    too_long = np.array([overlong[s][r] for s, r in zip(plan.source, plan.row, strict=True)], dtype=bool)
    lossy.report(of=sum(map(len, overlong)))
    counts = _report(too_long, reader, lossy)
    if counts.dropped:
        plan = Blend(source=plan.source[~too_long], row=plan.row[~too_long])
    if not len(plan):
        raise ValueError(f"{flag}: no prompt is left of {counts.rows} rows; raise --data.max_len")
    return PromptDataset(sources, plan, reader, counts)


class PromptReader:
    """Turns one row into prompt text, label, images and datasource, the same way for every source."""

    def __init__(self, data: DataConfig, renderer: ChatRenderer, budget: int) -> None:
        self.data = data
        self.renderer = renderer
        self.budget = budget

    def read(self, rows: Rows, index: int) -> tuple[str, Any, Sequence[bytes], str]:
        """(prompt, label, images, datasource) of a checked row; the prompt is cut to its budget.

        Raises ValueError for an image that can't be read, with the row.
        """
        row = rows[index]
        values = self.images(row)
        text = self.render(row)
        try:
            images = tuple(read_image(value, _folder(rows)) for value in values)
        except ValueError as error:
            raise ValueError(f"{rows.where(index)}, field {self.data.image_key!r}: {error}") from error
        if not images and not self.surely_fits(text):
            text = truncate_left(text, self.renderer.tokenizer, self.budget)
        label = "" if self.data.label_key is None else rows.spelled(index, self.data.label_key)
        return text, label, images, str(spell(row.get("datasource") or "default"))

    def render(self, row: Row) -> str:
        """The prompt text, not cut. Raises PromptError."""
        if not has_key(row, self.data.input_key):
            raise PromptError("expected a prompt, but the row has no such field")
        return self.renderer.render(lookup(row, self.data.input_key), row_tools(row), len(self.images(row)))

    def images(self, row: Row) -> Sequence[Any]:
        """The row's images as the file has them, or those that its messages carry. Raises PromptError on too many."""
        images = as_list(lookup(row, self.data.image_key)) or inline_images(parsed(lookup(row, self.data.input_key)))
        if len(images) > self.data.max_images_per_prompt:
            raise PromptError(
                f"{len(images)} images in field {self.data.image_key!r}, but --data.max_images_per_prompt is "
                f"{self.data.max_images_per_prompt}"
            )
        return images

    def surely_fits(self, text: str) -> bool:
        """True where no tokenizer can need more tokens than the budget: ASCII text has at most one per character."""
        return text.isascii() and len(text) + _EXTRA_TOKENS <= self.budget


def _folder(rows: Rows) -> Path | None:
    """Where relative image paths of a file may start from, beside the working directory."""
    path = Path(rows.name)
    return path if path.is_dir() else path.parent if path.is_file() else None


def truncate_left(text: str, tokenizer: Any, budget: int) -> str:
    """The end of the text that tokenises to at most `budget` tokens; a leading BOS is kept."""
    bos = tokenizer.bos_token or ""
    head = bos if bos and text.startswith(bos) else ""
    body = text[len(head) :]
    room = keep = budget - (1 if head else 0)
    ids = _encode(tokenizer, body)
    if len(ids) <= room:
        return text
    while keep > 0:
        tail = tokenizer.decode(ids[-keep:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        tail = tail.lstrip("\ufffd")  # a character of which the cut took the first bytes
        if len(_encode(tokenizer, tail)) <= room:
            return head + tail
        keep -= 1
    return head


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _scan(rows: Rows, reader: PromptReader, counter: TokenCounter, lossy: DroppedText, *, limit: int) -> np.ndarray:
    """Check the first `limit` rows; True where a prompt is over its budget, [rows] bool."""
    size = min(len(rows), limit)
    if size == 0:
        raise ValueError(f"{lossy.flag}: {rows.name} has no rows")
    data = reader.data
    require_fields(rows, prompt_fields(data))
    prompts = _DistinctPrompts(reader, counter)
    numbers = np.empty(size, dtype=np.int64)
    labels = 0
    for index, row in enumerate(islice(rows, size)):
        field = data.image_key
        try:
            images = reader.images(row)
            field = data.input_key
            numbers[index] = prompt = prompts.number(row, len(images))
            lossy.add(rows.where(index), prompts.lost.get(prompt, ()))
            field = data.label_key or ""
            check_label(lookup(row, field))
            field = data.image_key
            for image in images:
                check_source(image, _folder(rows))
        except ValueError as error:
            raise ValueError(f"{rows.where(index)}, field {field!r}: {error}") from error
        labels += data.label_key is None or has_key(row, data.label_key)
    if labels == 0:
        raise ValueError(no_field("--data.label_key", str(data.label_key), rows))
    return prompts.overlong()[numbers]


class _DistinctPrompts:
    """The prompts of many rows, each rendered and measured once; measured in batches. lost: see `ChatRenderer`."""

    def __init__(self, reader: PromptReader, counter: TokenCounter) -> None:
        self._reader = reader
        self._counter = counter
        self._numbers: dict[int, int] = {}
        self._overlong = bytearray()
        self._waiting: dict[int, str] = {}
        self.lost: dict[int, list[Lost]] = {}

    def number(self, row: Row, images: int) -> int:
        """The same for rows with the same prompt. Raises PromptError for one that cannot be rendered.

        Prompts with images are measured by the engine, not here.
        """
        key = hash(repr((lookup(row, self._reader.data.input_key), row.get("tools"), images)))
        if key in self._numbers:
            return self._numbers[key]
        text = self._reader.render(row)
        if len(self._numbers) >= _CACHE_LIMIT:
            self._numbers.clear()
        number = self._numbers[key] = len(self._overlong)
        self._overlong.append(False)
        if self._reader.renderer.lost:
            self.lost[number] = self._reader.renderer.lost[:1]
        if not images and not self._reader.surely_fits(text):
            self._waiting[number] = text
            if len(self._waiting) >= self._counter.batch:
                self._measure()
        return number

    def overlong(self) -> np.ndarray:
        """True where a prompt is over the budget, [prompts] bool."""
        self._measure()
        return np.frombuffer(self._overlong, dtype=bool)

    def _measure(self) -> None:
        lengths = self._counter.count(list(self._waiting.values())) if self._waiting else []
        for number, length in zip(self._waiting, lengths, strict=True):
            self._overlong[number] = length > self._reader.budget
        self._waiting.clear()


def prompt_fields(data: DataConfig) -> list[tuple[str, str]]:
    """(flag, key) of the fields that some row must have."""
    wanted = [("--data.input_key", data.input_key)]
    if data.label_key is not None:
        wanted.append(("--data.label_key", data.label_key))
    if data.image_key != DataConfig.image_key:
        wanted.append(("--data.image_key", data.image_key))
    return wanted


def _report(too_long: np.ndarray, reader: PromptReader, lossy: DroppedText) -> PromptCounts:
    """Apply `--data.overlong_prompts` and say how many prompts it concerns."""
    flag = lossy.flag
    policy, budget = reader.data.overlong_prompts, reader.budget
    count = int(too_long.sum())
    what = f"{flag}: {count} of {len(too_long)} prompts are longer than {budget} tokens"
    if count and policy == "error":
        raise ValueError(f"{what} (first: row {int(np.argmax(too_long))}); raise --data.max_len or drop them")
    if count:
        log.warning("%s; they are %s", what, "dropped" if policy == "drop" else "cut from the left")
    if reader.renderer.injected:
        escaped = reader.renderer.special_tokens == ESCAPE
        fate = "kept as text" if escaped else "read as real special tokens"
        log.warning("%s: %d prompts spell out special tokens; these are %s", flag, reader.renderer.injected, fate)
    dropped = count if policy == "drop" else 0
    injected = reader.renderer.injected
    return PromptCounts(rows=len(too_long), overlong=count, dropped=dropped, injected=injected, lossy=lossy.rows)
