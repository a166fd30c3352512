from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from openrlhf.agents.rewards import RewardError, RewardResult, RewardTimeoutError
from openrlhf.launcher.json_servers import RetryPolicy
from openrlhf.launcher.rewards.http import HttpRewardSource

QUICK = RetryPolicy(timeout=2.0, attempts=4, backoff=0.01)
Answer = Callable[[int, dict[str, str], Any], Any]
"""(number of the request, headers, JSON body) -> bytes to send raw, (status, text), a JSON answer, or an awaitable."""


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[str, list[Any]]]:
    """A small HTTP server; yields its URL and the list of the bodies it got."""
    bodies: list[Any] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")[1:]
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                bodies.append(body)
                reply = answer(len(bodies) - 1, headers, body)
                reply = await reply if isinstance(reply, Awaitable) else reply
                if isinstance(reply, bytes):
                    writer.write(reply)
                    break
                status, text = reply if isinstance(reply, tuple) else (200, json.dumps(reply))
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    running = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/get_reward", bodies
    finally:
        running.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(urls: list[str], *, retry: RetryPolicy = QUICK, api_key: str | None = None) -> RewardResult:
    source = HttpRewardSource(urls, retry=retry, api_key=api_key)
    try:
        return await source.score(["p1 a", "p1 b"], ["p1", "p1"], ["1", None])
    finally:
        await source.close()


def run(answer: Answer, **options: Any) -> tuple[RewardResult | Exception, list[Any]]:
    """One request to one server: the result or the error, and what the server got."""

    async def main() -> tuple[RewardResult | Exception, list[Any]]:
        async with server(answer) as (url, bodies):
            try:
                return await ask([url], **options), bodies
            except (RewardError, ValueError) as error:
                return error, bodies

    return asyncio.run(main())


def test_one_request_per_group() -> None:
    result, bodies = run(lambda *_: {"rewards": [1, 0.5], "scores": [1.0, 0.0], "extra_logs": {"x": [3, 4]}})
    assert isinstance(result, RewardResult)
    assert bodies == [{"query": ["p1 a", "p1 b"], "prompts": ["p1", "p1"], "labels": ["1", None]}]
    assert (result.rewards, result.scores) == ([1.0, 0.5], [1.0, 0.0])
    assert result.extra_logs == [{"x": 3.0}, {"x": 4.0}]


def test_scores_default_to_rewards() -> None:
    result, _ = run(lambda *_: {"rewards": [1, 0]})
    assert isinstance(result, RewardResult)
    assert result.scores == [1.0, 0.0]


def test_b014_null_and_nan_fail_their_sample_only() -> None:
    result, _ = run(lambda *_: (200, '{"rewards": [NaN, 1]}'))
    assert isinstance(result, RewardResult)
    assert result.rewards == [None, 1.0]
    assert result.failures[0] is not None
    assert result.failures[0].border == "reward"


def test_api_key_is_a_bearer_token() -> None:
    def answer(_: int, headers: dict[str, str], __: Any) -> Any:
        return {"rewards": [1, 1]} if headers["authorization"] == "Bearer abc" else (401, "no")

    assert isinstance(run(answer, api_key="abc")[0], RewardResult)
    assert "HTTP 401" in str(run(answer, api_key="other")[0])


@pytest.mark.parametrize("failure", [(500, "oops"), (503, "busy"), (429, "slow down"), b"", b"HTTP/1.1 200 OK\r\n"])
def test_b133_temporary_failures_are_repeated(failure: Any) -> None:
    result, bodies = run(lambda n, *_: failure if n < 2 else {"rewards": [1, 1]})
    assert isinstance(result, RewardResult)
    assert len(bodies) == 3


def test_b133_a_connection_closed_in_the_body_is_repeated() -> None:
    cut = b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"rewards": [1,'
    result, bodies = run(lambda n, *_: cut if n == 0 else {"rewards": [1, 1]})
    assert isinstance(result, RewardResult)
    assert len(bodies) == 2


def test_b133_it_gives_up_after_the_attempts() -> None:
    result, bodies = run(lambda *_: (500, "broken for good"))
    assert len(bodies) == QUICK.attempts
    assert isinstance(result, RewardError)
    assert "/get_reward: gave up after 4 attempts" in str(result)
    assert "HTTP 500" in str(result)
    assert "broken for good" in str(result)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_b133_other_answers_are_not_repeated(status: int) -> None:
    result, bodies = run(lambda *_: (status, "because"))
    assert isinstance(result, RewardError)
    assert f"HTTP {status}" in str(result)
    assert "'because'" in str(result)
    assert len(bodies) == 1


def test_b133_a_server_that_hangs_is_given_up() -> None:
    async def hang() -> Any:
        await asyncio.sleep(30)

    result, bodies = run(lambda *_: hang(), retry=RetryPolicy(timeout=0.2, attempts=2, backoff=0.01))
    assert isinstance(result, RewardTimeoutError)
    assert "no answer within 0.2 s (--reward.timeout)" in str(result)
    assert len(bodies) == 2


def test_a_page_is_no_answer() -> None:
    result, bodies = run(lambda *_: (200, "<html>hello</html>"))
    assert isinstance(result, RewardError)
    assert "expected JSON, got HTTP 200 X: '<html>hello</html>'" in str(result)
    assert len(bodies) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1, 2, 3]}, "got 3, expected 2"),
        ({"rewards": ["good", "bad"]}, "must be one number"),
        ({"reward": [1, 2]}, "must return a dict with"),
    ],
)
def test_b131_wrong_answers_name_the_server(answer: Any, message: str) -> None:
    result, _ = run(lambda *_: answer)
    assert isinstance(result, ValueError)
    assert "http://127.0.0.1" in str(result)
    assert message in str(result)


def test_a_server_that_is_down_is_replaced_by_another() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{free.getsockname()[1]}/"

        async def main() -> list[RewardResult]:
            async with server(lambda *_: {"rewards": [1, 1]}) as (url, _):
                return [await ask([down, url]) for _ in range(3)]

        assert all(r.rewards == [1.0, 1.0] for r in asyncio.run(main()))


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        with pytest.raises(RewardError, match=rf"{url}: gave up after 4 attempts .*ConnectError"):
            asyncio.run(ask([url]))


def test_several_servers_share_the_load_within_the_limit() -> None:
    running, most = 0, 0

    async def slow(body: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return {"rewards": [float(q) for q in body["query"]]}

    def answer(_: int, __: dict[str, str], body: Any) -> Any:
        return slow(body)

    async def main() -> tuple[list[RewardResult], int, int]:
        async with server(answer) as (first, got_first), server(answer) as (second, got_second):
            source = HttpRewardSource([first, second], retry=QUICK, max_concurrency=8)
            results = await asyncio.gather(*(source.score([str(i)], [""], [""]) for i in range(64)))
            await source.close()
            return results, len(got_first), len(got_second)

    results, first, second = asyncio.run(main())
    assert [r.rewards for r in results] == [[float(i)] for i in range(64)]
    assert first + second == 64
    assert min(first, second) >= 24
    assert most <= 8


def test_pauses() -> None:
    policy = RetryPolicy(backoff=0.5, max_backoff=3.0)
    assert [policy.pause(i, None) for i in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert policy.pause(0, 2.0) == 2.0
    assert policy.pause(0, 60.0) == 3.0


def test_wrong_urls() -> None:
    with pytest.raises(ValueError, match=r"--reward\.remote_url 'ftp://x'"):
        HttpRewardSource(["ftp://x"])
    with pytest.raises(ValueError, match="no URL"):
        HttpRewardSource([])


def test_l04_no_message_shows_the_password_of_a_url(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> str:
        async with server(lambda number, headers, body: (403, "no")) as (url, _):
            with pytest.raises(RewardError) as refused:
                await ask([url.replace("http://", "http://me:s3cr3t-Wert@")])
        with pytest.raises(RewardError) as gone:
            await ask(["http://me:s3cr3t-Wert@127.0.0.1:9/x"])
        return f"{refused.value} {gone.value}"

    text = asyncio.run(work())
    assert text.count("me:***@") == 2
    assert "s3cr3t-Wert" not in text + caplog.text


def test_columns_are_a_field_of_their_own_and_absent_without() -> None:
    async def main() -> list[Any]:
        async with server(lambda number, headers, body: {"rewards": [1.0, 2.0]}) as (url, bodies):
            source = HttpRewardSource([url], retry=QUICK)
            try:
                for columns in (None, {}, {"level": [3, 3], "tests": [[{"in": None}]] * 2}):
                    await source.score(["p a", "p b"], ["p", "p"], ["1", None], columns=columns)
            finally:
                await source.close()
            return bodies

    first, second, third = asyncio.run(main())
    assert first == second == {"query": ["p a", "p b"], "prompts": ["p", "p"], "labels": ["1", None]}
    assert third == first | {"columns": {"level": [3, 3], "tests": [[{"in": None}], [{"in": None}]]}}
