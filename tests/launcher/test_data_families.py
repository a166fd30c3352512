"""Chat templates of model families × shapes of conversations: what is trained on are the turns with their ends."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from openrlhf.agents.chat import render as chat_server
from openrlhf.agents.chat.messages import read_messages
from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.data.chat import ChatRenderer
from support.chat_families import FAMILIES
from support.chat_family import Family
from support.chat_sweep import SHAPES, TOOL, Outcome, family_tokenizer, sweep

FAST = ("qwen3", "llama-3.2-vision", "mistral-v3", "deepseek-r1", "glm-4.5", "harmony", "phi-3", "smolvlm", "falcon-3")
CALLS = ("call-object", "call-text", "call-null", "results")
LETTERS = {"exact": "+", "warned": "w", "refused": "r", "WRONG": "X"}


def outcomes(family: Family) -> dict[str, Outcome]:
    return sweep(family_tokenizer(family.template(), bos=family.bos or "<s>", eos=family.eos, special=family.special))


def expected(name: str, family: Family) -> dict[str, str]:
    """What a template that the family describes can do with every shape."""
    words = dict.fromkeys(SHAPES, "exact")
    if family.system == "":
        words["system"] = "refused"
    if not family.call or name == "kimi-k2":  # writes a call's id instead of its name, and only its own ids hold that
        words |= dict.fromkeys(CALLS, "refused")
    if family.think not in ("field", "last"):
        words["reasoning"] = "warned"
    if family.alternate:
        words["continued"] = "refused"
    return words


def test_there_are_60_different_templates() -> None:
    assert len({family.template() for family in FAMILIES.values()}) >= 60


@pytest.mark.parametrize("name", FAST)
def test_t01_t02_t03_t04_t05_t10_families(name: str) -> None:
    found = outcomes(FAMILIES[name])
    assert {shape: o.word for shape, o in found.items()} == expected(name, FAMILIES[name]), found


@pytest.mark.parametrize("name", FAST)
def test_the_chat_server_writes_a_conversation_as_the_data_readers_do(name: str) -> None:
    """So a model that was tuned on conversations meets the same tokens in RL."""
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family.template(), bos=family.bos or "<s>", eos=family.eos, special=family.special)
    data, chat = ChatRenderer(tokenizer, apply_chat_template=True), chat_server.ChatRenderer(tokenizer)
    same = 0
    for shape in SHAPES.values():
        tools = [TOOL] if any(m.get("tool_calls") for m in shape) else None
        try:
            expected = data.chat.write(data.messages(shape), tools, answer_next=False)
        except PromptError:
            continue
        messages = read_messages(shape).messages
        assert chat.render(messages, tools, ending=chat_server.Ending.CLOSED) == expected
        same += 1
    assert same >= 4


@pytest.mark.proof
def test_every_family_trains_the_texts_of_its_turns_with_their_ends() -> None:
    table = [" " * 20 + " ".join(f"{shape:11}" for shape in SHAPES)]
    wrong: list[str] = []
    for name, family in FAMILIES.items():
        found = outcomes(family)
        table.append(f"{name:20}" + " ".join(f"{o.word:11}" for o in found.values()))
        want = expected(name, family)
        wrong += [f"{name}, {s}: {o.word} {o.detail}" for s, o in found.items() if o.word != want[s]]
    print("\n".join(table))
    assert wrong == []


def stored_templates() -> list[Path]:
    """Those that vLLM ships, and those of the folder OPENRLHF_CHAT_TEMPLATES where it is set."""
    spec = find_spec("vllm")
    shipped = Path(spec.origin).parent if spec is not None and spec.origin else None
    folders = (
        [shipped, Path(os.environ["OPENRLHF_CHAT_TEMPLATES"])] if "OPENRLHF_CHAT_TEMPLATES" in os.environ else [shipped]
    )
    return sorted(p for folder in folders if folder is not None for p in folder.rglob("*.jinja"))


@pytest.mark.proof
def test_stored_templates_train_no_wrong_text() -> None:
    """Whatever a template is made for: every shape is exact, warned about or refused with a reason."""
    seen: set[str] = set()
    wrong: list[str] = []
    for path in stored_templates():
        text = path.read_text()
        if text in seen:
            continue
        seen.add(text)
        found = sweep(family_tokenizer(text))
        print(f"{path.stem:60}" + " ".join(LETTERS[o.word] for o in found.values()))
        wrong += [f"{path.stem}, {s}: {o.detail}" for s, o in found.items() if o.word == "WRONG"]
        assert all(o.detail for o in found.values() if o.word == "refused")
    print(f"{len(seen)} templates")
    assert seen
    assert wrong == []
