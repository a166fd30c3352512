"""Images of data rows: every form they come in, places in the text, and errors that name the row."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from openrlhf.launcher.config import DataConfig
from openrlhf.launcher.data.images import inline_images, read_image
from openrlhf.launcher.data.prompts import PromptDataset, load_prompts
from openrlhf.launcher.proxies import ProxiedTransport
from openrlhf.rollout.images import decode_image
from support.launcher_tokenizer import byte_tokenizer
from support.vision_qwen import QWEN_TEMPLATE
from support.vision_towers import LLAVA_TEMPLATE

TOKEN = "<|image_pad|>"


def png(colour: str = "red", size: tuple[int, int] = (4, 3)) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(png())
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (tmp_path / "broken.png").write_bytes(png("green", (64, 64))[:60])
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


def load(folder: Path, *rows: Any, template: str | None = QWEN_TEMPLATE, **options: Any) -> PromptDataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    chat = template is not None
    values = {"input_key": "prompt", "apply_chat_template": chat, "max_images_per_prompt": 2, **options}
    return load_prompts(DataConfig(prompt_dataset=str(path), **values), tokenizer, image_token=TOKEN)


def part_row(count: int, images: Any, text: str = "Find x.") -> dict[str, Any]:
    content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": content}], "images": images, "label": "3"}


@pytest.mark.parametrize("form", ["path", "relative", "file", "data", "base64", "bytes", "pil", "column", "url object"])
def test_every_form_gives_the_same_picture(folder: Path, form: str) -> None:
    text = base64.b64encode(png()).decode()
    values: dict[str, Any] = {
        "path": str(folder / "red.png"),
        "relative": "red.png",
        "file": f"file://{folder / 'red.png'}",
        "data": f"data:image/png;base64,{text}",
        "base64": text,
        "bytes": png(),
        "pil": Image.new("RGB", (4, 3), "red"),
        "column": {"bytes": png(), "path": None},
        "url object": {"url": f"data:image/png;base64,{text}"},
    }
    picture = decode_image(read_image(values[form], folder))
    assert (picture.size, picture.mode, picture.getpixel((0, 0))) == ((4, 3), "RGB", (255, 0, 0))


def test_a_url_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: ProxiedTransport, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/red.png" else 404, content=png())

    monkeypatch.setattr(ProxiedTransport, "handle_request", answer)
    assert read_image("https://host/red.png") == png()
    with pytest.raises(ValueError, match=r"image 'https://host/gone\.png' could not be fetched: HTTP 404 Not Found"):
        read_image("https://host/gone.png")


def test_transparency_lies_on_white_and_pictures_stand_upright() -> None:
    out = BytesIO()
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(out, "PNG")
    assert decode_image(out.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    turned = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    Image.new("RGB", (4, 2)).save(turned, "JPEG", exif=exif)
    assert decode_image(turned.getvalue()).size == (2, 4)


@pytest.mark.parametrize("value", [3, "", None, {"x": 1}])
def test_no_image_at_all(value: Any) -> None:
    with pytest.raises(ValueError, match="expected an image"):
        read_image(value)


def test_guide_row(folder: Path) -> None:
    item = load(folder, part_row(1, [str(folder / "red.png")]), label_key="label").item(0)
    assert item.images == (png(),)
    assert item.prompt == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Find x.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert item.label == "3"


def test_tags_in_the_text_are_places(folder: Path) -> None:
    row = {"prompt": "first <image> then <image>.", "images": ["red.png", "blue.png"]}
    item = load(folder, row).item(0)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"first {place} then {place}." in item.prompt
    assert item.images == (png(), png("blue"))


def test_a_tag_without_images_stays_text(folder: Path) -> None:
    item = load(folder, {"prompt": "the tag <image> alone"}).item(0)
    assert "the tag <image> alone" in item.prompt
    assert item.images == ()


def test_plain_prompts_have_the_models_own_token(folder: Path) -> None:
    rows = [{"prompt": "<image>x", "images": "red.png"}, {"prompt": f"{TOKEN}y", "images": ["blue.png"]}]
    assert [i.prompt for i in load(folder, *rows, template=None).items()] == [f"{TOKEN}x", f"{TOKEN}y"]


def test_a_template_of_parts_gets_parts(folder: Path) -> None:
    template = LLAVA_TEMPLATE.replace("<image>", TOKEN)
    rows = [{"prompt": "Hello."}, {"prompt": "<image>What?", "images": ["red.png"]}]
    assert [i.prompt for i in load(folder, *rows, template=template).items()] == [
        "USER: Hello.ASSISTANT: ",
        f"USER: {TOKEN}\nWhat?ASSISTANT: ",
    ]


def test_parts_may_carry_their_images(folder: Path) -> None:
    url = {"url": "data:image/png;base64," + base64.b64encode(png("blue")).decode()}
    content = [{"type": "image", "image": "red.png"}, {"type": "image_url", "image_url": url}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}]
    assert inline_images(messages) == ["red.png", url]
    item = load(folder, {"prompt": messages}).item(0)
    assert item.images == (png(), png("blue"))
    assert item.prompt.count(TOKEN) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (part_row(1, ["red.png", "blue.png"]), r"line 2, field 'prompt': 1 places for 2 images: write <image>"),
        (part_row(2, ["red.png"]), r"line 2, field 'prompt': 2 places for 1 images"),
        (part_row(1, []), r"line 2, field 'prompt': 1 places for 0 images"),
        (part_row(3, ["red.png"] * 3), r"line 2, field 'images': 3 images .* --data\.max_images_per_prompt is 2"),
        (part_row(1, ["gone.png"]), r"line 2, field 'images': image 'gone\.png' not found; looked for .*gone\.png"),
        (part_row(1, ["text.png"]), r"line 2, field 'images': image 'text\.png' is no image file"),
        (part_row(1, [7]), r"line 2, field 'images': expected an image .* got int: 7"),
        ({"prompt": f"typed {TOKEN}"}, r"line 2, field 'prompt': 1 places for 0 images"),
    ],
)
def test_bad_rows_are_named(folder: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {message}"):
        load(folder, part_row(1, ["red.png"]), row)


def test_a_picture_that_breaks_off_is_named_when_it_is_drawn(folder: Path) -> None:
    data = load(folder, part_row(1, ["red.png"]), part_row(1, ["broken.png"]))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, field 'images': image 'broken\.png' can't be decoded"):
        data.item(1)


def test_text_only_refuses_rows_with_images(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"1 images .*, but --data\.max_images_per_prompt is 0"):
        load(folder, part_row(1, ["red.png"]), max_images_per_prompt=0)


def test_image_columns_of_a_table(folder: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "pictures": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = {"pictures": [[{"bytes": png(), "path": None}]], "problem": ["<image>Find x."], "answer": ["3"]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "geometry.parquet")
    data = DataConfig(
        prompt_dataset=str(folder / "geometry.parquet"),
        input_key="problem",
        label_key="answer",
        image_key="pictures",
        apply_chat_template=True,
        max_images_per_prompt=1,
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN_TEMPLATE
    item = load_prompts(data, tokenizer, image_token=TOKEN).item(0)
    assert item.images == (png(),)
    assert item.label == "3"
    assert "<|image_pad|><|vision_end|>Find x." in item.prompt
