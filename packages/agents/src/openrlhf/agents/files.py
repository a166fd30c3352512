"""Files of users: text in the encodings that editors write, and code (agents, reward functions), which travels by
content and is loaded by `modules`.
"""

from __future__ import annotations

import codecs
import importlib.util
from dataclasses import dataclass
from pathlib import Path

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFile:
    """An author's file. path: absolute, where it was read (for tracebacks and neighbours). source: its content."""

    path: str
    source: str

    @property
    def name(self) -> str:
        return Path(self.path).name


class CodeFileError(ValueError):
    """An author's file cannot be used; the message says which file, what is wrong and what is expected."""


def read_code(path: str | Path, flag: str) -> CodeFile:
    """Reads a file given by `flag` (for messages, for example `--reward.remote_url`)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise CodeFileError(f"{flag}: file not found: {str(path)!r} (looked at {file.absolute()})")
    try:
        source = decode_source(file.read_bytes())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise CodeFileError(f"{flag}: {str(path)!r} cannot be decoded: {error}") from error
    return CodeFile(path=str(file.resolve()), source=source)


def as_code(path_or_code: str | Path | CodeFile, flag: str) -> CodeFile:
    return path_or_code if isinstance(path_or_code, CodeFile) else read_code(path_or_code, flag)


def decode_text(content: bytes) -> str:
    """The text of a user's file: in the encoding of its byte order mark (UTF-8, 16 or 32), else UTF-8.

    Lines end as in the file; split them with `text_lines`. Raises UnicodeDecodeError.
    """
    return content.decode(_marked_encoding(content) or "utf-8")


def text_lines(text: str) -> list[str]:
    """The lines of a text file, without their ends: a line ends at LF or CRLF and nowhere else.

    `str.splitlines` also cuts at U+2028, U+0085 and others, which stand unescaped in the values of valid JSON lines.
    """
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def decode_source(content: bytes) -> str:
    """Python source as Python itself would read it (a coding line counts), in UTF-16 and 32 too where a mark says so.

    Raises SyntaxError for an unknown coding line, UnicodeDecodeError.
    """
    encoding = _marked_encoding(content)
    if encoding in (None, "utf-8-sig"):
        return importlib.util.decode_source(content)
    return decode_text(content).replace("\r\n", "\n")


def _marked_encoding(content: bytes) -> str | None:
    return next((encoding for mark, encoding in BYTE_ORDER_MARKS if content.startswith(mark)), None)
