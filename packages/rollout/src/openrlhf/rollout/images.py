"""Image files as pictures, the same way for the engine and for the trainer: upright, RGB, transparency on white."""

from __future__ import annotations

import functools
import hashlib
from io import BytesIO

from PIL import Image, ImageOps

CACHED_IMAGES = 64
"""Decoded images that are kept: the samples of a group and the turns of an episode ask for the same ones."""


@functools.lru_cache(CACHED_IMAGES)
def decode_image(content: bytes) -> Image.Image:
    """The content of an image file as an RGB picture, which must not be changed. Raises OSError when it is none."""
    with Image.open(BytesIO(content)) as file:
        file.load()
        image = ImageOps.exif_transpose(file)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@functools.lru_cache(CACHED_IMAGES)
def image_digest(content: bytes) -> str:
    """A name for the content: what caches go by."""
    return hashlib.sha256(content).hexdigest()
