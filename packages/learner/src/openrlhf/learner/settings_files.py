"""The small files of an exported model: what training did not change is copied from the model as it came, byte by byte.

Loading and saving again would write what this process believes: padding on the left because a trainer wanted it, the
class names of one version of a library, or nothing at all, since some files that load are refused when saved.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

GENERATION = "generation_config.json"
TOKENIZER_CONFIG, TEMPLATE, OLD_TEMPLATE = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (
    TOKENIZER_CONFIG,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    TEMPLATE,
    OLD_TEMPLATE,
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""The files of a tokenizer or processor, besides those that its class names."""


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer or processor: the files that it was loaded from, and a chat template that was set since.

    One that was loaded from nowhere is saved as it is.
    """
    source = str(getattr(getattr(tokenizer, "tokenizer", tokenizer), "name_or_path", "") or "")
    names = {*TOKENIZER_FILES, *getattr(tokenizer, "vocab_files_names", {}).values()}
    found = {name: path for name in sorted(names) if (path := find_file(source, name)) is not None}
    if TOKENIZER_CONFIG not in found and "tokenizer.json" not in found:
        tokenizer.save_pretrained(str(folder))
        return
    for name, path in found.items():
        shutil.copyfile(path, folder / name)
    more = next(iter(found.values())).parent / MORE_TEMPLATES
    if more.is_dir():
        shutil.copytree(more, folder / MORE_TEMPLATES, copy_function=shutil.copyfile)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and template != _template(found):
        _set_template(folder, template)


def write_generation_config(source: str, folder: Path, own: Any = None) -> None:
    """The model's file as it came, also one that transformers would refuse to save.

    own: what transformers made of the model's other settings; written, unchecked, where the model has no such file.
    """
    (folder / GENERATION).unlink(missing_ok=True)
    if (path := find_file(source, GENERATION)) is not None:
        shutil.copyfile(path, folder / GENERATION)
    elif own is not None:
        own.to_json_file(folder / GENERATION)


def save_model(model: Any, folder: Path, *, source: str, state: dict[str, Any] | None = None) -> None:
    """`save_pretrained`, with the settings of generation as the model at `source` has them."""
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)
    if own is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(str(folder), **({} if state is None else {"state_dict": state}))
    finally:
        if own is not None:
            model.generation_config = own
    write_generation_config(source, folder, own)


def try_settings(model_path: str, tokenizer: Any, folder: Path) -> None:
    """Write all small files of the model; what cannot be saved is found without loading its weights."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(model_path).save_pretrained(str(folder))
    write_generation_config(model_path, folder)
    write_tokenizer(tokenizer, folder)


def find_file(source: str, name: str) -> Path | None:
    """A file of a model's folder, or of a hub model as far as this machine has it."""
    if not source:
        return None
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        source,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def _template(found: dict[str, Path]) -> str | None:
    """The chat template that the files hold."""
    if TEMPLATE in found:
        return found[TEMPLATE].read_text(encoding="utf-8")
    for name in (OLD_TEMPLATE, TOKENIZER_CONFIG):
        if name in found:
            template = json.loads(found[name].read_text(encoding="utf-8")).get("chat_template")
            if template is not None:
                return template
    return None


def _set_template(folder: Path, template: str) -> None:
    """In its own file, which is read first; copies elsewhere would say something else."""
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    (folder / OLD_TEMPLATE).unlink(missing_ok=True)
    path = folder / TOKENIZER_CONFIG
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("chat_template", None) is not None:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
