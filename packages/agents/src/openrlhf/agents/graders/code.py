"""Runs a program against tests in processes of its own, apart from the tests, with limits on what it takes.

Inputs and outputs are compared here, Python tests in a process that the program cannot reach: it can end itself, fake
comparisons or change builtins, the tests hold values of their own. Everything that it starts ends with the run. Time,
CPU, memory, processes, files and output are limited; what else it can reach depends on the machine: `isolation()` says
how it is kept apart here, `missing_isolation()` what to do for more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.agents.graders.program.blocks import extract_program
from openrlhf.agents.graders.program.isolation import isolation as isolation
from openrlhf.agents.graders.program.isolation import missing_isolation as missing_isolation
from openrlhf.agents.graders.program.sandbox import OUTPUT_BYTES, run
from openrlhf.agents.graders.program.sandbox import CodeLimits as CodeLimits
from openrlhf.agents.graders.program.sandbox import CodeResult as CodeResult


@dataclass(frozen=True, kw_only=True, slots=True)
class IOTest:
    """The program gets `input` on stdin and has to print `output` (compared without trailing blanks)."""

    input: str
    output: str


def extract_code(response: str) -> str:
    """The program in a response: its last fenced block that is one, with the earlier blocks that it needs.

    Blocks named as Python come first, then blocks without a name that are Python and do something. A response without
    blocks is a program as a whole.
    """
    return extract_program(response)


def run_code(source: str, stdin: str = "", limits: CodeLimits | None = None) -> CodeResult:
    """Runs a Python program in an empty folder, as `python program.py`. Never raises for what the program does.

    Names that judges offer without an import (`List`, `deque`, `gcd`) are there if the program uses them.
    """
    return run(source, stdin, None, limits or CodeLimits())


def grade_code(
    response: str, tests: Sequence[IOTest] | str, limits: CodeLimits | None = None
) -> tuple[float, list[CodeResult]]:
    """The share of tests that the code in a response passes, and the runs.

    tests: input/output pairs, one run each; or Python source with asserts, unittest cases, functions named `test…`
    or doctests, which all have to pass in one run: 1.0 or 0.0, and 0.0 where no test is found in it. Empty source
    asks that the program runs without an error.
    """
    limits = limits or CodeLimits()
    source = extract_code(response)
    if isinstance(tests, str):
        result = run(source, "", tests if tests.strip() else None, limits)
        return float(result.ok), [result]
    if not tests:
        raise ValueError("grade_code: no tests given")
    kept = [OUTPUT_BYTES + 2 * len(test.output.encode("utf-8", "replace")) for test in tests]
    results = [run(source, test.input, None, limits, size) for test, size in zip(tests, kept, strict=True)]
    passed = [r.ok and _lines(r.stdout) == _lines(t.output) for r, t in zip(results, tests, strict=True)]
    return sum(passed) / len(tests), results


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def grade_code_async(
    response: str, tests: Sequence[IOTest] | str, limits: CodeLimits | None = None
) -> tuple[float, list[CodeResult]]:
    """`grade_code` for the step of an agent: the event loop goes on meanwhile."""
    return await asyncio.to_thread(grade_code, response, tests, limits)
