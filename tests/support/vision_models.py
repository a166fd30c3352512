"""Tiny vision-language models for tests, random, built on the spot: `tiny_vision(family, path)`.

Language models have head_dim 32: vLLM's CPU attention takes no 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE, VIDEO, VISION_START, VISION_END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", VISION_START, VISION_END, IMAGE, VIDEO)
END = "<|im_end|>"

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As LLaVA's: only lists of parts, images first.
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() }}: "
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def vision_tokenizer(special: tuple[str, ...] = SPECIAL, names: dict[str, str] | None = None) -> Any:
    """Byte-level, without merges: pad 0, end of sequence 2."""
    from transformers import PreTrainedTokenizerFast

    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=special[0],
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        extra_special_tokens={"start_token": "<|im_start|>", **(names or {})},
    )


def qwen_tokenizer() -> Any:
    """With the names by which Qwen's processors find their tokens."""
    return vision_tokenizer(
        names={
            "image_token": IMAGE,
            "video_token": VIDEO,
            "vision_start_token": VISION_START,
            "vision_end_token": VISION_END,
        }
    )


def _text(tokenizer: Any, initializer_range: float, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": initializer_range,
        **changes,
    }


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
        text_config=_text(tokenizer, spread, head_dim=32, rope_parameters=rope),
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
        text_config=_text(tokenizer, spread, rope_parameters=rope),
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
    text = _text(
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
    text = LlamaConfig(**_text(tokenizer, spread, head_dim=32, tie_word_embeddings=False))
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


FAMILIES: dict[str, Callable[[float], tuple[Any, Callable[[], Any]]]] = {
    "qwen3_vl": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_5,
    "llava": llava,
}


def vision_model(family: str, seed: int = 0) -> Any:
    """A random fp32 model of a family, without its processor, which may need torchvision."""
    return _build(family, seed, 0.1)[0]


def _build(family: str, seed: int, initializer_range: float) -> tuple[Any, Callable[[], Any]]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model, processor = FAMILIES[family](initializer_range)
    torch.set_rng_state(state)
    return model.float(), processor


def tiny_vision(family: str, path: str | Path, seed: int = 0, initializer_range: float = 0.1) -> str:
    """Save a random fp32 model of a family with its processor under `path`; returns the path as a string.

    The wide initialisation gives distributions that are far from uniform and see the image.
    """
    model, processor = _build(family, seed, initializer_range)
    model.save_pretrained(path)
    processor().save_pretrained(path)
    if family == "llava":
        _old_tower_names(Path(path))
    return str(path)


def _old_tower_names(folder: Path) -> None:
    """The names of released checkpoints, which engines read; transformers 5 writes the tower without `vision_model`."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model.") if "vision_model" not in name else name: tensor
        for name, tensor in load_file(file).items()
        if "vision_tower." in name
    }
    others = {name: tensor for name, tensor in load_file(file).items() if "vision_tower." not in name}
    save_file({**weights, **others}, file, {"format": "pt"})


def image_file(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> str:
    """A PNG of one colour; returns its path."""
    from PIL import Image

    Image.new("RGB", size, colour).save(path)
    return str(path)
