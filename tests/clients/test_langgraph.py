# pyright: reportMissingImports=false
"""LangGraph with LangChain's models of both vendors, unmodified: tools over several turns, streams, schemas."""

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from support.agents_chat import run
from support.agents_templates import QWEN3, TemplateTokenizer
from support.exact_tokens import SamplingEngine, check_exact

CALL = '<think>\nhm\n</think>\n\nI add.\n\n<tool_call>\n{"arguments":  {"b":%d, "a" :%d}, "name":"add"}\n</tool_call>'


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def chat(url, key, **options):
    return ChatOpenAI(model="policy", base_url=url, api_key=key, max_retries=0, **options)


def responses(url, key, **options):
    return chat(url, key, use_responses_api=True, **options)


def responses_without_state(url, key, **options):
    return responses(url, key, output_version="responses/v1", include=["reasoning.encrypted_content"], **options)


def messages(url, key, **options):
    root = url.removesuffix("/v1")
    return ChatAnthropic(model="policy", base_url=root, api_key=key, max_retries=0, **options)


MODELS = [chat, responses, responses_without_state, messages]


def graph(model):
    """The usual loop of model and tools."""

    async def think(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", think)
    builder.add_node("tools", ToolNode([add]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder.compile()


def play(script, talk):
    engine = SamplingEngine(script, tokenizer=TemplateTokenizer(QWEN3))

    async def agent(executor, prompt, session_id):
        await talk(executor.session_url(session_id), executor.api_key)

    trajectories, _ = run(agent, engine, template=QWEN3, guided=True)
    for trajectory in trajectories:
        assert trajectory.failure is None, trajectory.failure
    return trajectories, engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("make", MODELS)
def test_tools_over_several_turns(make, stream):
    ends = []

    async def talk(url, key):
        agent = graph(make(url, key, streaming=stream).bind_tools([add]))
        start = {"messages": [SystemMessage("Add."), HumanMessage("hi")]}
        if stream:
            pieces = [piece async for piece, _ in agent.astream(start, stream_mode="messages")]
            ends.append("".join(piece.text for piece in pieces if piece.id == pieces[-1].id))
        else:
            ends.append((await agent.ainvoke(start))["messages"][-1].text)

    (sample,), engine = play([CALL % (2, 1), CALL % (4, 3), CALL % (5, 7), "12"], talk)
    check_exact(sample, engine)
    assert (len(sample.turns), ends[0].endswith("12")) == (4, True)


@pytest.mark.parametrize("make", MODELS)
def test_an_answer_of_a_schema(make):
    schema = {
        "title": "Sum", "description": "A sum.", "type": "object",
        "properties": {"total": {"type": "integer"}}, "required": ["total"], "additionalProperties": False,
    }  # fmt: skip
    said = []

    async def talk(url, key):
        model = make(url, key).with_structured_output(schema, method="json_schema")
        said.append(await model.ainvoke("hi"))

    (sample,), engine = play(['{"total": 3}'], talk)
    check_exact(sample, engine)
    assert said == [{"total": 3}]


@pytest.mark.parametrize("make", MODELS)
def test_a_tool_that_must_be_called(make):
    async def talk(url, key):
        model = make(url, key).bind_tools([add], tool_choice="add")
        answer = await model.ainvoke("hi")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]

    (sample,), engine = play([CALL % (2, 1)], talk)
    check_exact(sample, engine)


def test_thinking_comes_back_with_its_signature():
    async def talk(url, key):
        model = messages(url, key, max_tokens=3000, thinking={"type": "adaptive"})
        await graph(model.bind_tools([add])).ainvoke({"messages": [HumanMessage("hi")]})

    (sample,), engine = play([CALL % (2, 1), "<think>\nfine\n</think>\n\n3"], talk)
    check_exact(sample, engine)
