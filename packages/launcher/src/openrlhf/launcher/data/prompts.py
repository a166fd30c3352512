"""Prompt data of RL: rows -> `PromptItem`s, checked in one pass before any model is loaded.

Rows are read again when drawn, so memory stays at a few dozen bytes per row, however many rows repeat a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from openrlhf.agents.context import prompt_budget
from openrlhf.agents.environments import EnvironmentTable
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.blend import Blend, blend, by_ratios
from openrlhf.launcher.data.chat import ESCAPE, ChatRenderer
from openrlhf.launcher.data.dropped import DroppedText, Lost
from openrlhf.launcher.data.images import check_source
from openrlhf.launcher.data.locate import list_entries, mixing_probabilities, open_dataset
from openrlhf.launcher.data.prompt_reader import PromptReader, extra_columns, folder_of, source_names
from openrlhf.launcher.data.rows import Row, Rows, has_key, lookup, no_field, require_fields
from openrlhf.launcher.data.token_counts import TokenCounter
from openrlhf.launcher.data.values import check_label

log = logging.getLogger(__name__)

_CACHE_LIMIT = 200_000  # lengths of distinct prompts that are remembered while scanning
REMEDY = "use a tokenizer whose chat template writes it"


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

    @property
    def columns(self) -> Sequence[str]:
        """Names of what else travels with every prompt (`--data.extra_keys`)."""
        return self._reader.columns

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        """Prompt number `index`, as place `position` of an episode."""
        rows = self._sources[int(self._plan.source[index])]
        row_index = int(self._plan.row[index])
        read = self._reader.read(rows, row_index)
        return replace(read, group_id=f"e{episode}-p{index}", position=position, episode=episode)

    @property
    def strata(self) -> np.ndarray | None:
        """[prompts] int: the environment of each, by its place in the table; None: there are none."""
        return self._plan.kind

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """(place in its data set, value) of every prompt's column of this name."""
        for source, index in zip(self._plan.source, self._plan.row, strict=True):
            rows = self._sources[int(source)]
            yield rows.where(int(index)), self._reader.column(rows, rows[int(index)], name)

    def places(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """(names of the sources, source [N] int32 and row [N] int64 of every prompt)."""
        return [rows.name for rows in self._sources], self._plan.source, self._plan.row

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
    environments: EnvironmentTable | None = None,
) -> PromptDataset:
    """Find, check and measure the prompts. Needs the tokenizer, no model.

    max_new_tokens: `--rollout.max_new_tokens`; the prompt budget is `data.max_len` minus this (or minus 1).
    dataset, split: the evaluation's, in place of `data.prompt_dataset` and `data.prompt_split`.
    special_tokens: see `ChatRenderer`. image_token: what stands for an image in the texts of a vision-language model.
    environments: of the run; those of the training prompts are mixed in their ratios.
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
    sources = [open_dataset(e, split=split or data.prompt_split, flag=flag) for e in entries]
    reader = PromptReader(
        data,
        renderer,
        prompt_budget(data.max_len, max_new_tokens),
        columns=extra_columns(data, sources),
        names=source_names(entries, sources),
        environments=environments,
    )
    lossy = DroppedText(flag, data.dropped_text, remedy=REMEDY)
    with TokenCounter(tokenizer, workers=data.dataloader_num_workers) as counter:
        scanned = [_scan(rows, reader, counter, lossy, limit=data.max_samples) for rows in sources]
    overlong = [long for long, _ in scanned]
    plan = blend([len(o) for o in overlong], probs=probs, max_samples=data.max_samples, seed=seed)
    too_long = np.array([overlong[s][r] for s, r in zip(plan.source, plan.row, strict=True)], dtype=bool)
    lossy.report(of=sum(map(len, overlong)))
    counts = _report(too_long, reader, lossy)
    if counts.dropped:
        plan = Blend(source=plan.source[~too_long], row=plan.row[~too_long])
    if not len(plan):
        raise ValueError(f"{flag}: no prompt is left of {counts.rows} rows; raise --data.max_len")
    if environments is not None:
        kind = np.array([scanned[s][1][r] for s, r in zip(plan.source, plan.row, strict=True)])
        plan = by_ratios(plan, kind, environments, most=data.max_samples, flag=flag, training=dataset is None)
    return PromptDataset(sources, plan, reader, counts)


def _scan(
    rows: Rows, reader: PromptReader, counter: TokenCounter, lossy: DroppedText, *, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Check the first `limit` rows: [rows] bool, True where a prompt is over its budget; [rows] int, environments."""
    size = min(len(rows), limit)
    if size == 0:
        raise ValueError(f"{lossy.flag}: {rows.name} has no rows")
    data = reader.data
    require_fields(rows, prompt_fields(data))
    prompts = _DistinctPrompts(reader, counter)
    numbers, environments = np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.int32)
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
                check_source(image, folder_of(rows))
            for field in reader.columns:
                check_label(lookup(row, field))
            field = reader.environment_column
            environments[index] = reader.environment(rows, row)
        except ValueError as error:
            raise ValueError(f"{rows.where(index)}, field {field!r}: {error}") from error
        labels += data.label_key is None or has_key(row, data.label_key)
    if labels == 0:
        raise ValueError(no_field("--data.label_key", str(data.label_key), rows))
    return prompts.overlong()[numbers], environments


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
