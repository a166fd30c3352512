"""The small files of an exported model are those that the model came with."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.learner.config import DsConfig
from openrlhf.learner.export import export_hf
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.settings_files import try_settings, write_tokenizer
from openrlhf.learner.spec import LearnerSpec, Role
from support.plain_backend import PlainEngine
from support.tiny_models import tiny_qwen3

CPU = torch.device("cpu")
REFUSED = {"temperature": 0.6, "top_p": 0.95, "do_sample": False, "eos_token_id": [1], "_from_model_config": False}
"""Settings of generation that transformers loads and refuses to save."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_qwen3(tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def load(path: Path) -> LearnerModule:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
    return load_module(LearnerSpec(role=Role.POLICY, model_path=str(path), ds=ds), CPU)


def export(model: Path, out: Path, tokenizer: Any = None, *, trial: bool = False) -> None:
    export_hf(PlainEngine(load(model)), str(out), tokenizer, source=str(model), trial=trial)


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def test_x03_settings_of_generation_that_cannot_be_saved_are_exported_as_they_came(model: Path, tmp_path: Path) -> None:
    file = model / "generation_config.json"
    file.write_text(json.dumps(REFUSED))
    with pytest.raises(ValueError, match="generation"):
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "plain")
    for trial in (True, False):
        export(model, tmp_path / "out", trial=trial)
        assert (tmp_path / "out").exists() is not trial
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == file.read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in load(model).model.state_dict().items())


def test_x03_settings_of_generation_in_the_model_s_own_configuration(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").unlink(missing_ok=True)
    change(model / "config.json", temperature=0.7, top_k=20)  # without do_sample: transformers saves neither
    with pytest.raises(ValueError, match="generation"):
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "plain")
    export(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert again is not None
    assert (again.temperature, again.top_k) == (0.7, 20)


def test_x03_what_cannot_be_saved_is_found_without_a_model(model: Path, tmp_path: Path) -> None:
    class Broken:
        name_or_path = ""

        def save_pretrained(self, folder: str) -> None:
            raise ValueError("this tokenizer cannot be saved")

    with pytest.raises(ValueError, match="cannot be saved"):
        try_settings(str(model), Broken(), tmp_path)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_x06_the_tokenizer_is_as_the_model_brought_it(model: Path, tmp_path: Path, side: str | None) -> None:
    content = json.loads((model / "tokenizer_config.json").read_text())
    content.pop("padding_side", None)
    (model / "tokenizer_config.json").write_text(json.dumps(content | ({"padding_side": side} if side else {})))
    (model / "vocab.json").write_text("{}")  # what another program wants; no loader here reads it
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")  # as the trainers load it
    export(model, tmp_path / "out", tokenizer)
    names = {p.name for p in model.iterdir()}
    assert {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_x06_a_chat_template_that_was_given_goes_along(model: Path, tmp_path: Path) -> None:
    change(model / "tokenizer_config.json", chat_template="{{ messages[0]['content'] }}")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    write_tokenizer(tokenizer, tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_bytes() == (model / "tokenizer_config.json").read_bytes()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}!"
    write_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == "{{ messages[-1]['content'] }}!"
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_x07_everybody_may_read_the_weights(model: Path, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        export(model, tmp_path / "out", AutoTokenizer.from_pretrained(model))
    finally:
        os.umask(old)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o644}, modes
