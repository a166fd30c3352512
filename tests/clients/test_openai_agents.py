# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The OpenAI Agents SDK, unmodified, over both of its formats: tools over several turns, streams, handoffs, schemas."""

import openai
import pytest
from pydantic import BaseModel

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from support.agents_chat import run
from support.agents_templates import QWEN3, TemplateTokenizer
from support.exact_tokens import SamplingEngine, check_exact

set_tracing_disabled(True)
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


def call(a, b):
    """A call as no template writes it: order of keys and blanks would be lost if it were written again."""
    written = f'{{"arguments":  {{"b":{b}, "a" :{a}}}, "name":"add"}}'
    return f"<think>\nhm\n</think>\n\nI add.\n\n<tool_call>\n{written}\n</tool_call>"


@function_tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Sum(BaseModel):
    total: int


async def ask(agent, question, stream, **options):
    if not stream:
        return await Runner.run(agent, question, **options)
    result = Runner.run_streamed(agent, question, **options)
    async for _ in result.stream_events():
        pass
    return result


def play(script, talk, wire):
    """Runs `talk(model, prompt)` as one episode; returns its samples and the engine."""
    engine = SamplingEngine(script, tokenizer=TemplateTokenizer(QWEN3))

    async def agent(executor, prompt, session_id):
        url = executor.session_url(session_id)
        async with openai.AsyncOpenAI(base_url=url, api_key=executor.api_key, max_retries=0) as client:
            await talk(MODELS[wire](model="policy", openai_client=client), prompt)

    trajectories, _ = run(agent, engine, template=QWEN3, guided=True)
    for trajectory in trajectories:
        assert trajectory.failure is None, trajectory.failure
    return trajectories, engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", MODELS)
def test_tools_over_several_turns(wire, stream):
    outputs = []

    async def talk(model, prompt):
        agent = Agent(name="adder", instructions="Add.", tools=[add], model=model)
        outputs.append((await ask(agent, prompt, stream)).final_output)

    (sample,), engine = play([call(1, 2), call(3, 4), call(7, 5), "12"], talk, wire)
    check_exact(sample, engine)
    assert (outputs, len(sample.turns)) == (["12"], 4)


@pytest.mark.parametrize("wire", MODELS)
def test_calls_beside_each_other(wire):
    async def talk(model, prompt):
        settings = ModelSettings(parallel_tool_calls=True, temperature=0.5, max_tokens=400, metadata={"a": "b"})
        await ask(Agent(name="adder", tools=[add], model=model, model_settings=settings), prompt, False)

    two = call(1, 2) + "\n" + call(3, 4).partition("I add.\n\n")[2]
    (sample,), engine = play([two, "3 and 7"], talk, wire)
    check_exact(sample, engine)


@pytest.mark.parametrize("wire", MODELS)
def test_a_session_over_several_questions(wire):
    async def talk(model, prompt):
        agent, memory = Agent(name="adder", tools=[add], model=model), SQLiteSession("s")
        for question in (prompt, "and now?"):
            await ask(agent, question, True, session=memory)

    samples, engine = play([call(1, 2).partition("\n\n")[2], "3", call(3, 4).partition("\n\n")[2], "7"], talk, wire)
    (sample,) = samples
    check_exact(sample, engine)


@pytest.mark.parametrize("wire", MODELS)
def test_an_answer_of_a_type(wire):
    outputs = []

    async def talk(model, prompt):
        agent = Agent(name="adder", tools=[add], model=model, output_type=Sum)
        outputs.append((await ask(agent, prompt, False)).final_output)

    (sample,), engine = play([call(1, 2), '{"total": 3}'], talk, wire)
    check_exact(sample, engine)
    assert outputs == [Sum(total=3)]


def test_state_on_the_server():
    async def talk(model, prompt):
        agent = Agent(name="adder", tools=[add], model=model)
        await ask(agent, prompt, True, auto_previous_response_id=True)

    (sample,), engine = play([call(1, 2), call(3, 4), "7"], talk, "responses")
    check_exact(sample, engine)


@pytest.mark.parametrize("wire", MODELS)
def test_a_handoff_to_another_agent_is_a_sample_of_its_own(wire):
    async def talk(model, prompt):
        expert = Agent(name="expert", instructions="You are the expert.", model=model)
        first = Agent(name="first", instructions="Hand over.", handoffs=[expert], model=model)
        result = await ask(first, prompt, False, run_config=RunConfig(workflow_name="w"))
        assert result.final_output == "done"

    handoff = '<tool_call>\n{"name": "transfer_to_expert", "arguments": {}}\n</tool_call>'
    samples, engine = play([handoff, "done"], talk, wire)
    assert len(samples) == 2  # other instructions are another prompt
    for sample, request, tokens in zip(samples, engine.requests, engine.samples, strict=True):
        assert sample.token_ids == [*request.token_ids, *tokens]
