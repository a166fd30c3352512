"""Images in chat requests: read once, counted in full, part of the history; refused by name where they do not fit."""

import pytest

from support.agents_chat import Direct, Reader, chat_body, message
from support.agents_templates import PARTS


def image(url):
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return {"role": "user", "content": parts}


def test_s05_an_image_to_a_model_of_texts():
    with Direct(["x"], template=PARTS) as direct:
        reply = direct.post(chat_body(messages=[message("a"), message("b", "assistant"), image("data:1")]))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[2].content[0]")
    assert error["message"] == "messages[2].content[0] is an image, and the policy is a model of texts"


def test_another_image_at_the_same_place_is_another_branch():
    with Direct(["one", "two", "three"], template=PARTS, image_reader=Reader()) as direct:
        reply = direct.say([image("data:1")])
        direct.say([image("data:2"), reply, message("b")])
        direct.say([image("data:1"), reply, message("b")])
        assert [b.recorder.images for b in direct.session.branches] == [[b"data:1"], [b"data:2"]]
        assert [len(b.recorder.turns) for b in direct.session.branches] == [2, 1]
        assert direct.session.template_breaks == 0


def test_an_image_is_read_once_in_a_session():
    reader = Reader()
    with Direct(["one", "two"], template=PARTS, image_reader=reader) as direct:
        messages = [image("data:1")]
        messages += [direct.say(messages), image("data:2")]
        direct.say(messages)
        assert reader.reads == 2
        assert direct.session.branches[0].recorder.images == [b"data:1", b"data:2"]


BAD_IMAGES = {
    "unreadable": (PARTS, image("ftp://x"), "an image of the messages cannot be read: no image at 'ftp://x'"),
    "no place": (PARTS.replace("<|image|>", ""), image("data:1"), "0 image placeholders (token 266) but 1 images"),
    "a place too many": (PARTS, message("<|image|>"), "1 image placeholders (token 266) but 0 images"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_images_that_do_not_fit_are_a_400(name):
    template, asked, text = BAD_IMAGES[name]
    with Direct(["x"], template=template, image_reader=Reader()) as direct:
        reply = direct.post(chat_body(messages=[asked]))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(text)
    assert not direct.session.branches


def test_images_count_with_all_their_tokens():
    with Direct([[1] * 50], template=PARTS, image_reader=Reader(), max_length=60) as direct:
        usage = direct.post(chat_body(messages=[image("data:1")])).json()["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 60
