"""The chat server and clients that do the unexpected: roles, names, seeds, late calls, connections."""

import asyncio
import json
from collections import Counter

import httpx
import pytest

from openrlhf.agents import failures
from openrlhf.agents.chat.wires.completions_request import read_chat_request
from openrlhf.agents.engine import EngineError, Generation, RequestRefusedError, SamplingParams
from openrlhf.agents.types import StopReason
from support.agents_chat import Direct, chat_body, client, message, run
from support.agents_templates import CHATML, QWEN3
from support.launcher_tokenizer import CHATML as HF_CHATML
from support.launcher_tokenizer import byte_tokenizer

NAMED = CHATML.replace("m.role +", "m.role + (' ' + m.name if m.name else '') +")


# S03


HALVES = {  # as JSON spells them: what the policy sees
    r"a\ud83d": "a\ufffd",
    r"\ude00b": "\ufffdb",
    r"\ude00\ud83d": "\ufffd\ufffd",
    r"\ud83d\ude00": "\U0001f600",
}


@pytest.mark.parametrize(("spelled", "seen"), HALVES.items())
def test_s03_half_an_emoji_with_a_real_tokenizer(spelled, seen):
    with Direct(["fine"], tokenizer=byte_tokenizer(chat_template=HF_CHATML)) as direct:
        body = json.dumps(chat_body(messages=[message("TEXT")], stop=["TEXT"], user="TEXT")).replace("TEXT", spelled)
        reply = direct.post(body.encode())
        assert reply.status_code == 200, reply.text
        assert direct.prompts[0] == f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
        reply = direct.post(f'{{"prompt": "{spelled}"}}'.encode(), f"/s/{direct.session_id}/tokenize")
        assert reply.status_code == 200, reply.text
        assert direct.tokenizer.decode(reply.json()["tokens"]) == seen
        assert direct.post(f'{{"{spelled}": 1}}'.encode()).status_code == 400


# S04


def test_s04_an_idle_connection_lives_for_days():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            await api.chat.completions.create(model="policy", messages=[message(prompt)])
            (connection,) = executor._server._server.server_state.connections
            idle_until = connection.timeout_keep_alive_task.when()
        return (idle_until - asyncio.get_running_loop().time()) / 86400

    (t,), _ = run(agent, ["x"])
    assert t.reward is not None
    assert t.reward > 7


@pytest.mark.proof
def test_s04_six_seconds_between_two_calls():
    ports = []

    async def agent(executor, prompt, session_id):
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        headers = {"Authorization": f"Bearer {executor.api_key}"}
        url = f"{executor.session_url(session_id)}/chat/completions"
        async with httpx.AsyncClient(headers=headers, limits=limits) as http:
            for _ in range(2):
                reply = await http.post(url, json=chat_body())
                assert reply.status_code == 200
                ports.append(reply.extensions["network_stream"].get_extra_info("client_addr")[1])
                await asyncio.sleep(6)

    samples, _ = run(agent, ["x"])
    assert not samples[0].failed, samples[0].failure
    assert ports[0] == ports[1]


# S05

ROLES = {
    "User": "did you mean 'user'?", "human": "did you mean 'user'?", "model": "did you mean 'assistant'?",
    "function": "results of tools have the role 'tool'", "": "", None: "", 5: "", "narrator": "",
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_s05_unknown_roles_are_named(role):
    with Direct(["x"]) as direct:
        reply = direct.post(chat_body(messages=[message("a"), {"role": role, "content": "b", "name": "f"}]))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[1].role")
    assert error["message"].startswith(
        "messages[1].role must be one of 'system', 'user', 'assistant', 'tool', 'developer'"
    )
    assert ROLES[role] in error["message"]
    assert not direct.session.branches


def test_s05_developer_is_system():
    with Direct(["x"]) as direct:
        direct.say([message("Be brief.", "developer"), message("a")])
        assert direct.prompts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize("role", ["system", "tool"])
def test_s05_a_role_that_the_template_leaves_out(role):
    template = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}>"
    with Direct(["x"], template=template) as direct:
        reply = direct.post(chat_body(messages=[message("a"), message("b", role)]))
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == (
            f"messages[1]: the policy's chat template does not write messages of role {role!r}"
        )
        direct.say([message("a")])
    assert direct.prompts == ["a;>"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_s05_reasoning_that_the_template_leaves_out(name):
    history = [message("a"), {**message("b", "assistant"), name: "hm"}, message("c")]
    with Direct(["x"], template=CHATML) as direct:
        reply = direct.post(chat_body(messages=history))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[1].reasoning_content")
        direct.say([{**m, name: None} for m in history])
    with Direct(["x"], template=CHATML.replace("m.content", "(m.reasoning_content or '') + m.content")) as direct:
        direct.say(history)
        assert "<|im_start|>assistant\nhmb<|im_end|>" in direct.prompts[0]


# S06


def test_s06_names_that_the_template_does_not_write_change_nothing():
    with Direct(["one", "two"], template=CHATML) as direct:
        messages = [message("a")]
        messages += [{**direct.say(messages), "name": "bob", "id": 7}, {**message("b"), "name": "ann"}]
        direct.say(messages)
        assert len(direct.texts) == 1
        assert direct.session.template_breaks == 0


def test_s06_names_that_the_template_writes_branch_and_are_counted():
    with Direct(["one", "two"], template=NAMED) as direct:
        messages = [message("a")]
        messages += [{**direct.say(messages), "name": "bob"}, message("b")]
        direct.say(messages)
        assert len(direct.texts) == 2
        assert "<|im_start|>assistant bob\none<|im_end|>" in direct.texts[1]
        assert direct.session.template_breaks == 1


def test_s06_a_name_on_the_users_message_is_part_of_the_history():
    with Direct(["one", "two"], template=NAMED) as direct:
        messages = [{**message("a"), "name": "ann"}]
        messages += [direct.say(messages), message("b")]
        direct.say(messages)
        assert len(direct.texts) == 1


def test_s06_a_history_that_is_cut_into_other_messages_goes_on_by_its_text():
    template = (
        "{% for m in messages %}{% if loop.first or m.role != loop.previtem.role %}[{{ m.role }}]{% endif %}"
        "{{ m.content }}{% endfor %}[assistant]"
    )
    with Direct(["one", "two"], template=template) as direct:
        reply = direct.say([message("ab")], max_tokens=3)
        direct.say([message("a"), message("b"), reply, message("c")])
        assert direct.texts == ["[user]ab[assistant]one[user]c[assistant]two<|im_end|>"]


# Seeds and sampling


def test_a_fixed_seed_of_a_client_does_not_make_all_samples_equal(caplog, monkeypatch):
    monkeypatch.setattr(failures, "_said", set())

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            for seed in (7, 7, 8):
                await api.chat.completions.create(model="policy", messages=[message("a")], seed=seed, temperature=0.5)

    _, engine = run(agent, ["x"], n_samples=2)
    # of both samples, whose requests come in any order: one seed twice and one once
    assert sorted(Counter(r.sampling.seed for r in engine.requests).values()) == [1, 1, 2, 2]
    said = [record.getMessage() for record in caplog.records]
    assert sum("an agent asks for seed 7" in text for text in said) == 1


@pytest.mark.parametrize(("given", "engine"), [(-1, 2**63 - 1), (-(2**63), 0), (2**63 - 1, 2**63 - 1), (0, 0)])
def test_signed_seeds(given, engine):
    with Direct(["x"]) as direct:
        assert read_chat_request(chat_body(seed=given), direct.session).sampling.seed == engine


# What the engine refuses


def test_a_request_that_the_engine_refuses_is_not_sent_again():
    async def agent(executor, prompt, session_id):
        headers = {"Authorization": f"Bearer {executor.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:
            url = f"{executor.session_url(session_id)}/chat/completions"
            refused = await http.post(url, json=chat_body())
            failed = await http.post(url, json=chat_body())
            served = await http.post(url, json=chat_body())
        assert [r.status_code for r in (refused, failed, served)] == [400, 503, 200]
        assert refused.json()["error"]["code"] == "request_refused"
        assert "prompt too odd" in refused.json()["error"]["message"]

    (t,), _ = run(agent, [RequestRefusedError("prompt too odd"), EngineError("down"), "x"])
    assert (t.failed, len(t.turns)) == (False, 1)


def test_one_of_several_choices_that_fails_cancels_the_others():
    ended = []

    async def script(token_ids, sampling):
        if len(ended) == 0 and not waiting:
            waiting.append(True)
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append(True)
                raise
        return EngineError("down")

    waiting = []
    with Direct(script) as direct:
        assert direct.post(chat_body(n=2)).status_code == 503
        assert ended == [True]
        assert not direct.session.branches


# Length


def cut_then_done(executor, prompt, session_id):
    async def agent():
        async with client(executor, session_id) as api:
            messages = [message("a")]
            answer = await api.chat.completions.create(model="policy", messages=messages, max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
            messages += [answer.choices[0].message.model_dump(exclude_none=True), message("b")]
            await api.chat.completions.create(model="policy", messages=messages)
            await api.chat.completions.create(model="policy", messages=[message("another")])

    return agent()


def test_n02_a_turn_that_was_cut_by_length_makes_its_episode_truncated():
    samples, _ = run(cut_then_done, ["long", "x", "y"])
    assert [(len(t.turns), t.stop_reason, t.truncated) for t in samples] == [
        (2, StopReason.LENGTH, True),
        (1, StopReason.LENGTH, True),  # the other branch: one episode, one reward
    ]


def test_a_prompt_that_was_too_long_and_then_cut_is_no_truncated_episode():
    with Direct(["x"], max_length=60) as direct:
        assert direct.post(chat_body(messages=[message("y" * 100)])).status_code == 400
        assert direct.session.stop_reason is StopReason.LENGTH
        direct.say([message("y")])
        assert direct.session.stop_reason is StopReason.DONE


def test_refused_requests_use_no_turns():
    with Direct(["x"], max_turns=2) as direct:
        for changes in ({"min_tokens": 5000}, {"messages": [message("y" * 5000)]}, {"best_of": 2}):
            assert direct.post(chat_body(**changes)).status_code == 400
        direct.say([message("a")])
        direct.say([message("b")])
        reply = direct.post(chat_body())
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "max_turns")


# Late calls


@pytest.mark.parametrize("stream", [False, True])
def test_n13_a_late_call_does_not_reach_a_finished_sample(stream):
    started, ended, late = asyncio.Event(), asyncio.Event(), []

    async def script(token_ids, sampling):
        if len(token_ids) < 60:
            return "one"
        started.set()
        await ended.wait()
        return "two"

    async def call(executor, session_id):
        async with client(executor, session_id) as api:
            messages = [message("a"), message("one", "assistant"), message("b" * 60)]
            try:
                answer = await api.chat.completions.create(model="policy", messages=messages, stream=stream)
                late.append(200 if not stream else [chunk async for chunk in answer])
            except Exception as error:
                late.append(getattr(error, "status_code", None))

    tasks = []

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            await api.chat.completions.create(model="policy", messages=[message("a")])
        tasks.append(asyncio.create_task(call(executor, session_id)))
        await started.wait()

    def finish(executor):
        original = executor._server.remove

        def remove(session_id):
            original(session_id)
            ended.set()

        executor._server.remove = remove

    async def watched(executor, prompt, session_id):
        finish(executor)
        return await agent(executor, prompt, session_id)

    (t,), _ = run(watched, script)
    assert (len(t.turns), sum(t.trainable)) == (1, 4)
    assert late in ([404], [None], [])


def test_n13_a_call_that_was_generated_before_the_end_is_not_recorded_after_it():
    with Direct(["one", "two"]) as direct:
        direct.say([message("a")])
        session = direct.session
        request = read_chat_request(chat_body(), direct.session)
        plan = session.plan(request.conversation, None, {})
        late = direct.loop.run(session.generate(plan, SamplingParams()))
        direct.server.remove(direct.session_id)
        assert session.commit(plan, late, ("assistant", "two", (), ""), "two") is False
        assert len(session.branches) == 1
        assert direct.post(chat_body()).status_code == 404


def test_invalid_logprobs_of_a_call_that_is_not_recorded_fail_nothing():
    nan = Generation(token_ids=[1], logprobs=[float("nan")], versions=[0], finish_reason="stop")
    with Direct([nan, "x"]) as direct:
        request = read_chat_request(chat_body(), direct.session)
        plan = direct.session.plan(request.conversation, None, {})
        direct.loop.run(direct.session.generate(plan, SamplingParams()))  # its client went away
        direct.say([message("b")])
        assert direct.session.failure is None


def test_s02_tools_of_the_template_only():
    with Direct(["x"], template=QWEN3) as direct:
        tool = {"type": "function", "function": {"name": "add"}}
        assert direct.say([message("a")], tools=[tool]) == {"role": "assistant", "content": "x"}
