"""Tiny models of Qwen's vision-language families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from support.vision_parts import END, text_config, vision_tokenizer

IMAGE, VIDEO, VISION_START, VISION_END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, VISION_START, VISION_END, IMAGE, VIDEO)

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer() -> Any:
    """With the names by which Qwen's processors find their tokens."""
    return vision_tokenizer(
        SPECIAL,
        names={
            "image_token": IMAGE,
            "video_token": VIDEO,
            "vision_start_token": VISION_START,
            "vision_end_token": VISION_END,
        },
    )


def _qwen_ids(tokenizer: Any) -> dict[str, Any]:
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _qwen3_vision(initializer_range: float) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": initializer_range,
    }


def _qwen3_processor(tokenizer: Any) -> Any:
    """Patches of 8 x 8, four of them a token."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=8, merge_size=2),
        chat_template=QWEN_TEMPLATE,
    )


def qwen3_vl(spread: float) -> tuple[Any, Callable[[], Any]]:
    """4 tokens for an image of 32 x 32."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=text_config(tokenizer, spread, head_dim=32, rope_parameters=rope),
        vision_config=_qwen3_vision(spread),
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )

    return Qwen3VLForConditionalGeneration(config), partial(_qwen3_processor, tokenizer)


def qwen2_5_vl(spread: float) -> tuple[Any, Callable[[], Any]]:
    """One token for an image of 32 x 32 (28 x 28 after scaling)."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config(tokenizer, spread, rope_parameters=rope),
        vision_config=vision,
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )

    def processor() -> Any:
        return Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(
                patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=112 * 112
            ),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(patch_size=14, merge_size=2),
            chat_template=QWEN_TEMPLATE,
        )

    return Qwen2_5_VLForConditionalGeneration(config), processor


def qwen3_5(spread: float) -> tuple[Any, Callable[[], Any]]:
    """One layer of linear attention, with heads of 128 (engines take no 32), one of full attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = qwen_tokenizer()
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    text = text_config(
        tokenizer,
        spread,
        head_dim=32,
        rope_parameters=rope,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=4,
    )
    vision = _qwen3_vision(spread)
    del vision["deepstack_visual_indexes"]
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **_qwen_ids(tokenizer))

    return Qwen3_5ForConditionalGeneration(config), partial(_qwen3_processor, tokenizer)
