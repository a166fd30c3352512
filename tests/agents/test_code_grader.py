"""Programs against tests, within limits."""

import asyncio
import time

import pytest

from openrlhf.agents.graders.code import CodeLimits, IOTest, extract_code, grade_code, grade_code_async, run_code
from support.leftovers import nothing_left

ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = [IOTest(input="1 2", output="3\n"), IOTest(input="5 5", output="10"), IOTest(input="1 1", output="3")]
AMPLE = CodeLimits(seconds=60)  # a busy machine must not turn right into wrong


def test_share_of_passed_tests():
    share, results = grade_code(f"Here:\n```python\n{ADD}\n```", TESTS, AMPLE)
    assert share == pytest.approx(2 / 3)
    assert [r.exit_code for r in results] == [0, 0, 0]


def test_asserts():
    assert grade_code("def f(x): return x + 1", "assert f(1) == 2", AMPLE)[0] == 1.0
    share, (result,) = grade_code("def f(x): return x", "assert f(1) == 2", AMPLE)
    assert share == 0.0
    assert "AssertionError" in result.stderr


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("def sum(a, b): return [d for d in range(1, a) if a % d == b % d == 0].__len__() + 1", False),
        ("total = sum\ndef sum(a, b):\n    return total(d for d in range(1, a) if a % d == b % d == 0)", True),
        ("x = 1", False),
    ],
)
def test_a_task_may_be_named_like_a_builtin(program: str, passes: bool) -> None:
    """MBPP asks for functions `sum` and `max`: what is tested is the program's."""
    share, _ = grade_code(program, "assert sum(10, 15) == 6\nassert sum(100, 150) == 93", AMPLE)
    assert share == float(passes)


def test_the_last_block_counts():
    assert extract_code("```py\n1\n```\ntext\n```\n2\n```") == "2\n"
    assert extract_code("print(1)") == "print(1)"


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(60)"])
def test_time_limit(source):
    started = time.monotonic()
    result = run_code(source, limits=CodeLimits(seconds=0.5))
    assert (result.exit_code, result.ok) == (None, False)
    assert time.monotonic() - started < 50


def test_memory_limit():
    result = run_code("x = bytearray(10**9)", limits=CodeLimits(seconds=60, memory_mb=256))
    assert not result.ok
    assert "MemoryError" in result.stderr


def test_output_and_file_limits():
    flood = run_code("while True: print('x' * 1000)", limits=CodeLimits(seconds=60, file_mb=1))
    assert not flood.ok
    assert len(flood.stdout) <= 64 * 1024


def test_children_of_the_program_end_with_it():
    source = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint(1)"
    with nothing_left():
        assert run_code(source, limits=AMPLE).stdout == "1\n"


def test_the_loop_goes_on_meanwhile():
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        share, _ = await grade_code_async("import time; time.sleep(0.3)", "", AMPLE)
        ticker.cancel()
        return share, ticks

    share, ticks = asyncio.run(main())
    assert share == 1.0
    assert ticks > 5


def test_no_tests_is_an_error():
    with pytest.raises(ValueError, match="no tests given"):
        grade_code("x = 1", [])


def test_outputs_are_compared_to_their_end():
    program = "for i in range(int(input())): print(i)"
    expected = "\n".join(map(str, range(50_000)))
    tests = [IOTest(input="50000", output=expected), IOTest(input="50001", output=expected)]
    assert grade_code(program, tests, AMPLE)[0] == 0.5
