"""A model that reads the actor's token ids has the actor's tokenizer: compared before anything starts."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.preflight import prepare
from openrlhf.launcher.same_tokens import differences
from openrlhf.launcher.signals import Warned
from openrlhf.launcher.supervised.session import run_session
from openrlhf.launcher.supervised_config import TrainDPOConfig
from support.tiny_models import byte_tokenizer, tiny_qwen3

CRITIC = {"algo.advantage.estimator": "gae", "reward.remote_url": "http://localhost:1/get_reward"}
REWARD = {"algo.advantage.estimator": "reinforce"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same_tokens")
    tiny_qwen3(folder / "actor")
    (folder / "prompts.jsonl").write_text(json.dumps({"input": "hi"}) + "\n")
    return folder


def model(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast | None, **config: Any) -> str:
    """A model like the actor, with another tokenizer (None: without one) or configuration."""
    path = folder / name
    shutil.copytree(folder / "actor", path, dirs_exist_ok=True)
    for file in path.glob("token*"):
        file.unlink()
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    return str(path)


def prepared(folder: Path, flag: str, other: str) -> None:
    flags: dict[str, Any] = {"actor.model_name_or_path": str(folder / "actor"), flag: other}
    flags |= {"data.prompt_dataset": str(folder / "prompts.jsonl"), "data.max_len": 64}
    prepare(build(TrainPPOConfig(), flags | (CRITIC if flag.startswith("critic") else REWARD)))


def changed(**swaps: str) -> PreTrainedTokenizerFast:
    """The actor's tokenizer with pairs of tokens in each other's places."""
    tokenizer = byte_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for first, second in swaps.items():
        vocabulary = state["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


@pytest.mark.parametrize("flag", ["critic.model_name_or_path", "reward.model_name_or_path"])
def test_l06_another_order_of_the_same_tokens_is_refused_with_what_differs(folder: Path, flag: str) -> None:
    other = model(folder, "swapped", changed(a="b"))
    with pytest.raises(ValueError, match=rf"--{flag} .*swapped' is given token ids of --actor") as caught:
        prepared(folder, flag, other)
    text = str(caught.value)
    a, b = (byte_tokenizer().get_vocab()[t] for t in "ab")
    assert f"2 tokens differ ('a' is {a} and here {b}, 'b' is {b} and here {a})" in text
    assert 'the text "The answer is 42, isn\'t it?" is [' in text
    assert ("serve_rm" in text) is flag.startswith("reward")


def test_l06_special_tokens_are_compared_by_name(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    path = folder / "with a tool"
    shutil.copytree(folder / "actor", path)
    tokenizer.save_pretrained(path)
    assert differences(tokenizer, byte_tokenizer()) == ["1 special tokens differ ('<|tool|>' is 261 and here unknown)"]
    assert differences(byte_tokenizer(), tokenizer) == []  # what the actor does not have it never samples


def test_l06_tokens_that_merge_differently_are_found_by_their_texts(folder: Path) -> None:
    state = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["he"] = 261
    merging = byte_tokenizer()
    merged = json.loads(json.dumps(state))
    merged["model"]["merges"] = [["h", "e"]]
    merging._tokenizer = Tokenizer.from_str(json.dumps(merged))
    plain = byte_tokenizer()
    plain._tokenizer = Tokenizer.from_str(json.dumps(state))
    (found,) = differences(merging, plain)
    assert found.startswith('the text "The answer is 42, isn\'t it?" is [')


@pytest.mark.parametrize("flag", ["critic.model_name_or_path", "reward.model_name_or_path"])
def test_l06_the_same_tokenizer_passes_whatever_its_roles_are(
    folder: Path, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = byte_tokenizer()
    other.eos_token, other.pad_token = "<|user|>", "<|end|>"
    with caplog.at_level(logging.WARNING):
        prepared(folder, flag, model(folder, "other roles", other))
        prepared(folder, flag, model(folder, "larger", byte_tokenizer(), vocab_size=512))
        prepared(folder, flag, str(folder / "actor"))
    assert not [r for r in caplog.records if "token" in r.message]


def test_l06_a_vocabulary_that_is_too_small_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="it has embeddings for 200 tokens and gets ids up to 260"):
        prepared(folder, "reward.model_name_or_path", model(folder, "small", byte_tokenizer(), vocab_size=200))


def test_l06_a_model_without_a_tokenizer_is_warned_about_or_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepared(folder, "reward.model_name_or_path", model(folder, "without", None))
    assert "without' has no tokenizer to compare: it is taken to be that of --actor.model_name_or_path" in caplog.text
    with pytest.raises(ValueError, match="it has none, and its vocabulary has 300 tokens instead of 261"):
        prepared(folder, "reward.model_name_or_path", model(folder, "without, larger", None, vocab_size=300))


def test_l06_a_tokenizer_of_another_kind(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"special tokens differ .*; 256 tokens differ "):
        prepared(folder, "critic.model_name_or_path", model(folder, "words", other))


def test_l06_a_reference_of_preference_training_is_compared_too(folder: Path) -> None:
    flags = {
        "model.model_name_or_path": str(folder / "actor"),
        "ref.model_name_or_path": model(folder, "swapped reference", changed(a="b")),
        "data.dataset": str(folder / "no data yet.jsonl"),
    }
    with pytest.raises(ValueError, match=r"--ref\.model_name_or_path .* given token ids of --model\."):
        run_session(build(TrainDPOConfig(), flags), Warned())
