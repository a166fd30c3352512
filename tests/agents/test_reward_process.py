"""Reward files in killable processes."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from openrlhf.agents.files import CodeFile, CodeFileError
from openrlhf.agents.reward_file import RewardFunction, check_reward_file
from openrlhf.agents.rewards import RewardError, RewardResult, RewardTimeoutError
from support.agents_rewards import alive, code_of, ends, score, with_pool


@pytest.fixture
def reward_file(tmp_path):
    def write(source, name="my_reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


SIGNATURES = {
    "plain": "def reward_func(queries, prompts, labels): return [1.0] * len(queries)",
    "kwargs": "def reward_func(queries, prompts, labels, **kwargs): return [float(len(kwargs['responses'][0]))] * 2",
    "positional only": "def reward_func(q, p, l, /): return [1.0] * len(q)",
    "other names": "def reward_func(a, b, c, d=3): return [1.0] * len(a)",
    "async": "async def reward_func(queries, prompts, labels): return [1.0] * len(queries)",
    "object": "class S:\n def __call__(self, q, p, l): return [1.0] * len(q)\nreward_func = S()",
    "class": "class reward_func:\n def __call__(self, q, p, l): return [1.0] * len(q)",
    "lambda": "reward_func = lambda q, p, l: [1.0] * len(q)",
    "responses": "def reward_func(q, p, l, *, responses): return [float(r == 'a') for r in responses]",
}


@pytest.mark.parametrize("source", SIGNATURES.values(), ids=SIGNATURES)
def test_signatures(source):  # B147
    code = CodeFile(path=f"/nowhere/{abs(hash(source))}.py", source=source)
    check_reward_file(code, run=False)
    with asyncio.Runner() as runner:
        function = RewardFunction(code, runner)
        assert function(["qa"] * 2, ["q"] * 2, ["x"] * 2, ["a"] * 2).rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(queries): return 1", r"reward_func\(queries\), expected reward_func\(queries, prompts, la"),
        ("def reward_func(q, p, l, x): return 1", "expected reward_func"),
        ("def reward_func(q, p, l, *, must): return 1", "expected reward_func"),
        ("def reward_func(q, p, l)\n  return 1", "syntax error in .*my_reward.py, line 1"),
        ("x = 1", "defines no reward_func; expected"),
        ("reward_func = 3", "is not callable"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("import sys; sys.exit(0)", "SystemExit"),
    ],
)
def test_unusable_files_are_found_before_anything_starts(reward_file, source, message):  # B147
    with pytest.raises(CodeFileError, match=message):
        check_reward_file(reward_file(source))


def test_missing_file():
    with pytest.raises(CodeFileError, match=r"`reward_file`: file not found: 'no_such.py'"):
        check_reward_file("no_such.py")


def test_file_travels_by_content_and_finds_its_neighbours(reward_file, tmp_path):  # B147
    reward_file("BONUS = 2.0", "my_neighbour_module.py")
    code = check_reward_file(reward_file("from my_neighbour_module import BONUS\n" + SIGNATURES["plain"] + ""))
    assert with_pool(code, lambda pool: score(pool, ["x"])).rewards == [1.0]
    gone = CodeFile(path=str(tmp_path / "elsewhere" / "f.py"), source=SIGNATURES["plain"])
    assert with_pool(gone, lambda pool: score(pool, ["x"])).rewards == [1.0]


HANGING = """
    import re, time

    def reward_func(queries, prompts, labels):
        if "spin" in labels:
            while True:
                pass
        if "sleep" in labels:
            time.sleep(1e6)
        if "regex" in labels:
            re.match(r"(a+)+$", "a" * 60 + "b")
        return [0.5] * len(queries)
"""


def test_hanging_calls_are_killed_and_later_ones_are_served(reward_file):  # B135
    code = check_reward_file(reward_file(HANGING), run=False)

    async def body(pool):
        pids = set()
        for kind in ("spin", "sleep", "regex"):
            await pool.start()
            pids.add(pool._processes[0].pid)
            with pytest.raises(RewardTimeoutError, match=r"longer than `reward.timeout` 0.4 s"):
                await score(pool, [kind])
        for _ in range(20):
            assert (await score(pool, ["fine"])).rewards == [0.5]
        pids.add(pool._processes[0].pid)
        return pids

    pids = with_pool(code, body, timeout=0.4)
    assert len(pids) == 4
    assert not any(alive(pid) for pid in pids)


def test_an_exception_arrives_with_the_authors_traceback(reward_file):
    source = """
        def reward_func(queries, prompts, labels):
            return check(labels[0])

        def check(label):
            raise KeyError(f"boom-{label}")
    """
    code = check_reward_file(reward_file(source), run=False)

    async def body(pool):
        with pytest.raises(RewardError, match=r"my_reward.py: reward_func raised KeyError: 'boom-7'") as error:
            await score(pool, ["7"])
        return error.value.traceback

    traceback = with_pool(code, body)
    assert "in check" in traceback
    assert 'raise KeyError(f"boom-{label}")' in traceback
    assert "reward_child" not in traceback


def test_a_process_that_dies_fails_its_call_only(reward_file):
    source = """
        import os
        def reward_func(queries, prompts, labels):
            if labels[0] == "die":
                os._exit(7)
            return [1.0]
    """
    code = check_reward_file(reward_file(source), run=False)

    async def body(pool):
        with pytest.raises(RewardError, match=r"exit code 7"):
            await score(pool, ["die"])
        return await score(pool, ["x"])

    assert with_pool(code, body).rewards == [1.0]


def test_a_call_whose_process_is_killed_is_made_once_more(reward_file, tmp_path, caplog):
    source = f"""
        import os, pathlib, signal
        def reward_func(queries, prompts, labels):
            mark = pathlib.Path({str(tmp_path / "killed")!r})
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return [0.5]
    """
    code = check_reward_file(reward_file(source), run=False)
    assert with_pool(code, lambda pool: score(pool, ["x"])).rewards == [0.5]
    assert "exit code -9" in caplog.text


def test_prints_are_bounded_and_disturb_nothing(reward_file, capsys):  # B147
    source = """
        import sys
        def reward_func(queries, prompts, labels):
            for _ in range(100):
                print("x" * 100_000)
            sys.stderr.write("y" * 100)
            assert sys.stdin.read() == ""
            return [1.0]
    """
    code = check_reward_file(reward_file(source), run=False)
    assert with_pool(code, lambda pool: score(pool, ["x"]), timeout=20.0).rewards == [1.0]
    written = capsys.readouterr().err
    assert 60_000 < len(written) < 70_000
    assert "rest dropped" in written


def test_labels_arrive_unchanged(reward_file):
    source = """
        def reward_func(queries, prompts, labels):
            assert labels == [None, "42", {"v": [1]}], labels
            return {"rewards": [1, 2, 3], "extra_logs": {"n": 3}}
    """
    code = check_reward_file(reward_file(source), run=False)
    result = with_pool(code, lambda pool: score(pool, [None, "42", {"v": [1]}]))
    assert result.rewards == [1.0, 2.0, 3.0]
    assert result.extra_logs == [{"n": 3.0}] * 3


def test_what_an_import_leaves_running_does_not_hold_the_check_up(reward_file, tmp_path):
    source = f"""
        import subprocess, sys, threading, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        threading.Thread(target=time.sleep, args=(1000,)).start()
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    """
    check_reward_file(reward_file(textwrap.dedent(source) + SIGNATURES["plain"]), timeout=60.0)
    assert ends(int((tmp_path / "pid").read_text()))


def test_several_processes_work_side_by_side(reward_file, tmp_path):
    # each call ends only when the other one runs, too
    source = f"""
        import pathlib, time
        def reward_func(queries, prompts, labels):
            folder = pathlib.Path({str(tmp_path)!r})
            (folder / labels[0]).touch()
            while not ((folder / "a").exists() and (folder / "b").exists()):
                time.sleep(0.01)
            return [1.0]
    """
    code = check_reward_file(reward_file(source), run=False)

    async def body(pool):
        return await asyncio.gather(*(score(pool, [name]) for name in ("a", "b")))

    assert [r.rewards for r in with_pool(code, body, processes=2, timeout=60.0)] == [[1.0], [1.0]]


def test_a_cancelled_call_gives_no_answer_to_the_next(reward_file):
    source = """
        import time
        def reward_func(queries, prompts, labels):
            time.sleep(float(labels[0]))
            return [float(labels[0])]
    """
    code = check_reward_file(reward_file(source), run=False)

    async def body(pool):
        await pool.start()
        slow = asyncio.create_task(score(pool, ["0.5"]))
        await asyncio.sleep(0.1)
        slow.cancel()
        await asyncio.wait([slow])
        return await score(pool, ["0.01"])

    assert with_pool(code, body).rewards == [0.01]


def test_the_process_ends_with_its_parent(reward_file):  # B135: no left-over process
    code = check_reward_file(reward_file(HANGING), run=False)
    program = f"""
        import asyncio, os
        from openrlhf.agents.reward_file import check_reward_file
        from openrlhf.agents.reward_process import RewardPool
        async def main():
            pool = RewardPool(check_reward_file({code.path!r}, run=False), 60.0)
            await pool.start()
            print(pool._processes[0].pid, flush=True)
            asyncio.create_task(pool.score(["q"], ["q"], ["spin"]))
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    assert ends(pid)


FAULTS = """
    import os, sys, time
    def reward_func(queries, prompts, labels):
        kind, value = labels[0].split()
        if kind == "hang":
            while True:
                time.sleep(1)
        if kind == "die":
            os._exit(3)
        if kind == "leak":
            held = []
            while True:
                held.append(bytearray(b"x" * 10_000_000))
                time.sleep(0.005)
        if kind == "print":
            sys.stdout.write("noise " * 100_000)
        return [float(value)] * len(queries)
"""


def test_every_fault_costs_its_own_group_alone(capsys):
    """Hanging, dying, leaking and printing calls among good ones, in three processes: exact rewards, in order."""
    kinds = ["fine", "hang", "fine", "die", "print", "fine", "leak", "fine", "print", "hang", "leak", "fine"]

    async def body(pool):
        calls = (score(pool, [f"{kind} {i}"] * 2) for i, kind in enumerate(kinds))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        again = [await score(pool, [f"fine {i}"]) for i in range(6)]
        return answers, again, [process.pid for process in pool._processes]

    answers, again, pids = with_pool(code_of(FAULTS), body, timeout=3.0, processes=3, max_memory=300_000_000)
    said = {"hang": "longer than `reward.timeout` 3 s", "die": "exit code 3", "leak": "`reward.max_memory_gib` 0.279"}
    for i, (kind, answer) in enumerate(zip(kinds, answers, strict=True)):
        if kind in said:
            assert isinstance(answer, RewardError)
            assert said[kind] in str(answer)
        else:
            assert isinstance(answer, RewardResult)
            assert answer.rewards == [float(i)] * 2
    assert [a.rewards for a in again] == [[float(i)] for i in range(6)]
    assert not any(alive(pid) for pid in pids if pid is not None)
    assert len(capsys.readouterr().err) < 1_000_000  # of twelve times as much


def test_what_earlier_calls_left_in_memory_costs_no_group():
    source = """
        held = []
        def reward_func(queries, prompts, labels):
            held.append(b"x" * 60_000_000)
            import time
            time.sleep(0.25)
            return [1.0] * len(queries)
    """

    async def body(pool):
        pids = set()
        for _ in range(6):
            assert (await score(pool, ["x"])).rewards == [1.0]
            pids.add(pool._processes[0].pid)
        return pids

    assert len(with_pool(code_of(source), body, max_memory=200_000_000)) > 1


def test_waiting_for_a_process_counts_for_no_limit():
    source = """
        import time
        def reward_func(queries, prompts, labels):
            time.sleep(0.4)
            return [float(label) for label in labels]
    """

    async def body(pool):
        return await asyncio.gather(*(score(pool, [str(i)]) for i in range(5)))

    assert [r.rewards for r in with_pool(code_of(source), body, timeout=1.5)] == [[float(i)] for i in range(5)]


def test_what_a_call_started_counts_as_its_memory():
    source = """
        import subprocess, sys
        def reward_func(queries, prompts, labels):
            subprocess.run([sys.executable, "-c", "import time; held = b'x' * 400_000_000; time.sleep(20)"])
            return [1.0]
    """
    with pytest.raises(RewardError, match=r"took 0\.\d+ GiB, more than `reward.max_memory_gib` 0.279"):
        with_pool(code_of(source), lambda pool: score(pool, ["x"]), timeout=30.0, max_memory=300_000_000)


def test_the_kernel_ends_a_reward_process_before_any_other():
    source = """
        def reward_func(queries, prompts, labels):
            return [float(open("/proc/self/oom_score_adj").read())]
    """
    assert with_pool(code_of(source), lambda pool: score(pool, ["x"])).rewards == [1000.0]
