"""The agent that shows a second picture."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.testing import run_episode
from openrlhf.launcher.data.images import read_image
from openrlhf.rollout.images import decode_image
from support.vision_qwen import IMAGE, qwen_tokenizer

AGENT = Path(__file__).parents[2] / "examples" / "python" / "vlm_multiturn_agent.py"
PROMPT = f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|>colour?<|im_end|>\n<|im_start|>assistant\n"


class Reader:
    """Four tokens for every picture."""

    placeholder = 5

    def read(self, image: Any) -> bytes:
        return read_image(image)

    def tokens(self, image: bytes) -> list[int]:
        return [5] * 4


def first_picture() -> bytes:
    out = BytesIO()
    Image.new("RGB", (32, 32), "red").save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("answers", "reward"), [(["red", "blue"], 1.0), (["red", "red"], 0.5), (["blue", "x"], 0.0)])
def test_two_pictures(answers: list[str], reward: float) -> None:
    tokenizer = qwen_tokenizer()
    script = [tokenizer.encode(f"{answer}<|im_end|>") for answer in answers]
    t = run_episode(
        load_executor(AGENT),
        script,
        PROMPT,
        label="red blue",
        images=[first_picture()],
        image_reader=Reader(),
        tokenizer=tokenizer,
    )
    assert not t.failed, t.failure
    assert t.reward == reward
    assert list(t.token_ids).count(5) == 8
    second = decode_image(t.images[1])
    red, green, blue = (sum(second.getchannel(c).tobytes()) / 1024 for c in "RGB")
    assert blue > 180 > 60 > max(red, green)
