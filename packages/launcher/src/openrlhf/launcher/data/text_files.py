"""A data file as UTF-8 bytes, whatever it is packed in: the file itself, or a copy of its contents without a name.

Compressed files and UTF-16 are written anew into a temporary file, which is gone with the process.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_BLOCK = 1 << 20
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def open_utf8(path: Path) -> IO[bytes]:
    """The contents, for reading. ValueError where they cannot be unpacked, or are no UTF-16 though they begin so."""
    suffix = path.suffix.lower()
    file: Any
    if suffix in COMPRESSED:
        try:
            file = _unpacked(path, suffix)
        except _UNREADABLE as error:
            raise ValueError(f"{path}: cannot be unpacked as {suffix} ({error})") from error
    else:
        file = path.open("rb")
    mark = file.read(2)
    file.seek(0)
    return _as_utf8(file, path) if mark in _UTF16 else file


def not_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
    """What to say of a place that is in another encoding."""
    return ValueError(
        f"{where}: not UTF-8 text ({error}); write it anew as UTF-8, for instance with iconv -f WINDOWS-1252 -t UTF-8"
    )


def _unpacked(path: Path, suffix: str) -> IO[bytes]:
    if suffix == ".zst":
        from datasets.utils.extract import ZstdExtractor

        with tempfile.NamedTemporaryFile() as plain:
            ZstdExtractor.extract(path, plain.name)
            with open(plain.name, "rb") as source:
                return _copy(iter(lambda: source.read(_BLOCK), b""))
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            if len(names) != 1:
                raise zipfile.BadZipFile(f"expected one file inside, got {len(names)}")
            with archive.open(names[0]) as source:
                return _copy(iter(lambda: source.read(_BLOCK), b""))
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix]
    with opened(path, "rb") as source:
        return _copy(iter(lambda: source.read(_BLOCK), b""))


def _as_utf8(file: IO[bytes], path: Path) -> IO[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")()

    def blocks() -> Iterator[bytes]:
        while block := file.read(_BLOCK):
            yield decoder.decode(block).encode()
        yield decoder.decode(b"", final=True).encode()

    with file:
        try:
            return _copy(blocks())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: begins as UTF-16, but is none ({error})") from None


def _copy(blocks: Iterable[bytes]) -> IO[bytes]:
    """The blocks in a temporary file, ready to be read."""
    target = tempfile.TemporaryFile()  # noqa: SIM115 (the caller's)
    try:
        target.writelines(blocks)
    except BaseException:
        target.close()
        raise
    target.seek(0)
    return target
