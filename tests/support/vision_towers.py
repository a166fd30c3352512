"""Tiny models of families that put a vision tower and a projector in front of an ordinary language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.vision_parts import END, text_config, vision_tokenizer

# As LLaVA's: only lists of parts, images first.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: "
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def llava(spread: float) -> tuple[Any, Callable[[], Any]]:
    """CLIP tower of 2 x 2 patches and a Llama: 4 tokens for every image."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = vision_tokenizer(("<|endoftext|>", "<|im_start|>", END, "<image>"), {"image_token": "<image>"})
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=64,
    )
    text = LlamaConfig(**text_config(tokenizer, spread, head_dim=32, tie_word_embeddings=False))
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=3, vision_feature_layer=-1, tie_word_embeddings=False
    )

    def processor() -> Any:
        return LlavaProcessor(
            image_processor=CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,
            chat_template=LLAVA_TEMPLATE,
        )

    return LlavaForConditionalGeneration(config), processor


def _parts_template(image: str) -> str:
    """Parts in their order; `image` stands for one."""
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}" + image + "{% else %}{{ c['text'] }}"
        "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def internvl(spread: float) -> tuple[Any, Callable[[], Any]]:
    """Tiles of 4 x 4 patches, four of them a token: 4 tokens for a small image."""
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    special = ("<|endoftext|>", "<|im_start|>", END, "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = vision_tokenizer(special, names)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": (56, 56),
        "patch_size": (14, 14),
        "initializer_range": spread,
    }
    config = InternVLConfig(
        vision_config=vision,
        text_config=text_config(tokenizer, spread, model_type="qwen3", head_dim=32),
        image_token_id=5,
        image_seq_length=4,
        tie_word_embeddings=True,
    )

    def processor() -> Any:
        size = {"height": 56, "width": 56}
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=2),
            tokenizer=tokenizer,
            video_processor=InternVLVideoProcessor(size=size),
            image_seq_length=4,
            chat_template=_parts_template("<IMG_CONTEXT>"),
        )

    return InternVLForConditionalGeneration(config), processor


def smolvlm(spread: float) -> tuple[Any, Callable[[], Any]]:
    """Tiles of 4 x 4 patches, four of them a token; an image is its tiles, and once more as a whole."""
    from transformers import (
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    tiles = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    special = ("<|endoftext|>", "<|im_start|>", END, "<image>", "<fake_token_around_image>", "<global-img>", *tiles)
    names = {"image_token": "<image>", "fake_image_token": special[4], "global_image_token": special[5]}
    tokenizer = vision_tokenizer(special, names | {f"tile_{number}": tile for number, tile in enumerate(tiles)})
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "initializer_range": spread,
    }
    config = SmolVLMConfig(
        vision_config=vision,
        text_config=text_config(tokenizer, spread, model_type="llama", head_dim=32, tie_word_embeddings=False),
        image_token_id=3,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )

    def processor() -> Any:
        size = {"longest_edge": 64}
        return SmolVLMProcessor(
            image_processor=SmolVLMImageProcessor(size=size, max_image_size={"longest_edge": 32}),
            tokenizer=tokenizer,
            video_processor=SmolVLMVideoProcessor(size=size, max_image_size={"longest_edge": 32}),
            image_seq_len=4,
            chat_template=_parts_template("<image>"),
        )

    return SmolVLMForConditionalGeneration(config), processor
