"""Tools of real MCP servers, the library's own: what is offered, called and returned."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")
from openrlhf.agents.mcp.tools import McpExecutor, McpServer, McpTools
from openrlhf.agents.testing import ScriptedEngine, make_context
from openrlhf.agents.testing.episodes import _run_and_close
from openrlhf.agents.types import PromptItem, StopReason
from support.agents_chat import client, message, text_of
from support.agents_templates import QWEN3, TemplateTokenizer
from support.leftovers import nothing_left
from support.mcp_play import SCRIPT, calls, free_port, play, process, serving

UNSEEN = ("memo://2 of the type application/zip", "audio of the type audio/wav")


def test_what_is_offered_and_called():
    async def body(tools):
        offered = next(tool["function"] for tool in tools.offered if tool["function"]["name"] == "add")
        assert offered["description"] == "The sum of two numbers."
        assert offered["parameters"]["required"] == ["a", "b"]
        result = await tools.call("add", {"a": 2, "b": 3})
        assert (result.text, result.content, result.is_error) == ("5", "5", False)
        assert result.structured == {"result": 5}
        asked = [
            {"id": "1", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}},
            {"id": "2", "function": {"name": "add", "arguments": "{"}},
        ]
        first, second = await tools.answer(asked)
        assert first == {"role": "tool", "tool_call_id": "1", "content": "2"}
        assert second["content"].startswith("Error: the arguments of add are wrong: ")
        assert await tools.answer(None) == []
        assert tools.logs == {"mcp/calls": 3.0, "mcp/errors": 1.0}

    play({"tests": process()}, body)


def test_what_a_model_can_mend_is_told_to_it():
    async def body(tools):
        wrong = {
            "the name": await tools.call("ad", {}),
            "a type": await tools.call("add", {"a": "one", "b": 1}),
            "one missing": await tools.call("add", '{"a": 1}'),
            "no object": await tools.call("add", "[1, 2]"),
            "no number": await tools.call("add", '{"a": NaN, "b": 1}'),
            "no JSON": await tools.call("add", {"a": {1}}),
            "too deep": await tools.call("keep", '{"word": ' + "[" * 3000),
            "the tool says": await tools.call("refuse"),
        }
        assert all(result.is_error for result in wrong.values())
        assert wrong["the name"].text.startswith("there is no tool 'ad'; there are add, keep, ")
        assert "'one' is not of type 'integer'" in wrong["a type"].text
        assert "'b' is a required property" in wrong["one missing"].text
        assert wrong["the tool says"].content == "Error: Error executing tool refuse: not today"
        assert (await tools.call("add", {"a": 1, "b": 1})).text == "2"
        half = await tools.call("keep", {"word": "half \ud83d"})
        assert half.text == "half \ufffd"

    play({"tests": process()}, body)


def test_parts_of_results():
    async def body(tools):
        picture = await tools.call("picture")
        (url,) = picture.images
        assert url.startswith("data:image/png;base64,iVBOR")
        assert picture.content == [{"type": "image_url", "image_url": {"url": url}}]
        mixed = await tools.call("mixed")
        unseen = [f"[{what}, which is not shown]" for what in UNSEEN]
        assert mixed.text.split("\n") == ["half ", "a note", *unseen, "[more: memo://3]"]
        long = await tools.call("long")
        assert long.text == "x" * 300 + " [99700 more characters]"

    play({"tests": process(max_characters=300)}, body)


def test_all_pages_of_a_list():
    async def body(tools):
        assert [tool["function"]["name"] for tool in tools.offered] == ["tool0", "tool1", "tool2"]
        assert (await tools.call("tool2", {})).text == "tool2"

    play({"tests": process("paged")}, body)


def test_a_choice_of_tools_and_a_prefix():
    async def body(tools):
        assert [tool["function"]["name"] for tool in tools.offered] == ["add", "b_add"]
        return (await tools.call("b_add", {"a": 1, "b": 4})).text

    servers = {"a": process(tools=["add"]), "b": process(tools=["add"], prefix="b_")}
    assert play(servers, body) == ["5"]


def test_what_a_process_finds(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "of ours")
    monkeypatch.setenv("OPENRLHF_RUN_ID", "run")
    (result,) = play({"tests": process(variables={"MODE": "test"})}, calls("environment"))
    found = result.structured
    assert "SECRET_KEY" not in found
    assert (found["MODE"], found["OPENRLHF_RUN_ID"]) == ("test", "run")
    assert Path(found["folder"]).name.startswith("mcp-")
    assert not Path(found["folder"]).exists()
    here = str(Path(SCRIPT).parent)
    assert play({"tests": process(folder=here)}, calls("environment"))[0].structured["folder"] == here


def test_over_http():
    async def main():
        async with serving(free_port()) as url:
            own = McpServer(url=url, prefix="own_", call_timeout=1)
            servers = McpTools({"shared": McpServer(url=url, shared=True), "own": own})
            async with servers.episode() as tools:
                assert (await tools.call("add", {"a": 2, "b": 3})).structured == {"result": 5}
                assert (await tools.call("own_picture")).images[0].startswith("data:image/png;base64,")
                assert (await tools.call("own_refuse")).is_error
                assert (await tools.call("own_slow", {"seconds": 60})).text == "slow gave no result within 1 s"
                together = await asyncio.gather(*(tools.call("own_add", {"a": i, "b": i}) for i in range(8)))
                assert [result.text for result in together] == [str(2 * i) for i in range(8)]
            await servers.close()

    with nothing_left():
        asyncio.run(main())


SERVERS = {"tests": process(tools=["add", "die"])}


class Calculator(McpExecutor):
    """Asks the policy until it calls no tool."""

    servers = SERVERS

    async def run_agent(self, prompt, label, session_id):
        messages = [message(prompt)]
        async with self.tools() as tools, client(self, session_id) as api:
            while True:
                answer = await api.chat.completions.create(model="policy", messages=messages, tools=tools.offered)
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    return {"reward": float(said.content == label), "extra_logs": tools.logs}
                messages += await tools.answer(said.tool_calls)


def roll_out(answers, n_samples=1):
    tokenizer = TemplateTokenizer(QWEN3)
    context = make_context(
        ScriptedEngine(answers, tokenizer=tokenizer), tokenizer=tokenizer, n_samples=n_samples, timeout=120.0
    )
    item = PromptItem(group_id="g", prompt="2+3?", label="5")
    with nothing_left():
        return asyncio.run(_run_and_close(Calculator(), item, context))


def test_an_agent_with_tools():
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    (t,) = roll_out([f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "5"])
    assert t.failure is None
    assert (t.reward, len(t.turns), t.stop_reason) == (1.0, 2, StopReason.DONE)
    assert (t.extra_logs["mcp/calls"], t.extra_logs["mcp/errors"]) == (1.0, 0.0)
    text = text_of(t)
    assert "The sum of two numbers." in text
    assert "<tool_response>\n5\n</tool_response>" in text


def test_the_samples_of_a_group_whose_server_dies_fail_by_name():
    call = {"name": "die", "arguments": {}}
    group = roll_out([f"<tool_call>\n{json.dumps(call)}\n</tool_call>"], n_samples=2)
    for t in group:
        assert t.failure is not None
        assert t.failure.message.startswith("the MCP server 'tests' is gone or hangs since a call of die")


SETTINGS = {
    "a command line": ({"command": "python server.py"}, "command must be the program and its arguments"),
    "neither": ({}, "give either command or url"),
    "both": ({"command": ("x",), "url": "http://x"}, "give either command or url"),
    "no time": ({"url": "http://x", "call_timeout": 0}, "call_timeout must be above 0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(name):
    values: Any = SETTINGS[name][0]
    with pytest.raises(ValueError, match=SETTINGS[name][1]):
        McpServer(**values)


def test_keys_are_not_shown():
    assert "key" not in repr(McpServer(url="http://x", headers={"Authorization": "Bearer key"}))
