"""Images of data rows and environments: any usual form -> the content of an image file.

Content, not a path, goes to the workers: it works on nodes without a shared disk, and engine and trainer see the same.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, UnidentifiedImageError

from openrlhf.launcher.proxies import ProxiedTransport, through
from openrlhf.rollout.images import decode_image

URL_TIMEOUT = 30.0
MAX_BYTES = 64 * 2**20
"""Largest image file that is fetched or read."""
BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk0", "SUkq", "TU0A")
"""How PNG, JPEG, GIF, WebP, BMP and TIFF files begin in base64."""
PART_KEYS = ("bytes", "image", "image_url", "path", "url", "base64")
"""Where a message part may carry its image."""


def read_image(value: Any, folder: Path | None = None) -> bytes:
    """The content of an image file.

    value: content as bytes, a path (relative ones from here or from `folder`), a file:, data: or http(s) URL, base64
    text, a PIL image, or an object with "bytes", "path", "url", "image" or "base64", as in dataset columns.
    Raises ValueError: not found, not reachable, or no image that can be decoded.
    """
    content = _content(value, folder)
    check_image(content, value)
    return content


def check_image(content: bytes, value: Any) -> None:
    """ValueError unless the whole image can be decoded."""
    try:
        decode_image(content)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {short(value)} can't be decoded: {error}") from error


def check_source(value: Any, folder: Path | None = None) -> None:
    """A quick look, without decoding: the file is there and begins like an image. URLs are not asked."""
    if isinstance(value, Mapping):
        value = _of_mapping(value)
    if isinstance(value, Image.Image) or (isinstance(value, str) and value.startswith(("http://", "https://"))):
        return
    content: Any = BytesIO(_content(value, folder))
    try:
        Image.open(content).close()
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"image {short(value)} is no image file that can be read: {error}") from error


def as_list(value: Any) -> list[Any]:
    """The images of a row's field: none, one, or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def inline_images(messages: Any) -> list[Any]:
    """Images that message parts carry themselves, in order."""
    return [part[key] for part in _image_parts(messages) if (key := _image_key(part)) is not None]


def _image_key(part: Mapping[str, Any]) -> str | None:
    return next((key for key in PART_KEYS if part.get(key) is not None), None)


def _image_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                yield part


def short(value: Any, limit: int = 60) -> str:
    """The image as a message can name it."""
    if isinstance(value, bytes):
        return f"of {len(value)} bytes"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _content(value: Any, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):
        value = _of_mapping(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Image.Image):
        buffer = BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"expected an image (path, URL, base64 text, bytes or PIL image), got {type(value).__name__}: {value!r:.60}"
        )
    return _of_text(value, folder)


def _of_mapping(value: Mapping[str, Any]) -> Any:
    key = _image_key(value)
    if key is not None:
        inner = value[key]
        return _of_mapping(inner) if isinstance(inner, Mapping) else inner
    raise ValueError(f"expected an image object with bytes, path, url or base64, got {short(dict(value))}")


def _of_text(text: str, folder: Path | None) -> bytes:
    if text.startswith(("http://", "https://")):
        return _download(text)
    if text.startswith("data:"):
        return _base64(text.partition(",")[2], text)
    path = Path(text.removeprefix("file://")).expanduser()
    candidates = [path] if path.is_absolute() or folder is None else [path, folder / path]
    found = next((p for p in candidates if _is_file(p)), None)
    if found is None:
        if text.startswith(BASE64_STARTS):
            return _base64(text, text)
        raise ValueError(f"image {short(text)} not found; looked for {', '.join(map(str, candidates))}")
    if found.stat().st_size > MAX_BYTES:
        raise ValueError(f"image {short(text)} has more than {MAX_BYTES >> 20} MiB")
    return found.read_bytes()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # base64 text is too long for a file name
        return False


def _base64(text: str, value: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"image {short(value)} is neither a file nor base64 text ({error})") from error


def _download(url: str) -> bytes:
    try:
        with httpx.Client(transport=ProxiedTransport(), timeout=URL_TIMEOUT, follow_redirects=True) as client:
            response = client.get(url)
        if not response.is_success:
            reason = f"HTTP {response.status_code} {response.reason_phrase}{through(response)}"
            raise ValueError(f"image {short(url)} could not be fetched: {reason}")
    except httpx.HTTPError as error:
        raise ValueError(f"image {short(url)} could not be fetched: {error}") from error
    if len(response.content) > MAX_BYTES:
        raise ValueError(f"image {short(url)} has more than {MAX_BYTES >> 20} MiB")
    return response.content
