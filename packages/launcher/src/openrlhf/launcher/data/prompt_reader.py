"""One row of prompt data -> one `PromptItem`: text, label, images, datasource, columns and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from openrlhf.agents.chat.template import PromptError
from openrlhf.agents.environments import EnvironmentTable
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import ALL, DataConfig
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.data.early import EXTRA
from openrlhf.launcher.data.images import as_list, inline_images, read_image
from openrlhf.launcher.data.messages import parsed, row_tools
from openrlhf.launcher.data.rows import Row, Rows, has_field, has_key, lookup, no_field, spell

SOURCE = "datasource"
"""Field that names where a row came from; a row without it has the name of its data set."""
_EXTRA_TOKENS = 8  # tokens that a tokenizer may add without text: prefix space, BOS


class PromptReader:
    """Turns one row into prompt text, label, images, datasource and columns, the same way for every source.

    columns: names of what else travels. names: of data sets, for rows that name no datasource. environments: which rows
    name theirs.
    """

    def __init__(
        self,
        data: DataConfig,
        renderer: ChatRenderer,
        budget: int,
        *,
        columns: Sequence[str] = (),
        names: Mapping[Rows, str] = MappingProxyType({}),
        environments: EnvironmentTable | None = None,
    ) -> None:
        self.data = data
        self.renderer = renderer
        self.budget = budget
        self.columns = columns
        self._names = names
        self._environments = environments
        self.environment_column = SOURCE if environments is None else environments.column
        self._numbers = {} if environments is None else {name: n for n, name in enumerate(environments.names)}

    def read(self, rows: Rows, index: int) -> PromptItem:
        """A checked row, not yet in any group; the prompt is cut to its budget.

        Raises ValueError for an image that can't be read, with the row.
        """
        row = rows[index]
        values = self.images(row)
        text = self.render(row)
        try:
            images = tuple(read_image(value, folder_of(rows)) for value in values)
        except ValueError as error:
            raise ValueError(f"{rows.where(index)}, field {self.data.image_key!r}: {error}") from error
        if not images and not self.surely_fits(text):
            text = truncate_left(text, self.renderer.tokenizer, self.budget)
        label = "" if self.data.label_key is None else rows.spelled(index, self.data.label_key)
        source = self._source(rows, row)
        columns = {name: self.column(rows, row, name) for name in self.columns}
        environment = "" if self._environments is None else self._environments.names[self.environment(rows, row)]
        return PromptItem(
            group_id="",
            prompt=text,
            label=label,
            images=images,
            datasource=source,
            columns=columns,
            environment=environment,
        )

    def environment(self, rows: Rows, row: Row) -> int:
        """The place of the row's environment in the table; 0 without a table. Raises PromptError for an unknown one."""
        table = self._environments
        if table is None:
            return 0
        name = self._source(rows, row) if table.column == SOURCE else str(spell(lookup(row, table.column)))
        if name not in self._numbers:
            raise PromptError(f"{name!r} is no environment of {table.file}; there are {', '.join(table.names)}")
        return self._numbers[name]

    def column(self, rows: Rows, row: Row, name: str) -> Any:
        """The row's value of one of its columns."""
        return self._source(rows, row) if name == SOURCE else lookup(row, name)

    def _source(self, rows: Rows, row: Row) -> str:
        return str(spell(row.get(SOURCE) or self._names.get(rows, "default")))

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


def extra_columns(data: DataConfig, sources: Sequence[Rows]) -> Sequence[str]:
    """The names that `--data.extra_keys` means. ValueError for one that no row of any data set has."""
    filled = [rows for rows in sources if len(rows)]
    if ALL in data.extra_keys:
        found = dict.fromkeys((*(name for rows in filled for name in rows.columns), SOURCE))
        return [name for name in found if name not in (data.input_key, data.label_key, data.image_key)]
    for key in data.extra_keys:
        if key != SOURCE and filled and not any(has_field(rows, key) for rows in filled):
            raise ValueError("; ".join(no_field(EXTRA, key, rows) for rows in filled))
    return list(dict.fromkeys(data.extra_keys))


def source_names(entries: Sequence[str], sources: Sequence[Rows]) -> dict[Rows, str]:
    """What rows of several data sets have as their datasource: the last part of the name that the user gave.

    A single data set has no name, it is the default one; where two end alike, whole names are used.
    """
    if len(entries) == 1:
        return {}
    paths = [Path(entry) for entry in entries]
    names = [path.name.split(".")[0] if path.is_file() else path.name for path in paths]
    return dict(zip(sources, names if len(set(names)) == len(names) else entries, strict=True))


def folder_of(rows: Rows) -> Path | None:
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
