from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from openrlhf.launcher.serving import app
from openrlhf.launcher.serving.app import RewardService


class SumScorer:
    """One token per byte; the reward is the sum of the bytes."""

    max_len = 100

    def __init__(self) -> None:
        self.batches: list[int] = []

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.batches.append(len(rows))
        if any(row == list(b"crash") for row in rows):
            raise RuntimeError("the model crashed")
        return [float(sum(row)) for row in rows]


def serve(work: Callable[[httpx.AsyncClient], Awaitable[Any]], scorer: SumScorer | None = None, **options: Any) -> Any:
    async def main() -> Any:
        service = RewardService(scorer or SumScorer(), **options)
        asgi = service.app()
        transport = httpx.ASGITransport(app=asgi)
        async with (
            asgi.router.lifespan_context(asgi),
            httpx.AsyncClient(transport=transport, base_url="http://rm") as client,
        ):
            return await work(client)

    return asyncio.run(main())


def post(content: bytes | str, **headers: str) -> httpx.Response:
    return serve(lambda client: client.post("/get_reward", content=content, headers=headers))


def test_f13_rewards_and_scores() -> None:
    answer = post(json.dumps({"query": ["a", "ab"], "prompts": ["x", "y"], "labels": ["", None]}))
    assert answer.status_code == 200
    assert answer.json() == {"rewards": [97.0, 195.0], "scores": [97.0, 195.0]}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ('{"query": [', 400, "not valid JSON"),
        ("", 400, "not valid JSON"),
        ("[" * 100_000, 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        ("[]", 422, 'expected an object with "query": [text, ...], got list'),
        ('{"text": "x"}', 422, "got ['text']"),
        ('{"query": []}', 422, "must be a non-empty list"),
        ('{"query": "a"}', 422, "must be a non-empty list of texts, got 'a'"),
        ('{"query": ["a", 3]}', 422, "query[1] must be a text, got int: 3"),
        ('{"query": [null]}', 422, "query[0] must be a text, got NoneType"),
        ('{"query": [""]}', 422, "query[0] has 0 tokens"),
        ('{"query": ["\\ud800"]}', 422, "query[0] is not valid Unicode"),
        (json.dumps({"query": ["a" * 101]}), 422, "query[0] has 101 tokens; 1 to 100 are allowed (--data.max_len)"),
        (json.dumps({"query": ["a" * 10**6]}), 413, "query[0] has 1000000 characters"),
    ],
)
def test_bad_requests_get_the_reason(body: bytes | str, status: int, reason: str) -> None:
    answer = post(body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


def test_a_huge_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODY", 2**20)
    answer = post(json.dumps({"query": ["a"] * 10**6}))
    assert answer.status_code == 413
    assert "larger than 1 MiB" in answer.json()["error"]


def test_other_paths_and_methods() -> None:
    async def work(client: httpx.AsyncClient) -> list[int]:
        return [(await client.get("/get_reward")).status_code, (await client.get("/other")).status_code]

    assert serve(work) == [405, 404]


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/get_reward", 405, "GET /get_reward is not allowed; use POST"),
        ("PUT", "/get_reward", 405, "PUT /get_reward is not allowed; use POST"),
        ("POST", "/health", 405, "POST /health is not allowed; use"),
        ("DELETE", "/metrics", 405, "DELETE /metrics is not allowed; use"),
        ("POST", "/", 404, "there is nothing at /; rewards are asked by POST /get_reward"),
        ("GET", "/v1/rewards", 404, "there is nothing at /v1/rewards"),
        ("POST", "/get_reward", 400, "not valid JSON"),
    ],
)
def test_n17_every_refusal_is_json_with_a_reason(method: str, path: str, status: int, reason: str) -> None:
    answer = serve(lambda client: client.request(method, path))
    assert answer.status_code == status
    assert reason in answer.json()["error"]
    assert status != 405 or answer.headers["allow"]


def test_n17_a_fault_of_the_server_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: RewardService, request: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(RewardService, "health", broken)

    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(app=RewardService(SumScorer()).app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://rm") as client:
            return await client.get("/health")

    answer = asyncio.run(work())
    assert (answer.status_code, answer.json()) == (500, {"error": "the server failed: RuntimeError: no memory"})


def test_the_key() -> None:
    async def work(client: httpx.AsyncClient) -> list[int]:
        keys = ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer right"})
        return [(await client.post("/get_reward", json={"query": ["a"]}, headers=k)).status_code for k in keys]

    assert serve(work, api_key="right") == [401, 401, 200]


def test_the_server_survives_a_model_that_fails() -> None:
    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        texts = ["a", "crash", "b"]
        answers = await asyncio.gather(*(client.post("/get_reward", json={"query": [t]}) for t in texts))
        return [*answers, await client.get("/health"), await client.get("/metrics")]

    first, crash, last, health, metrics = serve(work)
    assert (first.json()["rewards"], last.json()["rewards"]) == ([97.0], [98.0])
    assert crash.status_code == 500
    assert crash.json() == {"error": "scoring failed: RuntimeError: the model crashed"}
    assert health.json() == {"status": "ok"}
    for line in ("openrlhf_rm_requests_total 3", "openrlhf_rm_texts_total 2", "openrlhf_rm_errors_total 1"):
        assert line in metrics.text.splitlines()


def test_b061_64_clients_with_2000_requests_get_their_own_rewards() -> None:
    scorer = SumScorer()
    rng = random.Random(0)
    requests = [["".join(rng.choices("abcdefgh", k=rng.randint(1, 20))) for _ in range(i % 4 + 1)] for i in range(2000)]

    async def work(client: httpx.AsyncClient) -> list[list[float]]:
        slots = asyncio.Semaphore(64)

        async def ask(texts: list[str]) -> list[float]:
            async with slots:
                return (await client.post("/get_reward", json={"query": texts})).json()["rewards"]

        return await asyncio.gather(*map(ask, requests))

    rewards = serve(work, scorer)
    assert rewards == [[float(sum(t.encode())) for t in texts] for texts in requests]
    assert max(scorer.batches) > 8
