import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model import build_model, build_tokenizer, render_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(("tied", "parameters"), [(True, 123_648), (False, 140_352)])
def test_parameter_count(tied: bool, parameters: int) -> None:
    model = build_model(TOKENIZER, tied=tied)
    assert sum(p.numel() for p in model.parameters()) == parameters


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_prompt_is_thirteen_tokens_with_one_id_per_tag() -> None:
    text = render_prompt(TOKENIZER, "sort 60453")
    assert text == "<|user|>sort 60453<|end|><|assistant|>"
    ids = TOKENIZER.encode(text)
    assert len(ids) == 13
    assert (ids[0], ids[-2], ids[-1]) == (2, 1, 3)


def test_saved_model_and_tokenizer_reload(tmp_path) -> None:
    model = build_model(TOKENIZER)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert render_prompt(tokenizer, "hi") == render_prompt(TOKENIZER, "hi")
    ids = torch.tensor([tokenizer.encode("sort 60453")])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
