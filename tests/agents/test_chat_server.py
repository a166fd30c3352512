"""The chat server over real HTTP, with the official client."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import httpx
import openai
import pytest

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.agents.types import StopReason
from support.agents_chat import chat_body, client, message, run, text_of
from support.agents_templates import MISTRAL, QWEN3, TemplateTokenizer


def test_two_turns_with_the_official_client():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            assert [m.id for m in (await api.models.list()).data] == ["policy"]
            assert (await api.models.retrieve("policy")).id == "policy"
            messages = [message(prompt)]
            for text in ("more", None):
                answer = await api.chat.completions.create(model="policy", messages=messages, logprobs=True)
                choice = answer.choices[0]
                assert choice.finish_reason == "stop"
                assert answer.usage.completion_tokens == len(choice.logprobs.content)
                messages += [choice.message.model_dump(exclude_none=True), message(text)]
        return {"reward": 2, "scores": 0.5, "extra_logs": {"k": 3}}

    (t,), engine = run(agent, ["one", "two"])
    assert text_of(t) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert (t.reward, t.score, t.stop_reason, len(t.turns)) == (2.0, 0.5, StopReason.DONE, 2)
    assert t.extra_logs == {
        "k": 3.0,
        "agent/template_breaks": 0.0,
        "agent/samples_per_rollout": 1.0,
        "agent/malformed_tool_calls": 0.0,
    }
    assert engine.requests[1].token_ids[: len(engine.requests[0].token_ids)] == engine.requests[0].token_ids
    assert len({r.sampling.seed for r in engine.requests}) == 2


def test_session_id_in_the_body_and_token_ids_in_the_answer():  # F15
    async def agent(executor, prompt, session_id):
        async with openai.AsyncOpenAI(base_url=executor.base_url, api_key=executor.api_key) as official:
            api: Any = official
            answer = await api.chat.completions.create(
                model="policy",
                messages=[message(prompt)],
                logprobs=True,
                extra_body={"session_id": session_id},
            )
        ids = answer.model_extra["token_ids"]
        assert ids["completion_token_ids"] == [*b"one", 257]
        assert [e.model_extra["token_id"] for e in answer.choices[0].logprobs.content] == [*b"one", 257]

    (t,), _ = run(agent, ["one"])
    assert not t.failed, t.failure


def test_streaming():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            stream = await api.chat.completions.create(
                model="policy", messages=[message(prompt)], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "word " * 40
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == 201

    (t,), _ = run(agent, ["word " * 40])
    assert len(t.turns) == 1


def test_parameters_reach_the_engine():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            await api.chat.completions.create(
                model="policy",
                messages=[message(prompt)],
                temperature=0.25,
                top_p=0.5,
                seed=7,
                stop=["#", "!"],
                max_completion_tokens=3,
                extra_body={"top_k": 4, "min_p": 0.1},
            )

    _, engine = run(agent, ["x"], sampling=SamplingParams(temperature=0.9))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 4, 0.1)
    assert (sampling.stop, sampling.max_tokens) == (("#", "!"), 3)


def test_several_choices_are_branches():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            answer = await api.chat.completions.create(model="policy", messages=[message(prompt)], n=3, seed=5)
            assert sorted(c.message.content for c in answer.choices) == ["a", "b", "c"]

    samples, engine = run(agent, ["a", "b", "c"])
    assert len(samples) == 3
    assert all(t.sample_index == 0 and t.reward == 1.0 and not t.failed for t in samples)
    assert len({r.sampling.seed for r in engine.requests}) == 3


def test_tool_calls_both_ways():  # B072, F11
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            messages = [message(prompt)]
            answer = await api.chat.completions.create(model="policy", messages=messages, tools=tools)
            (call,) = answer.choices[0].message.tool_calls
            assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "add")
            assert json.loads(call.function.arguments) == {"a": 1}
            messages += [
                answer.choices[0].message.model_dump(),
                {"role": "tool", "tool_call_id": call.id, "content": "2"},
            ]
            answer = await api.chat.completions.create(model="policy", messages=messages, tools=tools)
            assert answer.choices[0].message.content == "it is 2"
            stream = await api.chat.completions.create(model="policy", messages=messages, tools=tools, stream=True)
            chunks = [c async for c in stream]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    samples, _ = run(agent, [call, "it is 2", call], template=QWEN3)
    assert not samples[0].failed, samples[0].failure
    assert [len(t.turns) for t in samples] == [2, 1]


def test_tokenize_adds_no_special_tokens():  # O08, B030
    async def agent(executor, prompt, session_id):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {executor.api_key}"}) as http:
            url = executor.session_url(session_id).removesuffix("/v1") + "/tokenize"
            plain = (await http.post(url, json={"prompt": "ab"})).json()
            assert plain == {"tokens": [97, 98], "count": 2, "max_model_len": 4096}
            chat = (await http.post(url, json={"messages": [message("x")]})).json()
            expected = TemplateTokenizer().apply_chat_template([message("x")], add_generation_prompt=True)
            assert chat["tokens"] == expected
            assert (await http.post(url, json={})).status_code == 400
            await http.post(f"{executor.session_url(session_id)}/chat/completions", json=chat_body())

    (t,), _ = run(agent, ["x"])
    assert not t.failed, t.failure


def test_template_refusal_over_http():  # B082
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await api.chat.completions.create(model="policy", messages=[message("a"), message("b")])
            await api.chat.completions.create(model="policy", messages=[message("a")])

    (t,), _ = run(agent, ["x"], template=MISTRAL)
    assert not t.failed


def test_engine_failure_is_a_503_and_the_session_goes_on():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            with pytest.raises(openai.InternalServerError, match="engine 0 is down"):
                await api.chat.completions.create(model="policy", messages=[message("a")])
            await api.chat.completions.create(model="policy", messages=[message("a")])

    (t,), _ = run(agent, [EngineError("engine 0 is down"), "x"])
    assert (t.failed, len(t.turns)) == (False, 1)


def test_invalid_logprobs_answer_in_valid_json_and_flag_the_sample():  # B085
    nan, inf = float("nan"), float("-inf")
    generation = Generation(token_ids=[1, 2, 3], logprobs=[inf, nan, -0.5], versions=[0] * 3, finish_reason="stop")

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            answer = await api.chat.completions.create(model="policy", messages=[message("a")], logprobs=True)
        assert [e.logprob for e in answer.choices[0].logprobs.content] == [-9999.0, -9999.0, -0.5]

    (t,), _ = run(agent, [generation])
    assert t.failed
    assert t.failure is not None
    assert "logprob 0 of call 1 is invalid: -inf" in t.failure.message


def test_client_that_leaves_cancels_its_generation():
    cancelled = []

    async def script(token_ids, sampling):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id, timeout=2.0) as api:
            with pytest.raises(openai.APITimeoutError):
                await api.chat.completions.create(model="policy", messages=[message("a")])
        for _ in range(3000):
            if cancelled:
                break
            await asyncio.sleep(0.02)
        return 0.5

    (t,), _ = run(agent, script)
    assert cancelled == [True]
    assert t.failure is not None
    assert "without a call" in t.failure.message


def test_client_that_leaves_in_mid_stream():
    async def agent(executor, prompt, session_id):
        headers = {"Authorization": f"Bearer {executor.api_key}"}
        url = f"{executor.session_url(session_id)}/chat/completions"
        async with (
            httpx.AsyncClient(headers=headers) as http,
            http.stream("POST", url, json=chat_body(stream=True)) as reply,
        ):
            async for _ in reply.aiter_lines():
                break
        async with client(executor, session_id) as api:
            answer = await api.chat.completions.create(model="policy", messages=[message("hi")], max_tokens=5)
            assert answer.choices[0].message.content == "wwwww"

    samples, _ = run(agent, ["w" * 300_000], max_length=900_000)
    assert [t.turns[-1].end - t.turns[-1].start for t in samples][-1] == 5


def test_two_hundred_parallel_sessions_do_not_mix():
    tokenizer = TemplateTokenizer()

    async def script(token_ids, sampling):
        await asyncio.sleep(0.001 * (sum(token_ids) % 7))
        text = tokenizer.decode(token_ids)
        return "echo " + text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]

    shared: list[httpx.AsyncClient] = []
    finished = []

    async def agent(executor, prompt, session_id):
        if not shared:
            shared.append(httpx.AsyncClient(timeout=250))
        headers = {"Authorization": f"Bearer {executor.api_key}"}
        url = f"{executor.session_url(session_id)}/chat/completions"
        messages = []
        for turn in range(3):
            messages.append(message(f"{session_id}-{turn}"))
            reply = await shared[0].post(url, json=chat_body(messages=messages), headers=headers)
            answer = reply.json()["choices"][0]["message"]
            assert answer["content"] == f"echo {session_id}-{turn}"
            messages.append(answer)
        finished.append(session_id)
        if len(finished) == 200:
            await shared[0].aclose()

    samples, _ = run(agent, script, n_samples=200, timeout=250.0)
    assert len(samples) == 200
    assert not [t.failure for t in samples if t.failed]
    for t in samples:
        assert len(t.turns) == 3
        name = text_of(t).removeprefix("<|im_start|>user\n").split("-0<")[0]
        assert text_of(t).count(name) == 6


def test_the_same_session_twice_in_parallel():  # O08
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            first = await api.chat.completions.create(model="policy", messages=[message("a")])
            history = [message("a"), first.choices[0].message.model_dump(exclude_none=True)]
            await asyncio.gather(
                *(api.chat.completions.create(model="policy", messages=[*history, message(f"b{i}")]) for i in range(2))
            )

    samples, _ = run(agent, ["one", "two", "two"], delay=0.02)
    assert sorted(len(t.turns) for t in samples) == [1, 2]
    assert sorted(t.num_trainable for t in samples) == [4, 8]


def test_context_exceeded_is_a_truncated_sample():  # B086
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            messages = [message("a")]
            while True:
                try:
                    answer = await api.chat.completions.create(model="policy", messages=messages)
                except openai.BadRequestError as error:
                    return 0.25 if error.code == "context_length_exceeded" else None
                messages += [answer.choices[0].message.model_dump(exclude_none=True), message("more")]

    (t,), _ = run(agent, ["answer"], max_length=200)
    assert (t.truncated, t.reward, t.failed) == (True, 0.25, False)
    assert len(t.token_ids) <= 200


def test_n02_a_reply_that_is_cut_makes_all_samples_of_the_episode_truncated():
    """They share one reward, so what a penalty looks at is the episode."""

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            for text in ("a", "b"):  # the second call edits the history: a branch of its own
                await api.chat.completions.create(model="policy", messages=[message(text)])
        return 1.0

    samples, _ = run(agent, ["long answer", "two"], max_new_tokens=4)
    assert [t.turns[0].finish_reason for t in samples] == ["length", "stop"]
    assert [t.stop_reason for t in samples] == [StopReason.LENGTH] * 2


def rewarded(*named, **result):
    """An agent of three calls, the last in a conversation of its own. named: rewards by place of the call."""

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            messages, ids = [message(prompt)], []
            for text in ("more", "again"):
                answer = await api.chat.completions.create(model="policy", messages=messages)
                messages += [message(answer.choices[0].message.content, "assistant"), message(text)]
                ids.append(answer.id)
            ids.append((await api.chat.completions.create(model="policy", messages=[message("new")])).id)
        return {"turn_rewards": {ids[place]: reward for place, reward in named}, **result}

    return agent


@pytest.mark.parametrize(
    "agent",
    [
        rewarded(turn_rewards=[0.5, 0.0, 0.25]),
        rewarded((0, 0.5), (2, 0.25)),
        rewarded((2, 0.25), (0, 0.5), reward=0.75),
    ],
)
def test_rewards_of_single_calls(agent):
    samples, _ = run(agent, ["one", "two", "three"])
    assert [[turn.reward for turn in t.turns] for t in samples] == [[0.5, 0.0], [0.25]]
    assert [(t.reward, t.score) for t in samples] == [(0.75, 0.75)] * 2


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (rewarded(turn_rewards=[1.0]), 'returned 1 "turn_rewards" for 3 turns'),
        (rewarded(turn_rewards={"chatcmpl-x": 1.0}), "has the id ['chatcmpl-x']"),
        (rewarded((0, float("nan"))), "no finite numbers"),
        (rewarded((0, 1.0), reward=2.0), "beside turn rewards that add up to 1.0"),
    ],
)
def test_wrong_rewards_of_single_calls(agent, text):
    (t,), _ = run(agent, ["one", "two", "three"])
    assert t.failure is not None
    assert text in t.failure.message


@pytest.mark.parametrize(("result", "text"), [("no", "must be one number"), ({"scores": 1}, "must return a reward")])
def test_run_agent_must_return_a_reward(result, text):
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            await api.chat.completions.create(model="policy", messages=[message("a")])
        return result

    (t,), _ = run(agent, ["x"])
    assert t.failure is not None
    assert text in t.failure.message


def test_an_unmodified_agent_in_another_process():
    program = """
        import openai
        answer = openai.OpenAI().chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "from outside"}]
        )
        print(answer.choices[0].message.content)
    """

    async def agent(executor, prompt, session_id):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(program),
            stdout=subprocess.PIPE,
            env={**os.environ, **executor.environment(session_id)},
        )
        out, _ = await process.communicate()
        return {"reward": float(out.decode().strip() == "hello there")}

    (t,), _ = run(agent, ["hello there"], timeout=250.0)
    assert t.reward == 1.0
    assert "from outside" in text_of(t)
