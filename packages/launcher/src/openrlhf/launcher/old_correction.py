"""The later spelling of the off-policy correction (level, mode, gating), mapped where it means the same."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.launcher.words import Word

PREFIX = "algo.advantage.is_correction_"
_DEFAULTS = {"level": "off", "mode": "mask", "gating": "ratio"}
_CHOICES = {
    "level": ("off", "token", "seq"),
    "mode": ("mask", "clip"),
    "gating": ("ratio", "binary_kl", "tv"),
}
_TYPES = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}


def translate_correction(words: Sequence[Word]) -> tuple[list[Word], list[str]]:
    """Replace `--algo.advantage.is_correction_{level,mode,gating}` by the flags that mean the same, or say why not.

    One threshold v means the range [0, v] in that spelling, and only there.
    """
    given = {w.name.removeprefix(PREFIX): w for w in words if w.name.removeprefix(PREFIX) in _DEFAULTS}
    given = {key: word for key, word in given.items() if word.name.startswith(PREFIX)}
    if not given:
        return list(words), []
    if problems := _wrong_values(given) + _mixed(words):
        return [w for w in words if w not in given.values()], problems
    level, mode, gating = (given[key].values[0] if key in given else _DEFAULTS[key] for key in _DEFAULTS)
    kept = [_two_thresholds(w) for w in words if w not in given.values()]
    if level == "off":
        return kept, []
    if gating != "ratio":
        return kept, [f"--{PREFIX}gating {gating!r} is not built; ratio is"]
    if (level, mode) not in _TYPES:
        return kept, [f"--{PREFIX}mode {mode!r} with --{PREFIX}level {level!r} has no meaning; use level token"]
    return [*kept, Word(PREFIX + "enable"), Word(PREFIX + "type", (_TYPES[level, mode],))], []


def _wrong_values(given: dict[str, Word]) -> list[str]:
    problems = []
    for key, word in given.items():
        if len(word.values) != 1 or word.values[0] not in _CHOICES[key]:
            got = " ".join(word.values)
            problems.append(f"--{word.name} takes one of {', '.join(_CHOICES[key])}, got {got!r}")
    return problems


def _mixed(words: Sequence[Word]) -> list[str]:
    old = [w.name for w in words if w.name in (PREFIX + "enable", PREFIX + "type")]
    return [f"--{name} and --{PREFIX}level are two spellings of one choice: keep one" for name in old]


def _two_thresholds(word: Word) -> Word:
    single = word.name == PREFIX + "threshold" and len(word.values) == 1
    return Word(word.name, ("0", *word.values)) if single else word
