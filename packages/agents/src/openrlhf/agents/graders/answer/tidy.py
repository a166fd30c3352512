"""Makes an answer uniform: one spelling for what LaTeX writes in many ways, units and decoration taken away.

Text in `\\text{}` and its like is a unit only behind a value and only where its words can be one; else it becomes a
connective, a symbol, a function or a word of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from openrlhf.agents.graders.answer.units import canonical, is_known_unit, is_unit

ROW = "\ue000"  # stands for the separator of rows, `\\`, which no later step may take for a space
UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ", "∪": r"\cup ",
    "∅": r"\varnothing ", "∈": r"\in ", "²": "^2", "³": "^3", "√": r"\sqrt ", "ℝ": r"\mathbb{R}", "∖": r"\setminus ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "½": r"\frac{1}{2}", "⁄": "/", "’": "'",
    "\u00a0": " ", "\u2009": " ", "，": ", ", "（": "(", "）": ")", "：": ":", "…": r"\ldots ",
}  # fmt: skip
SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "geq": "ge", "leq": "le",
    "geqslant": "ge", "leqslant": "le", "neq": "ne", "lt": "<", "gt": ">", "lvert": "|", "rvert": "|", "vert": "|",
    "mid": "|", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "emptyset": "varnothing",
    "backslash": "setminus", "ast": "cdot", "cdotp": "cdot", "imath": "i", "lor": "or", "vee": "or", "land": "and",
    "wedge": "and", "dots": "ldots", "cdots": "ldots", "arcsec": "asec", "lg": "log_{10}", "cr": ROW, "colon": ":",
    "bigcup": "cup", "R": r"mathbb{R}", "reals": "mathbb{R}", "Re": "re", "Im": "im", "equiv": "=", "approx": "=",
    "ge": "ge", "le": "le", "ne": "ne", "thinspace": " ", "quad": " ", "qquad": " ", "displaystyle": " ",
    "textstyle": " ", "limits": " ", "hfill": " ", "rm": " ", "bf": " ", "it": " ", "nonumber": " ", "strut": " ",
    "iff": "=", "rightarrow": "to", "varepsilon": "epsilon", "varphi": "phi", "arccot": "acot",
}  # fmt: skip
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "ln", "log",
    "exp", "gcd", "lcm", "max", "min",
}  # fmt: skip
WRAPPER = r"text|textbf|textrm|textit|textsf|texttt|textnormal|mbox|hbox|mathrm|mathsf|mathit|mathbf|mathtt"
TEXT = re.compile(rf"\\(?:{WRAPPER}|operatorname\*?|boldsymbol|bm)\s*\{{([^{{}}]*)\}}")
ATOM = r"\\text\{(?:[^{}]|\{[^{}]*\})*\}\s*(?:\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
PHRASE = rf"{ATOM}(?:\s*(?:\\cdot|\\times|/|\*)?\s*{ATOM})*"
UNIT = re.compile(rf"(?:/\s*)?(?:{PHRASE}|\\frac\s*\{{\s*{PHRASE}\s*\}}\s*\{{\s*{PHRASE}\s*\}})")
EXPONENT = re.compile(r"\}\s*\^\s*\{?\s*(-?\d+)")
BARE = re.compile(
    r"(?P<value>[\d)}\]]|\\pi)\s*(?P<words>[A-Za-z][A-Za-z.]*(?:\s+[A-Za-z]+|\s*/\s*[A-Za-z]+){0,4})"
    r"(?P<exponent>\s*\^\s*(?:\{\s*\d\s*\}|\d))?\s*$"
)
DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?:s)?(?![A-Za-z])")
DEGREES = re.compile(r"\\degree\s*(?:\\text\{\s*([CF])\s*\}|([CF])(?![A-Za-z]))")
TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
ORDINAL = re.compile(
    r"(\d)\s*(?:\^\s*)?(?:\{\s*)?(?:\\text\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?![A-Za-z]))\s*\}?"
)
NOON = re.compile(
    r"(?<=\d)\s*(?:\\text\{\s*([AaPp])\.?\s?[Mm]\.?\s*\}|(?<![A-Za-z])([AaPp])(?:\.\s?[Mm]\.?|[Mm](?![A-Za-z])))"
)
COUNTS = {
    "hundred": "100",
    "thousand": "10^3",
    "million": "10^6",
    "billion": "10^9",
    "trillion": "10^{12}",
    "dozen": "12",
}
COUNT = re.compile(rf"(?<=[\d}})])\s*(\\text\{{\s*)?(?<![A-Za-z])({'|'.join(COUNTS)})(?![A-Za-z])")
MODULO = re.compile(r"\(?\s*\\(?:pmod|bmod|mod|text\{\s*mod\s*\})\s*(?:\{\s*(\w+)\s*\}|(\w+))\s*\)?\s*$")
CHOOSE = re.compile(r"\{([^{}]*)\\choose([^{}]*)\}")
PERCENT = re.compile(r"(?:\\text\{\s*per ?cent\s*\}|(?<![A-Za-z])per ?cent(?![A-Za-z])|\\%)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tidy:
    """An answer in one spelling. units: those that were taken away and are known, in their order."""

    text: str
    units: tuple[tuple[tuple[str, int], ...], ...]


def tidy(text: str) -> Tidy:
    """The uniform spelling of an answer, without units, dollar signs, spacing and closing punctuation."""
    units: list[tuple[tuple[str, int], ...]] = []
    text = _commands(_characters(text))
    text = PERCENT.sub("%", text)
    text = re.sub(r"^\\text\{\s*(\d[^{}]*)\}$", r"\1", text.strip())  # \text{9:00 AM}
    text = ORDINAL.sub(r"\1", text)
    text = NOON.sub(lambda match: rf" \word{{{(match[1] or match[2]).lower()}m}} ", text)
    text = COUNT.sub(lambda match: rf" \times {COUNTS[match[2]]} {match[1] or ''}", text)
    text = CHOOSE.sub(r"\\binom{\1}{\2}", text)
    if "=" in text or r"\pmod" in text:  # a congruence; elsewhere mod is an operation
        text = MODULO.sub(lambda match: rf" \word{{mod {match[1] or match[2]}}}", text)
    if re.search(r"\\\$|(?:^|[\s(,{])\$\s*\d", text) and text.count("$") % 2 == 1:
        units.append((("dollar", 1),))
    text = text.replace("\\$", "").replace("$", "")
    text = DEGREE.sub(r"\\degree ", text)
    text = DEGREES.sub(r"\\text{ degrees \1\2} ", text)
    text = UNIT.sub(lambda match: _drop_unit(match, units), text)
    text = TEXT.sub(_word, text)
    text = text.strip().rstrip(".,;:").strip()
    text = BARE.sub(lambda match: _drop_bare(match, units), text)
    if not TRIGONOMETRY.search(text) and r"\degree" in text:
        units.append((("deg", 1),))
        text = text.replace(r"\degree", " ")
    return Tidy(" ".join(text.split()).rstrip(".,;:").strip(), tuple(units))


def _characters(text: str) -> str:
    for character, latex in UNICODE.items():
        text = text.replace(character, latex)
    if r"\begin" in text:
        text = re.sub(r"\\\\\s*(?:\[\s*-?[\d.]+\s*[a-z]{2}\s*\])?", ROW, text)
    else:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # doubly escaped commands
        text = text.replace("\\\\", " ")
    text = re.sub(r"(?<=\d)\s*\{,\}\s*(?=\d{3})|(?<=\d),\\!\s*(?=\d{3})|(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    return re.sub(r"\\[,;:! /]|~", " ", text.replace("\n", " ").replace("\t", " "))


def _commands(text: str) -> str:
    text = re.sub(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", "", text)
    text = re.sub(r"\\(?:hspace|vspace|phantom|label|tag)\*?\s*\{[^{}]*\}", " ", text)
    text = re.sub(rf"\\(?:{WRAPPER})(?=\s*\{{)", r"\\text", text)
    text = re.sub(r"\\text\s+\{", r"\\text{", text)
    text = re.sub(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}", text)
    return re.sub(r"\\([A-Za-z]+)", _same, text)


def _same(match: re.Match[str]) -> str:
    name = SAME.get(match[1])
    if name is None:
        return match[0]
    return f"\\{name}" if name[:1].isalpha() else name


def _drop_unit(match: re.Match[str], units: list[tuple[tuple[str, int], ...]]) -> str:
    before = match.string[: match.start()].rstrip()
    phrase = match[0]
    words = re.sub(r"\\frac\s*\{(.*)\}\s*\{(.*)\}$", r"\1 / \2", phrase)
    contents = re.findall(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}|(/)", words)
    spoken = " ".join(text or slash for text, slash in contents)
    if not (before[-1:].isalnum() or before[-1:] in tuple(")}]!%'")) or not is_unit(spoken):
        return phrase
    exponents = EXPONENT.findall(phrase)
    known = canonical(spoken, int(exponents[-1]) if exponents and len(contents) == 1 else 1)
    if known is not None and (not exponents or len(contents) == 1):
        units.append(known)
    return " "


def _drop_bare(match: re.Match[str], units: list[tuple[tuple[str, int], ...]]) -> str:
    """Words without `\\text{}` at the end: a unit if it is one of measurement, or whatever a plain number counts."""
    words = match["words"]
    letters = re.sub(r"[^A-Za-z]", "", words)
    plain = re.fullmatch(r"-?[\d.,\s/]*", match.string[: match.end("value")]) is not None
    counted = plain and len(letters) >= 4 and " " not in words and is_unit(words)
    command = match.string[: match.start("words")].endswith("\\")
    if command or len(letters) < 2 or not (counted or (is_unit(words) and is_known_unit(words))):
        return match[0]
    exponent = re.search(r"\d", match["exponent"] or "")
    known = canonical(words, int(exponent[0]) if exponent else 1)
    if known is not None:
        units.append(known)
    return match["value"]


def _word(match: re.Match[str]) -> str:
    """What text that is no unit stands for."""
    content = " ".join(match[1].split())
    low = content.lower().strip(" ,.;")
    if low in ("and", "or", "and/or"):
        return r" \or " if low == "or" else r" \and "
    if low in ("if", "for", "when", "where", "with", ""):
        return " "
    if content in FUNCTIONS:
        return f"\\{content} "
    if len(content) == 1 or re.fullmatch(r"[\d\s.,()A-Z]*", content):
        return f" {content} "
    for opening in ("if ", "for ", "when "):
        if low.startswith(opening):
            return f" {content[len(opening) :]} "
    return rf" \word{{{content}}} "
