"""MCP servers that do not start, hang, die, are shared or cancelled: what episodes get, and that nothing stays."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")
from openrlhf.agents.failures import EpisodeFailed
from openrlhf.agents.mcp.connection import Connection
from openrlhf.agents.mcp.tools import McpServer, McpTools
from support.leftovers import nothing_left
from support.mcp_play import calls, free_port, play, process, serving


async def _nothing(tools):
    return None


FALSE_STARTS = {
    "a name twice": ({"a": process(), "b": process()}, "'a' and 'b' both have a tool 'add': give one a prefix"),
    "no such tool": ({"a": process(tools=["sub"])}, "'a' has no tool 'sub'; it has ['add', "),
    "endless": ({"a": process("endless")}, "'a' does not start: ValueError: its list of tools has more than 100 pages"),
    "mute": ({"a": process("mute", start_timeout=1.5)}, "'a' told no tools within 1.5 s"),
    "ended": ({"a": process("ended")}, "standard error: no configuration"),
    "no program": ({"a": McpServer(command=("no-such-program",))}, "'a' does not start: FileNotFoundError"),
    "no listener": ({"a": McpServer(url="http://127.0.0.1:9/mcp")}, "'a' does not start: "),
}


@pytest.mark.parametrize("name", FALSE_STARTS)
def test_servers_that_do_not_start_fail_the_episode_by_name(name):
    servers, text = FALSE_STARTS[name]
    with pytest.raises(EpisodeFailed) as failure:
        play(servers, _nothing)
    assert text in str(failure.value)


def test_a_slow_call_is_told_and_the_episode_goes_on():
    async def body(tools):
        slow = await tools.call("slow", {"seconds": 60})
        assert (slow.is_error, slow.text) == (True, "slow gave no result within 1 s")
        return (await tools.call("keep", {"word": "still"})).text

    assert play({"tests": process(call_timeout=1)}, body) == ["still"]


@pytest.mark.parametrize(
    ("tool", "text"), [("die", "standard error: out of luck"), ("hang", "gave no result within 1 s")]
)
def test_a_server_that_dies_or_hangs_fails_the_episode_by_name(tool, text, monkeypatch):
    monkeypatch.setattr("openrlhf.agents.mcp.connection.LIFE_SECONDS", 0.5)
    with pytest.raises(
        EpisodeFailed, match=f"the MCP server 'tests' is gone or hangs since a call of {tool}"
    ) as failure:
        play({"tests": process(call_timeout=1)}, calls(tool))
    assert text in str(failure.value)


def test_odd_answers_of_a_server_that_lives_are_told():
    (results,) = play({"odd": process("odd")}, calls("busy", "broken", "busy"))
    assert [result.text for result in results] == [
        "come back later",
        "the result of broken is none of the protocol's",
        "come back later",
    ]


def test_garbage_on_standard_output_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        results = play({"loud": process()}, calls("chatter", "chatter", "add", a=1, b=1))
    assert [result.text for result in results[0]] == ["said", "said", "2"]
    said = [record.getMessage() for record in caplog.records]
    expected = "the MCP server 'loud' writes what is none of the protocol's messages to its standard output"
    assert said == [expected]


def test_an_episode_has_a_server_of_its_own():
    first, second = play({"tests": process()}, calls("keep", word="a"), calls("keep", word="b"))
    assert (first.text, second.text) == ("a", "b")


def test_a_shared_server_remembers_and_is_started_again():
    async def dies(tools):
        with pytest.raises(EpisodeFailed, match="since a call of die"):
            await tools.call("die")
        return (await tools.call("keep", {"word": "c"})).text

    bodies = [calls("keep", word="a"), calls("keep", word="b"), dies, calls("keep", word="d")]
    first, second, third, fourth = play({"tests": process(shared=True)}, *bodies)
    assert [first.text, second.text, third, fourth.text] == ["a", "a,b", "c", "c,d"]


def test_what_a_server_left_behind_is_ended():
    (result,) = play({"tests": process()}, calls("leave_behind"))
    assert not Path(f"/proc/{result.text}").exists()


def test_cancelled_episodes_leave_nothing():
    """In the start, in a call, and with the loop: each server is ended, and nobody waits for it."""

    async def main():
        tools = McpTools({"tests": process(), "mute": process("mute")})
        start = asyncio.create_task(_hold(tools))
        await asyncio.sleep(0.5)
        start.cancel()
        await asyncio.wait([start], timeout=1)
        assert start.cancelled()
        del tools.servers["mute"]
        running = asyncio.create_task(_hold(tools, "slow", seconds=100))
        await asyncio.sleep(3)
        running.cancel()
        await asyncio.wait([running], timeout=1)
        assert running.cancelled()
        await tools.close()
        left = asyncio.create_task(_hold(tools, "hang"))
        await asyncio.wait([left], timeout=3)

    with nothing_left():
        asyncio.run(main())


def test_a_call_that_is_cancelled_leaves_a_shared_server_to_the_others():
    async def body(tools):
        slow = asyncio.create_task(tools.call("slow", {"seconds": 100}))
        other = asyncio.create_task(tools.call("slow", {"seconds": 1.5}))
        await asyncio.sleep(0.5)
        slow.cancel()
        await asyncio.wait([slow])
        return [(await other).text, (await tools.call("keep", {"word": "a"})).text]

    assert play({"tests": process(shared=True)}, body) == [["done", "a"]]


def test_who_waits_for_a_server_whose_task_is_cancelled_is_told():
    async def main():
        connection = Connection("mute", process("mute"))
        waiting = asyncio.create_task(connection.ready())
        await asyncio.sleep(0.2)
        connection.holder.cancel()
        await asyncio.wait([waiting, connection.holder])
        assert str(waiting.exception()).startswith("the MCP server 'mute' was ended before it started")

    with nothing_left():
        asyncio.run(main())


async def _hold(tools, *names, **arguments):
    async with tools.episode() as episode:
        for name in names:
            await episode.call(name, arguments)


def test_an_http_server_that_goes_away(monkeypatch):
    monkeypatch.setattr("openrlhf.agents.mcp.connection.LIFE_SECONDS", 2)
    port = free_port()

    async def main():
        servers = McpTools({"far": McpServer(url=f"http://127.0.0.1:{port}/mcp", shared=True, call_timeout=20)})
        async with contextlib.AsyncExitStack() as first:
            await first.enter_async_context(serving(port))
            async with servers.episode() as tools:
                with pytest.raises(EpisodeFailed, match="the MCP server 'far' is gone or hangs since a call of die"):
                    await tools.call("die")
                with pytest.raises(EpisodeFailed, match="the MCP server 'far' does not start"):
                    await tools.call("add", {"a": 1, "b": 1})
                async with serving(port):
                    assert (await tools.call("add", {"a": 1, "b": 1})).text == "2"
        await servers.close()

    with nothing_left():
        asyncio.run(main())


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(EpisodeFailed, match=r"pip install 'openrlhf-agents\[mcp\]'"):
        play({"a": process()}, _nothing)


def test_a_server_whose_process_is_killed_between_calls():
    async def body(tools):
        pid = int((await tools.call("environment")).structured["OWN_PID"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EpisodeFailed, match="is gone or hangs since a call of add"):
            await tools.call("add", {"a": 1, "b": 1})

    play({"tests": process()}, body)
