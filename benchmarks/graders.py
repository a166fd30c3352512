"""How long graders take: hostile answers of mathematics one by one, and the least that grading a program takes.

Aim: at most 2 s for each answer, on a quiet machine. `.venv/bin/python benchmarks/graders.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from openrlhf.agents.graders.code import CodeLimits, IOTest, grade_code, isolation
from openrlhf.agents.graders.math import grade_math
from support.hostile_answers import HOSTILE

LIMIT_SECONDS = 2.0
ROUNDS = 10


def main() -> None:
    grade_math(r"\boxed{\sum_{k=1}^{3} k}", "6")  # starts the process of math-verify, once for a reward process
    seconds = {name: timed(lambda text=text: grade_math(text, "5")) for name, text in HOSTILE.items()}
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:28} {value:6.3f} s")
    slow = [name for name, value in seconds.items() if value > LIMIT_SECONDS]
    print(f"{len(seconds)} hostile answers: the slowest takes {max(seconds.values()):.2f} s")
    limits = CodeLimits(seconds=60)
    printed = [timed(lambda: grade_code("print(3)", [IOTest(input="", output="3")], limits)) for _ in range(ROUNDS)]
    asserted = [timed(lambda: grade_code("x = 3", "assert x == 3", limits)) for _ in range(ROUNDS)]
    print(
        f"a program under {isolation()}: {statistics.median(printed):.3f} s for an output, "
        f"{statistics.median(asserted):.3f} s for Python tests"
    )
    sys.exit(f"too slow: {slow}" if slow else 0)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
