"""What a vision-language model brings: detection, image tokens, tensors, and options that do not fit it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.preflight import check_vision, prepare
from openrlhf.launcher.ranks.images import image_probe, image_rows
from openrlhf.launcher.vision import ImageProcessor, find_vision
from support.tiny_models import tiny_qwen3
from support.vision_models import EACH_PROCESSOR, WITH_PROCESSOR, tiny_vision

SUPPRESSED = {"llava": (3,), "internvl": (5,), "smolvlm": (3,)}  # the others': start, end, image, video


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"text": tiny_qwen3(folder / "text"), **{f: tiny_vision(f, folder / f) for f in WITH_PROCESSOR}}


def png(colour: str, size: tuple[int, int]) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def config(model: str, **flags: Any) -> TrainPPOConfig:
    return build(TrainPPOConfig(), {"actor.model_name_or_path": model, **flags})


@pytest.mark.parametrize("family", EACH_PROCESSOR)
def test_vision_is_found_by_the_configuration(models: dict[str, str], family: str) -> None:
    vision = find_vision(models[family])
    assert vision is not None
    assert vision.suppressed == SUPPRESSED.get(family, (3, 4, 5, 6))
    assert vision.linear_attention == (family == "qwen3_5")


def test_a_text_model_has_no_vision(models: dict[str, str]) -> None:
    assert find_vision(models["text"]) is None


@pytest.mark.parametrize("family", EACH_PROCESSOR)
def test_images_one_by_one_equal_the_processor_on_the_whole_prompt(models: dict[str, str], family: str) -> None:
    reader = ImageProcessor(models[family])
    images = [png("red", (32, 32)), png("blue", (48, 32))]
    text = f"a{reader.token}b{reader.token}c"
    pictures = [Image.open(BytesIO(i)) for i in images]
    whole = reader._processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
    encode = reader._processor.tokenizer.encode
    tokens = [t for part, i in zip("ab", images, strict=True) for t in (*encode(part), *reader.tokens(i))]
    assert [*tokens, *encode("c")] == whole["input_ids"][0].tolist()
    extra = image_rows([images, []], reader)
    assert extra is not None
    for name, (joined, nothing) in extra.items():
        want = whole[name].transpose(0, 1) if family == "smolvlm" else whole[name]  # [1, tiles, ...]
        torch.testing.assert_close(joined, want, rtol=0, atol=0)
        assert nothing is None


def test_the_probe_is_a_row_with_one_image(models: dict[str, str]) -> None:
    probe = image_probe(ImageProcessor(models["qwen3_vl"]))
    assert int((probe.tokens == 5).sum()) == 16  # 64 x 64 pixels in squares of 16
    assert probe.action_mask.tolist() == [[False] * 16 + [True]]


@pytest.mark.parametrize("flag", ["data.max_images_per_prompt", "actor.freeze_visual_encoder"])
def test_image_flags_need_a_vision_model(models: dict[str, str], flag: str) -> None:
    with pytest.raises(ValueError, match=rf"--{flag}.*is no vision-language model"):
        check_vision(config(models["text"], **{flag: True}), models["text"])


def test_linear_attention_wants_no_flash_attention(models: dict[str, str]) -> None:
    flags = {"ds.attn_implementation": "flash_attention_2"}
    with pytest.raises(ValueError, match=r"linear attention layers.*use --ds\.attn_implementation eager"):
        check_vision(config(models["qwen3_5"], **flags), models["qwen3_5"])
    assert check_vision(config(models["qwen3_vl"], **flags), models["qwen3_vl"]) is not None


def test_images_whose_tokens_see_each_other_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--data\.max_images_per_prompt 1: .* both directions"):
        check_vision(config(str(tmp_path), **{"data.max_images_per_prompt": 1}), str(tmp_path))
    assert check_vision(config(str(tmp_path)), str(tmp_path)) is not None


def test_preflight_renders_with_the_processors_template(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png("red", (32, 32)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "<image>What?", "images": ["red.png"]}\n')
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n")
    flags = {
        "reward.remote_url": str(tmp_path / "reward.py"),
        "data.prompt_dataset": str(rows),
        "data.input_key": "prompt",
        "data.apply_chat_template": True,
        "data.max_images_per_prompt": 1,
    }
    prepared = prepare(config(models["llava"], **flags))
    assert prepared.vision is not None
    assert prepared.prompts.item(0).prompt == "USER: <image>\nWhat?ASSISTANT: "
