"""Math answers of every type of a competition set, in both directions, and what a hostile answer may cost."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openrlhf.agents.graders.answer import library
from openrlhf.agents.graders.answer.tokens import TooLargeError
from openrlhf.agents.graders.answer.values import MAX_STEPS, count, start_count
from openrlhf.agents.graders.math import extract_answer, grade_math, math_equal
from support.hostile_answers import HOSTILE

PAIRS_FILE = Path(__file__).parent / "math_pairs.txt"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A busy machine must not turn right into wrong."""
    monkeypatch.setattr(library, "SECONDS", 60.0)


def table():
    kind = ""
    for line in PAIRS_FILE.read_text(encoding="utf-8").splitlines():
        sign = next((s for s in (" == ", " != ") if s in line), None)
        if sign is None or line.startswith("#"):
            kind = line.strip("[]") or kind
            continue
        answer, label = line.split(sign)
        yield answer, label, sign == " == ", f"{kind}: {line}"


@pytest.mark.parametrize(("answer", "label", "equal"), [pytest.param(*row[:3], id=row[3]) for row in table()])
def test_pairs_of_answers(answer, label, equal):
    assert math_equal(answer, label) is equal
    assert math_equal(label, answer) is equal


FAULTS = [
    ("g01", r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{pmatrix} -7 \\ 16 \\ 9 \end{pmatrix}", False),
    ("g02", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}",
     True),
    ("g03-text", r"15\text{ cm}^2", "15", True),
    ("g03-mathrm", r"15 \mathrm{~cm}^2", "15", True),
    ("g03-mbox", r"15\mbox{ cm}^{2}", "15", True),
    ("g03-square", r"15\text{ cm}^2", "225", False),
    ("g04-cube", r"3\text{ m}^3", "27", False),
    ("g04", r"3\text{ m}^3", "3", True),
    ("g05", "40_8", "40_9", False),
    ("g06", r"11,\! 111,\! 100", "11111100", True),
    ("g07", "3R^2", "3r^2", False),
    ("g08", "5!", "120", True),
    ("g10-power", r"\boxed{(x+y+z+1)^{99}}", "(x+y+z+1)^{98}", False),
    ("g10-brackets", r"\(" * 30_000, "5", False),
    ("g11", r"\frac{1}{3^{40}}", r"\frac{1}{3^{41}}", False),
    ("e04-choices", r"(\text{A})", r"(\text{B})", False),
    ("e04-glued", r"5\text{ or }6", "56", False),
    ("e04-e", r"2\text{e}", "2", False),
    ("e04-i", r"3\mathrm{i}", "3", False),
    ("e05-spacing", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}", False),
    ("e05-cases", r"\begin{cases} x=1 \\ y=2 \end{cases}", r"\begin{cases} x=1 \\ y=3 \end{cases}", False),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "label", "equal"), [pytest.param(*c[1:], id=c[0]) for c in FAULTS])
def test_faults_of_math_grading(answer, label, equal):  # G01-G08, G10, G11, E04, E05
    assert grade_math(answer, label) is equal
    assert grade_math(label, answer) is equal


def test_order_of_the_arguments_does_not_matter():
    texts = sorted({text for row in table() for text in row[:2] if "\\sum" not in text and "\\int" not in text})
    source = random.Random(7)
    for _ in range(500):
        a, b = source.sample(texts, 2)
        assert math_equal(a, b) is math_equal(b, a), (a, b)


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_g10_costly_answers_are_wrong(answer, monkeypatch):
    """The bounds are on steps and digits; none of these comes near the bound of the test run. Those that math-verify
    computes are ended by its limit (`benchmarks/graders.py` says how long each takes).
    """
    monkeypatch.setattr(library, "SECONDS", 0.3)
    assert not grade_math(answer, "5")
    assert not grade_math("5", answer)


def test_g10_steps_are_bounded():
    start_count()
    count(MAX_STEPS)
    with pytest.raises(TooLargeError):
        count()
    start_count()
    count()


def test_g10_math_verify_is_ended_at_its_limit_and_the_next_answer_is_right(monkeypatch):
    monkeypatch.setattr(library, "SECONDS", 0.3)
    endless = r"\sum_{n=1}^{\infty}\frac{1}{n^{2}+n^{9}+\sin n}"
    assert not math_equal(endless, "1")
    monkeypatch.setattr(library, "SECONDS", 60.0)
    assert math_equal(r"\sum_{k=1}^{12} k", "78")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(math_equal(r"\prod_{k=1}^{4} k", "24"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [True] * 3


def test_math_verify_ends_with_its_owner():
    source = (
        "from openrlhf.agents.graders.answer import library\n"
        "library.SECONDS = 60.0\n"
        "print(library.library_equal(r'\\sum_{k=1}^{3} k', '6'), library._helper._process.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=240)
    right, pid = done.stdout.split()
    assert right == "True"
    deadline = 60.0
    while os.path.exists(f"/proc/{pid}") and deadline > 0:
        deadline -= 0.1
        threading.Event().wait(0.1)
    assert not os.path.exists(f"/proc/{pid}")


def test_plain_numbers():
    assert math_equal("1,000", "1000")
    assert math_equal(r"2\frac{1}{2}", "2.5")
    assert not math_equal(r"\sqrt{2}", "1.4")
    assert not math_equal("x", "1")


def test_the_last_formula_is_the_answer():
    assert extract_answer("First $1$, then \\(2\\).\nAfter all it is $3$ then") == "3"
    assert extract_answer("It costs $5 and\nthat is \\[ 7 \\] done") == " 7 "


def test_works_off_the_main_thread():
    async def main():
        return await asyncio.gather(
            *(asyncio.to_thread(math_equal, rf"\sqrt{{{i}}}", rf"{i}^{{1/2}}") for i in range(20))
        )

    assert all(asyncio.run(main()))
