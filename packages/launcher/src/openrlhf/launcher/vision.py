"""What a vision-language model brings: detection, its processor, the tokens that stand for images."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf.launcher.data.images import read_image
from openrlhf.rollout.images import decode_image, image_digest

if TYPE_CHECKING:
    from torch import Tensor

REMEMBERED = 4096
IMAGE_WORDS = ("image", "video", "vision", "audio", "boi", "eoi", "boa", "eoa")
NOT_IMAGES = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor returns beside the model's inputs for the image."""


BIDIRECTIONAL = ("gemma3", "paligemma")
"""Model types whose image tokens see each other in both directions, besides those whose configuration says so."""


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """A model with a vision encoder.

    suppressed: token ids that stand for images and must not be sampled. bidirectional: whether the tokens of an image
    see each other in both directions.
    """

    path: str
    suppressed: tuple[int, ...]
    linear_attention: bool
    bidirectional: bool


def find_vision(path: str) -> VisionModel | None:
    """The model's vision part, known by `vision_config`; None for a text model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    if getattr(config, "vision_config", None) is None:
        return None
    text = config.get_text_config()
    return VisionModel(
        path=path,
        suppressed=image_token_ids(config),
        linear_attention="linear_attention" in (getattr(text, "layer_types", None) or ()),
        bidirectional=config.model_type in BIDIRECTIONAL
        or getattr(text, "use_bidirectional_attention", None) == "vision",
    )


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Ids with a meaning for images, videos or sound in a model's configuration, ascending."""
    found = {
        value
        for name, value in config.to_dict().items()
        if name.startswith(IMAGE_WORDS) and name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return tuple(sorted(found))


class ImageProcessor:
    """The model's own processor, one image at a time: the agents' `ImageReader`, and the tensors of the trainer."""

    def __init__(self, path: str) -> None:
        self._processor = load_processor(path)
        self.token = image_token(self._processor)
        self.placeholder = int(self._processor.tokenizer.convert_tokens_to_ids(self.token))
        self._tokens: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def read(self, image: Any) -> bytes:
        """The content of an image file; also makes its tokens known, which takes as long."""
        content = _read_text(image) if isinstance(image, str) else read_image(image)
        self.tokens(content)
        return content

    def tokens(self, image: bytes) -> Sequence[int]:
        """The tokens that take the placeholder's place."""
        with self._lock:
            name = image_digest(image)
            if name not in self._tokens:
                if len(self._tokens) >= REMEMBERED:
                    self._tokens.clear()
                self._tokens[name] = self._run(image)["input_ids"][0].tolist()
            return self._tokens[name]

    def tensors(self, image: bytes) -> dict[str, Tensor]:
        """The model's inputs for one image, to be joined with those of others along the first dimension."""
        found = {name: value for name, value in self._run(image).items() if name not in NOT_IMAGES}
        if "pixel_attention_mask" in found:  # Idefics3, SmolVLM: [1, tiles, ...], padded to the prompt with most tiles
            found = {name: value.transpose(0, 1) for name, value in found.items()}
        return found

    def _run(self, image: bytes) -> dict[str, Any]:
        picture = decode_image(image)
        return dict(self._processor(text=[self.token], images=[picture], return_tensors="pt", add_special_tokens=False))


@functools.lru_cache(256)
def _read_text(text: str) -> bytes:
    """A URL is asked once, so that engine and trainer see the same."""
    return read_image(text)


def load_processor(path: str) -> Any:
    """The processor of a vision-language model. Raises ValueError where there is none."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"--actor.model_name_or_path {path!r}: no processor could be loaded: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"--actor.model_name_or_path {path!r} has a vision_config but no image processor: its folder needs the "
            "processor's files (preprocessor_config.json or processor_config.json)"
        )
    return processor


def image_token(processor: Any) -> str:
    """The text that stands for one image in a prompt."""
    return getattr(processor, "boi_token", None) or processor.image_token
