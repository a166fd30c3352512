"""Whether two models mean the same by the same token ids: critics, reward models and references read another's ids.

Compared before anything starts: every token of the vocabulary, special tokens by name, and the ids of a set of texts
(two vocabularies may agree and still cut texts differently). Roles such as "end of sequence" may differ: a base model
and its chat model read each other's ids.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from openrlhf.launcher.tokenizers import load_tokenizer

log = logging.getLogger(__name__)

PROBES = (
    "The answer is 42, isn't it?",
    "  two blanks,\ttab\n\nand a line",
    "3.14159 + 1e-5 = 1,000,000",
    "def f(x):\n    return {'a': [x, None]}  # ok",
    "\\boxed{\\frac{1}{2}} \u2264 \u221a2 \u2260 \u00bd",
    "\u00dcber na\u00efve caf\u00e9s \u2013 \u201cquoted\u201d",
    "\u6570\u5b66\u306e\u554f\u984c \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f4bb \U0001f600",
    "<think>\nHm.\n</think>\n<tool_call>{}</tool_call>",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
SHOWN = 3
SHOWN_IDS = 8


def check_same_tokens(tokenizer: Any, *, of: str, flag: str, model: str, sizes: tuple[int, int], way_out: str) -> None:
    """ValueError that says what differs, unless `model` (given by `flag`) reads ids of `tokenizer` as it means them.

    of: flag and name of the model that the tokenizer belongs to. sizes: `vocab_size` of that model and of the other.
    way_out: what to do where they differ. A model without a tokenizer is taken to read these ids, with a warning, if
    its vocabulary has the same size.
    """
    own = 1 + max(tokenizer.get_vocab().values())
    found: list[str] = []
    if not has_tokenizer(model):
        if sizes[0] == sizes[1]:
            log.warning("%s %r has no tokenizer to compare: it is taken to be that of %s", flag, model, of)
            return
        found.append(f"it has none, and its vocabulary has {sizes[1]} tokens instead of {sizes[0]}")
    else:
        found += differences(tokenizer, load_tokenizer(model, flag=flag))
        if sizes[1] < own:
            found.append(f"it has embeddings for {sizes[1]} tokens and gets ids up to {own - 1}")
    if found:
        raise ValueError(
            f"{flag} {model!r} is given token ids of {of}, and its tokenizer is another: {'; '.join(found)}. {way_out}"
        )
    if sizes[1] < sizes[0]:
        log.warning(
            "%s %r has embeddings for %d tokens, %s for %d: a sample with an id beyond them ends the run",
            flag,
            model,
            sizes[1],
            of,
            sizes[0],
        )


def has_tokenizer(model: str) -> bool:
    """Whether a model brings a tokenizer; True for a hub name."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES)


def differences(first: Any, second: Any) -> list[str]:
    """What a reader of `second`'s ids gets wrong in ids of `first`, in words: nothing where they agree."""
    known, special = second.get_vocab(), {*first.all_special_tokens, *first.get_added_vocab()}
    unused = {first.pad_token} - {first.eos_token, first.bos_token}  # never among the tokens of a sample
    wrong = {t: i for t, i in first.get_vocab().items() if t not in unused and known.get(t) != i}
    found = []
    for kind, tokens in (
        ("special tokens", [t for t in wrong if t in special]),
        ("tokens", [t for t in wrong if t not in special]),
    ):
        if tokens:
            shown = sorted(tokens, key=wrong.__getitem__)[:SHOWN]
            examples = ", ".join(f"{t!r} is {wrong[t]} and here {known.get(t, 'unknown')}" for t in shown)
            found.append(f"{len(tokens)} {kind} differ ({examples})")
    for text in PROBES:
        ids, others = (t.encode(text, add_special_tokens=False) for t in (first, second))
        if ids != others:
            found.append(f"the text {text!r} is {ids[:SHOWN_IDS]} and here {others[:SHOWN_IDS]}")
            break
    return found
