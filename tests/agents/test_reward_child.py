"""What a reward function finds in its process: one event loop for all calls, and a clock that counts its calls only."""

import asyncio

import pytest

from openrlhf.agents.rewards import RewardError, RewardTimeoutError
from support.agents_rewards import code_of, score, with_pool

ONE_LOOP = {
    "queue and task": """
        import asyncio
        queue, task = asyncio.Queue(), None

        async def work():
            while True:
                label, answer = await queue.get()
                answer.set_result(float(label))

        async def reward_func(queries, prompts, labels):
            global task
            task = task or asyncio.create_task(work())
            answer = asyncio.get_running_loop().create_future()
            queue.put_nowait((labels[0], answer))
            return [await answer]
    """,
    "connection": """
        import asyncio
        connection = None

        async def echo(reader, writer):
            while line := await reader.readline():
                writer.write(line)

        async def reward_func(queries, prompts, labels):
            global connection
            if connection is None:
                server = await asyncio.start_server(echo, "127.0.0.1", 0)
                connection = await asyncio.open_connection(*server.sockets[0].getsockname())
            connection[1].write(labels[0].encode() + b"\\n")
            return [float(await connection[0].readline())]
    """,
    "task made by the import": """
        import asyncio
        seen = []

        async def count():
            while True:
                seen.append(1)
                await asyncio.sleep(0)

        task = asyncio.get_event_loop().create_task(count())

        async def reward_func(queries, prompts, labels):
            assert seen and not task.done()
            return [float(labels[0])]
    """,
    "plain function on the current loop": """
        import asyncio
        lock = None

        async def locked(value):
            global lock
            lock = lock or asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(lock.done)
            await asyncio.wait([lock], timeout=0)
            return value

        def reward_func(queries, prompts, labels):
            return [asyncio.get_event_loop().run_until_complete(locked(float(labels[0])))]
    """,
    "plain function with loops of its own": """
        import asyncio

        async def value(label):
            await asyncio.sleep(0)
            return float(label)

        def reward_func(queries, prompts, labels):
            return [asyncio.run(value(labels[0]))]
    """,
}


@pytest.mark.parametrize("source", ONE_LOOP.values(), ids=ONE_LOOP)
def test_r01_one_event_loop_lives_as_long_as_the_process(source):
    code = code_of(source)

    async def body(pool):
        return [(await score(pool, [str(n)])).rewards[0] for n in range(4)]

    assert with_pool(code, body) == [0.0, 1.0, 2.0, 3.0]


def test_r01_background_tasks_go_on_between_calls():
    source = """
        import asyncio
        ticks, task = [], None

        async def tick():
            while True:
                await asyncio.sleep(0.01)
                ticks.append(1)

        async def reward_func(queries, prompts, labels):
            global task
            task = task or asyncio.create_task(tick())
            return [float(len(ticks))]
    """
    code = code_of(source)

    async def body(pool):
        assert (await score(pool, ["x"])).rewards == [0.0]
        await asyncio.sleep(1.0)
        return await score(pool, ["x"])

    assert with_pool(code, body).rewards[0] >= 2


@pytest.mark.parametrize("error", ["SystemExit(3)", "asyncio.CancelledError()"])
def test_r01_a_coroutine_that_ends_oddly_fails_its_call_only(error):
    source = f"""
        import asyncio
        calls = []
        async def reward_func(queries, prompts, labels):
            calls.append(1)
            if len(calls) == 1:
                raise {error}
            return [float(len(calls))]
    """
    code = code_of(source)

    async def body(pool):
        with pytest.raises(RewardError, match=f"reward_func raised {error.split('(')[0].split('.')[-1]}"):
            await score(pool, ["x"])
        return await score(pool, ["x"])

    assert with_pool(code, body).rewards == [2.0]


def test_n14_the_time_of_a_call_does_not_include_its_wait_in_the_queue():
    source = """
        import time
        def reward_func(queries, prompts, labels):
            time.sleep(0.1)
            return [1.0]
    """
    code = code_of(source)

    async def body(pool):  # the last of them waits for 1.4 s
        return await asyncio.gather(*(score(pool, ["x"]) for _ in range(15)))

    assert [result.rewards for result in with_pool(code, body, timeout=1.2)] == [[1.0]] * 15


def test_n14_a_slow_import_is_not_the_call_and_has_a_limit_of_its_own(monkeypatch):
    source = "import time; time.sleep(0.6)\n" + "def reward_func(queries, prompts, labels): return [1.0]"
    code = code_of(source)
    assert with_pool(code, lambda pool: score(pool, ["x"]), timeout=0.4).rewards == [1.0]
    monkeypatch.setattr("openrlhf.agents.reward_process.IMPORT_SECONDS", 0.2)

    async def body(pool):
        with pytest.raises(RewardTimeoutError) as error:
            await score(pool, ["x"])
        return str(error.value)

    message = with_pool(code, body)
    assert message == (
        "my_reward.py: importing it took longer than 0.2 s, the limit of an import (`reward.timeout` counts for calls "
        "only), process killed"
    )
