"""Units of measurement: which words are units, and which of them mean the same."""

from __future__ import annotations

import re

# canonical name: spellings. Plurals in -s are understood; single letters count only inside \text{} behind a value.
SPELLINGS = {
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "week": "week", "month": "month",
    "year": "yr year", "g": "g gram gm", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb pound",
    "oz": "oz ounce", "ton": "ton tonne", "l": "L l liter litre", "ml": "mL ml milliliter millilitre",
    "gal": "gal gallon", "N": "N newton", "J": "J joule", "W": "W watt", "kW": "kW kilowatt", "V": "V volt",
    "A": "ampere amp", "ohm": "ohm", "K": "K kelvin", "Pa": "Pa pascal", "Hz": "Hz hertz", "mol": "mol mole",
    "deg": "deg degree", "rad": "rad radian", "dollar": "dollar usd", "cent": "cent", "euro": "euro eur",
    "unit": "unit", "mph": "mph", "acre": "acre", "hectare": "hectare ha", "bit": "bit", "byte": "byte",
    "degC": "C celsius", "degF": "F fahrenheit",
}  # fmt: skip
CANONICAL = {word: name for name, words in SPELLINGS.items() for word in words.split()}
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
# Words behind a number that are part of the answer.
NO_UNITS = {
    "am", "pm", "north", "south", "east", "west", "northeast", "northwest", "southeast", "southwest", "up", "down",
    "left", "right", "even", "odd", "prime", "true", "false", "yes", "no", "if", "for", "when", "where",
    "otherwise", "else", "and", "or", "mod", "base", "ad", "bc", "bce", "ce", "is", "are", "not", "than", "more",
    "less", "greater", "none", "choose", "remainder",
}  # fmt: skip
POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)")  # written inside \text{}
WORD = re.compile(r"[A-Za-zµμ]+")


def is_unit(words: str) -> bool:
    """Whether words that stand behind a value (`cm`, `miles per hour`, `apples`) only say of what it is a number."""
    words = POWER.sub("", words)
    found = WORD.findall(words.replace(".", ""))
    if not found or re.search(r"[\d=<>+]", words):
        return False
    if any(word.lower() in NO_UNITS for word in found):
        return False
    return all(len(word) > 1 or word in CANONICAL for word in found)


def is_known_unit(words: str) -> bool:
    """Whether it is a unit of measurement: needed where nothing but its place says that words are a unit."""
    found = WORD.findall(words.replace(".", ""))
    known = [w for w in found if _name(w) is not None or w.lower() in {*POWERS, "per", "us"}]
    return bool(found) and len(known) == len(found)


def canonical(words: str, exponent: int = 1) -> tuple[tuple[str, int], ...] | None:
    """The unit as sorted (name, exponent) pairs, equal for all ways to write it; None where it is not known.

    words: `miles per hour`, `m/s`, `square cm`; exponent: the one written behind the last word.
    """
    if "^" in words:
        return None
    powers: dict[str, int] = {}
    sign, pending, last = 1, 1, ""
    for word in re.findall(r"[A-Za-z]+|/", words.replace(".", "")):
        low = word.lower()
        if low in ("per", "/"):
            sign = -1
        elif low in POWERS and low.endswith("ed"):
            powers[last] = powers.get(last, 0) * POWERS[low]
        elif low in POWERS:
            pending = POWERS[low]
        elif (name := _name(word)) is not None:
            powers[name] = powers.get(name, 0) + sign * pending
            last, pending = name, 1
        elif low not in ("of", "us", "a", "an"):
            return None
    if last:
        powers[last] *= exponent
    return tuple(sorted((n, p) for n, p in powers.items() if p)) or None


def _name(word: str) -> str | None:
    if word in CANONICAL:
        return CANONICAL[word]
    low = word.lower()
    return next((CANONICAL[w] for w in (low, low.removesuffix("s"), low.removesuffix("es")) if w in CANONICAL), None)
