"""User files as modules: process pools of every kind can import them."""

import asyncio
import textwrap

import pytest

from openrlhf.agents.files import CodeFile
from openrlhf.agents.modules import load_module
from openrlhf.agents.reward_process import RewardPool
from openrlhf.agents.rewards import RewardError

POOLS = {
    "executor made by the import": """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        class Rated:
            def __init__(self, label):
                self.value = float(label) + (__file__ == "/nowhere/my reward.v2.py")

        def rate(label):
            return Rated(label)

        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("{method}"))

        def reward_func(queries, prompts, labels):
            return [rated.value for rated in pool.map(rate, labels)]
    """,
    "pool made by the first call": """
        import multiprocessing

        pool = None

        def reward_func(queries, prompts, labels):
            global pool
            pool = pool or multiprocessing.get_context("{method}").Pool(1)
            return pool.map(rate, labels)

        def rate(label):
            return float(label) + (__file__ == "/nowhere/my reward.v2.py")
    """,
}
UNGUARDED = """
    import multiprocessing

    pool = multiprocessing.get_context("{method}").Pool(1)

    def reward_func(queries, prompts, labels):
        return pool.map(rate, labels)

    def rate(label):
        return float(label)
"""


def rewards(source, calls=2):
    """The rewards of some calls; the file lies on no disk, and its name is none of a module."""
    code = CodeFile(path="/nowhere/my reward.v2.py", source=textwrap.dedent(source))

    async def main():
        pool = RewardPool(code, 60.0)
        try:
            return [(await pool.score(["qa"] * 2, ["q"] * 2, ["1", "2"])).rewards for _ in range(calls)]
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("source", POOLS.values(), ids=POOLS)
def test_r02_process_pools_import_the_file(source, method):
    assert rewards(source.replace("{method}", method)) == [[2.0, 3.0]] * 2


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_r02_a_pool_made_by_the_import_fails_the_call_with_the_reason(method):
    """Its workers would import the file, make a pool, die for it and be started again for ever."""
    with pytest.raises(RewardError, match=r"my reward.v2.py cannot be used in a process .* make process pools inside"):
        rewards(UNGUARDED.replace("{method}", method))


def test_r02_a_complete_module_has_no_stand_ins():
    module = load_module(CodeFile(path="/nowhere/my_plain_file.py", source="x = 1"))
    assert module.x == 1
    assert not hasattr(module, "y")
    own = load_module(CodeFile(path="/nowhere/my_own.py", source="def __getattr__(name): return name"))
    assert own.anything == "anything"


def test_r03_tracebacks_show_the_right_line_behind_a_line_separator():
    source = 'text = "a\u2028b\x0cc"\n\ndef fail():\n    raise KeyError(text)  # here\n'
    module = load_module(CodeFile(path="/nowhere/separator.py", source=source))
    with pytest.raises(KeyError) as error:
        module.fail()
    assert str(error.traceback[-1].statement).strip() == "raise KeyError(text)  # here"
