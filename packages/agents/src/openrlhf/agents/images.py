"""Images among tokens. Executors count an image as one token, the placeholder, as the engine's requests do; a finished
sample holds the tokens that the engine put in its place, as the trainer needs them.

Pure lists: who reads images and knows how many tokens each takes is an `ImageReader`, which the launcher brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from openrlhf.agents.types import StopReason, Trajectory, Turn


class ImageReader(Protocol):
    """What the model's processor knows. placeholder: the token id that stands for one image in a prompt."""

    @property
    def placeholder(self) -> int: ...

    def read(self, image: Any) -> bytes:
        """The content of an image file, from a path, URL, base64 text, bytes or PIL image; read bytes stay as they are.

        Raises ValueError that names the image and what is wrong with it.
        """
        ...

    def tokens(self, image: bytes) -> Sequence[int]:
        """The tokens that stand for the image in the model's input."""
        ...


class TextOnly:
    """The reader of a model without vision: images pass through untouched and take no tokens."""

    placeholder = -1

    def read(self, image: Any) -> Any:
        return image

    def tokens(self, image: Any) -> Sequence[int]:
        return (self.placeholder,)


def check_count(token_ids: Sequence[int], images: Sequence[Any], reader: ImageReader) -> None:
    """ValueError unless there is one placeholder per image."""
    places = list(token_ids).count(reader.placeholder)
    if places != len(images) and not isinstance(reader, TextOnly):
        raise ValueError(
            f"{places} image placeholders (token {reader.placeholder}) but {len(images)} images: every image needs its "
            "place in the text, in order, and tokens of earlier turns must be passed on as they were"
        )


def extra_tokens(images: Sequence[bytes], reader: ImageReader) -> int:
    """By how many tokens the images make a sequence longer than its placeholders do."""
    return sum(len(reader.tokens(image)) - 1 for image in images)


def expand(token_ids: Sequence[int], images: Sequence[bytes], reader: ImageReader) -> list[int]:
    """The tokens with every placeholder replaced by its image's tokens."""
    left = iter(images)
    return [t for token in token_ids for t in (reader.tokens(next(left)) if token == reader.placeholder else (token,))]


def expand_trajectory(trajectory: Trajectory, reader: ImageReader, max_length: int) -> Trajectory:
    """The finished sample as the model sees it, at most `max_length` tokens long.

    What does not fit is cut off in front of the first image that does not fit whole, with the images after it; such a
    sample ended because of length.
    Raises ValueError where placeholders and images do not match.
    """
    if not trajectory.images or isinstance(reader, TextOnly):
        return trajectory
    check_count(trajectory.token_ids, trajectory.images, reader)
    starts = [0]  # where each token of the recorded sequence begins in the expanded one
    tokens: list[int] = []
    source: list[int] = []
    kept = 0
    for number, token in enumerate(trajectory.token_ids):
        is_image = token == reader.placeholder
        piece = reader.tokens(trajectory.images[kept]) if is_image else (token,)
        if len(tokens) + len(piece) > max_length:
            break
        kept += is_image
        tokens.extend(piece)
        source.extend([number] * len(piece))
        starts.append(len(tokens))
    last = len(starts) - 1
    cut = last < len(trajectory.token_ids) and not trajectory.failed
    return replace(
        trajectory,
        token_ids=tokens,
        trainable=[trajectory.trainable[i] for i in source],
        logprobs=[trajectory.logprobs[i] for i in source],
        versions=[trajectory.versions[i] for i in source],
        prompt_length=starts[min(trajectory.prompt_length, last)],
        turns=tuple(_shift(turn, starts, last) for turn in trajectory.turns if turn.start < last),
        images=tuple(trajectory.images[:kept]),
        stop_reason=StopReason.LENGTH if cut else trajectory.stop_reason,
    )


def _shift(turn: Turn, starts: Sequence[int], last: int) -> Turn:
    return replace(turn, start=starts[turn.start], end=starts[min(turn.end, last)])
