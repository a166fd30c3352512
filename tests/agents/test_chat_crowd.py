"""200 episodes at once over real HTTP, whose clients leave, hang up, read slowly and ask again: nothing leaks."""

import asyncio
import contextlib
import json
import os
import random
from collections import Counter

import httpx

from openrlhf.agents.testing import ScriptedEngine, make_context
from openrlhf.agents.types import PromptItem
from support.agents_chat import Executor, message
from support.agents_templates import CHATML, TemplateTokenizer

EPISODES, TURNS = 200, 4


class Crowd:
    """The agents, and an engine that takes its time and remembers which answer it gave to which prompt."""

    def __init__(self):
        self.random = random.Random(7)
        self.tokenizer = TemplateTokenizer(CHATML)
        self.engine = ScriptedEngine(self.script, tokenizer=self.tokenizer, keep_requests=False)
        self.given: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.done: Counter[str] = Counter()

    async def script(self, token_ids, sampling):
        text = f"answer {self.engine.num_requests}"
        await asyncio.sleep(self.random.random() / 50)
        end = self.tokenizer.eos_token_id
        answer = [*self.tokenizer.encode(text, add_special_tokens=False), end]
        self.given.add((tuple(token_ids), tuple(answer)))
        return answer

    async def agent(self, executor, prompt, session_id):
        """Some turns, each after a random fault or none; one agent in twenty dies, and one leaves a call behind."""
        history, left, fate = [message(prompt)], None, self.random.random()
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=False) as http:
            ask = Asking(executor, session_id, http)
            for turn in range(TURNS):
                fault = self.random.choice(FAULTS)
                await fault(ask, history, self.random.random() / 60)
                self.done[fault.__name__] += 1
                history += [message(await ask.plainly(history), "assistant"), message(f"more {turn}")]
                if fate < 0.05:
                    raise RuntimeError("an agent that dies")
            if fate > 0.95:
                left = asyncio.ensure_future(ask.plainly(history))
                await asyncio.sleep(0.002)
        if left is not None:
            left.cancel()
        return {"reward": 1.0, "extra_logs": {"answers": TURNS}}


class Asking:
    """The ways to call."""

    def __init__(self, executor, session_id, http):
        self.url, self.http = f"{executor.session_url(session_id)}/chat/completions", http
        self.key = executor.api_key

    async def plainly(self, history):
        headers = {"Authorization": f"Bearer {self.key}"}
        reply = await self.http.post(self.url, json={"model": "policy", "messages": history}, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]["content"]

    @contextlib.asynccontextmanager
    async def by_hand(self, history, **fields):
        """A connection with a request in its bytes, and one that is closed however its user leaves."""
        url = httpx.URL(self.url)
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        body = json.dumps({"model": "policy", "messages": history, **fields}).encode()
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {self.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        try:
            yield reader, writer, head.encode() + body
        finally:
            writer.transport.abort()


async def nothing(ask, history, wait): ...


async def cancelled(ask, history, wait):
    call = asyncio.ensure_future(ask.plainly(history))
    await asyncio.sleep(wait)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def asked_twice(ask, history, wait):
    await asyncio.gather(ask.plainly(history), ask.plainly(history))


async def hung_up(ask, history, wait):
    async with ask.by_hand(history) as (_, writer, request):
        writer.write(request)
        await asyncio.sleep(wait)


async def hung_up_in_the_body(ask, history, wait):
    async with ask.by_hand(history) as (_, writer, request):
        writer.write(request[:-5])
        await asyncio.sleep(wait)


async def hung_up_in_a_stream(ask, history, wait):
    async with ask.by_hand(history, stream=True) as (reader, writer, request):
        writer.write(request)
        await reader.read(40)


async def slowly(ask, history, wait):
    async with ask.by_hand(history, stream=True) as (reader, writer, request):
        writer.write(request)
        received = b""
        while piece := await reader.read(200):
            received += piece
            await asyncio.sleep(wait / 10)
        assert b"data: [DONE]" in received


FAULTS = [nothing, cancelled, asked_twice, hung_up, hung_up_in_the_body, hung_up_in_a_stream, slowly]


def open_things(executor):
    state = executor._server._server.server_state
    numbers = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    return numbers, len(executor._server.sessions), len(state.connections), len(state.tasks)


async def group(executor, crowd, episodes):
    context = make_context(crowd.engine, tokenizer=crowd.tokenizer, n_samples=episodes, timeout=200.0)
    return await executor.run_group(PromptItem(group_id="g", prompt="hi"), context)


def test_two_hundred_episodes_at_once_leave_nothing_and_are_exact():
    crowd = Crowd()

    async def main():
        executor = Executor(crowd.agent)
        try:
            await group(executor, crowd, 2)
            before = await settled(executor)
            samples = await group(executor, crowd, EPISODES)
            assert await settled(executor) == before
            return samples
        finally:
            await executor.close()

    async def settled(executor):
        """What is open, when the server has seen that its clients are gone."""
        async with asyncio.timeout(60):
            while open_things(executor)[1:] != (0, 0, 0):  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)
        return open_things(executor)

    samples = asyncio.run(main())
    assert set(crowd.done) == {fault.__name__ for fault in FAULTS}
    assert {sample.sample_index for sample in samples} == set(range(EPISODES))
    failed = [sample for sample in samples if sample.failure]
    assert failed
    assert {sample.failure.message.split(":")[-1].strip() for sample in failed} == {"an agent that dies"}
    turns = Counter()
    for sample in samples:
        check(sample, crowd.given)
        turns[sample.sample_index] += 0 if sample.failure else len(sample.turns)
    finished = {sample.sample_index for sample in samples if not sample.failure}
    assert all(turns[index] >= TURNS for index in finished)


def check(sample, given):
    """Every turn is an answer of the engine to exactly the tokens before it, and nothing else is trained."""
    trained = [0] * len(sample.token_ids)
    for turn in sample.turns:
        answer = sample.token_ids[turn.start : turn.end]
        assert (tuple(sample.token_ids[: turn.start]), tuple(answer)) in given
        if not sample.failure:
            trained[turn.start : turn.end] = [1] * len(answer)
    assert list(sample.trainable) == trained
    assert [version >= 0 for version in sample.versions] == [bool(i) for i in trained]
    assert [logprob < 0 for logprob in sample.logprobs] == [bool(i) for i in trained]
