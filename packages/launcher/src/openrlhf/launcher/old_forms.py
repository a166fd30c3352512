"""Old flags of RL training that became more than another name: lengths are now a sum, switches are a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openrlhf.launcher.words import Word, shell_arithmetic

PROMPT, RESPONSE = "prompt_max_len", "generate_max_len"
THRESHOLD = "vllm_is_truncated_threshold"
"""Once one value, the upper bound; then two."""
OLD_LENGTH = "1024"
"""What either length was when it was not given."""
_SUM = f"--data.max_len, which holds prompt and response together: --{PROMPT} plus --{RESPONSE}"
_CORRECTION = "--algo.advantage.is_correction_enable"
_TYPE = "--algo.advantage.is_correction_type"

FORMS: Mapping[str, str] = {
    PROMPT: _SUM,
    RESPONSE: f"--rollout.max_new_tokens, and a part of {_SUM}",
    "use_kl_estimator_k3": "--algo.kl.estimator k3",
    "use_kl_estimator_k2": "--algo.kl.estimator k2",
    "vllm_enable_is_correction": _CORRECTION,
    "enable_is_correction": _CORRECTION,
    "use_vllm_is_correction": _CORRECTION,
    "use_tis": f"{_CORRECTION} {_TYPE} tis",
    "use_icepop": f"{_CORRECTION} {_TYPE} icepop",
    "enable_icepop": f"{_CORRECTION} {_TYPE} icepop",
    "use_seq_mask_tis": f"{_CORRECTION} {_TYPE} seq-mask-tis",
}
"""Old flag -> what it is now, in words or as the flags to write."""


def in_new_form(words: Sequence[Word]) -> list[Word]:
    """The words with the flags of FORMS in their new form; all others as they are."""
    given = {word.name: word for word in words}
    found: list[Word] = []
    for word in words:
        if word.name in (PROMPT, RESPONSE):
            if word is next(w for w in words if w.name in (PROMPT, RESPONSE)):
                found += _lengths(given)
        elif word.name == THRESHOLD and len(word.values) == 1:
            found.append(Word(word.name, ("0", *word.values)))
        elif word.name in FORMS:
            found += _as_words(FORMS[word.name])
        else:
            found.append(word)
    return found


def _lengths(given: Mapping[str, Word]) -> list[Word]:
    prompt, response = (" ".join(given[name].values) if name in given else OLD_LENGTH for name in (PROMPT, RESPONSE))
    new = [Word("rollout.max_new_tokens", (response,))] if "max_new_tokens" not in given else []
    if "max_len" in given or "data.max_len" in given:
        return new
    return [Word("data.max_len", (_sum(prompt, response),)), *new]


def _sum(first: str, second: str) -> str:
    if first.isdigit() and second.isdigit():
        return str(int(first) + int(second))
    return f"$(({shell_arithmetic(first)} + {shell_arithmetic(second)}))"


def _as_words(text: str) -> list[Word]:
    words: list[Word] = []
    for part in text.split():
        if part.startswith("--"):
            words.append(Word(part[2:]))
        else:
            words[-1] = Word(words[-1].name, (*words[-1].values, part))
    return words
