"""The HTTP side of the reward server: checks requests, batches them, answers in JSON.

POST /get_reward  {"query": [text, ...]} (prompts and labels are allowed and not used)
                  -> {"rewards": [...], "scores": [...]}, or a 4xx with {"error": reason}
GET  /health      -> {"status": "ok"}
GET  /metrics     -> counters in the text format of Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from openrlhf.launcher.serving.batcher import DynamicBatcher, OverloadedError

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20  # bytes of one request
MAX_BYTES_PER_TOKEN = 64  # a text with more bytes than this per allowed token is refused without tokenising it
JOINED_TEXTS = 64  # requests are joined up to so many texts when --batch_size does not say
PATHS = "rewards are asked by POST /get_reward, GET /health and GET /metrics tell how the server is"
MAX_PENDING = 16_384  # texts that may wait


class Scorer(Protocol):
    """What the server needs of a reward model."""

    max_len: int

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]: ...

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]: ...


class BadRequestError(ValueError):
    """The client's mistake, answered with this status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RewardService:
    """Handlers and counters of one server."""

    def __init__(self, scorer: Scorer, *, batch_size: int | None = None, api_key: str | None = None) -> None:
        self._scorer = scorer
        self._api_key = api_key
        self._batcher: DynamicBatcher[list[int], float] = DynamicBatcher(
            scorer.score, max_items=batch_size or JOINED_TEXTS, max_pending=MAX_PENDING
        )
        self._counts = {"requests": 0, "texts": 0, "bad_requests": 0, "overloaded": 0, "errors": 0}
        self._seconds = 0.0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/get_reward", self.get_reward, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: self._refuse, Exception: self._fail}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        await self._batcher.close()

    async def get_reward(self, request: Request) -> Response:
        """Rewards of the texts, in their order."""
        began = time.perf_counter()
        self._counts["requests"] += 1
        try:
            self._check_key(request)
            texts = _queries(await _body(request), self._scorer.max_len)
            rewards = await self._batcher.submit(await self._tokenize(texts))
        except BadRequestError as error:
            self._counts["bad_requests"] += 1
            return JSONResponse({"error": str(error)}, status_code=error.status)
        except OverloadedError as error:
            self._counts["overloaded"] += 1
            return JSONResponse({"error": str(error)}, status_code=503, headers={"retry-after": "1"})
        except Exception as error:  # the model failed; the server goes on
            self._counts["errors"] += 1
            log.exception("scoring failed")
            return JSONResponse({"error": f"scoring failed: {type(error).__name__}: {error}"}, status_code=500)
        self._counts["texts"] += len(texts)
        self._seconds += time.perf_counter() - began
        return JSONResponse({"rewards": rewards, "scores": rewards})

    async def health(self, request: Request) -> Response:
        """200 as long as the server answers."""
        del request
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Counters since the start."""
        del request
        values = {f"{name}_total": value for name, value in self._counts.items()}
        values |= {"batches_total": self._batcher.batches, "request_seconds_total": round(self._seconds, 6)}
        lines = [f"# TYPE openrlhf_rm_{name} counter\nopenrlhf_rm_{name} {value}" for name, value in values.items()]
        lines.append(f"# TYPE openrlhf_rm_pending_texts gauge\nopenrlhf_rm_pending_texts {self._batcher.pending}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _refuse(self, request: Request, error: HTTPException) -> Response:
        """A path or method that the server does not have, in the words of its other refusals."""
        self._counts["bad_requests"] += 1
        allowed = (error.headers or {}).get("Allow")
        if error.status_code == 405:
            reason = f"{request.method} {request.url.path} is not allowed; use {allowed or 'another method'}"
        elif error.status_code == 404:
            reason = f"there is nothing at {request.url.path}; {PATHS}"
        else:
            reason = error.detail
        return JSONResponse({"error": reason}, status_code=error.status_code, headers=error.headers)

    async def _fail(self, request: Request, error: Exception) -> Response:
        del request
        return JSONResponse({"error": f"the server failed: {type(error).__name__}: {error}"}, status_code=500)

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise BadRequestError(401, "the header `Authorization: Bearer KEY` with the server's --api_key is needed")

    async def _tokenize(self, texts: list[str]) -> list[list[int]]:
        rows = await asyncio.to_thread(self._scorer.tokenize, texts)
        for i, row in enumerate(rows):
            if not 0 < len(row) <= self._scorer.max_len:
                raise BadRequestError(
                    422, f"query[{i}] has {len(row)} tokens; 1 to {self._scorer.max_len} are allowed (--data.max_len)"
                )
        return rows


async def _body(request: Request) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise BadRequestError(413, f"the request is larger than {MAX_BODY // 2**20} MiB; send fewer texts at once")
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(400, f"the body is not valid JSON: {error}") from None


def _queries(body: Any, max_len: int) -> list[str]:
    if not isinstance(body, dict) or "query" not in body:
        found = sorted(map(str, body)) if isinstance(body, dict) else type(body).__name__
        raise BadRequestError(422, f'expected an object with "query": [text, ...], got {found}')
    query = body["query"]
    if not isinstance(query, list) or not query:
        raise BadRequestError(422, f'"query" must be a non-empty list of texts, got {query!r:.80}')
    for i, text in enumerate(query):
        if not isinstance(text, str):
            raise BadRequestError(422, f"query[{i}] must be a text, got {type(text).__name__}: {text!r:.80}")
        if len(text) > max_len * MAX_BYTES_PER_TOKEN:
            limit = f"{max_len} tokens are allowed (--data.max_len)"
            raise BadRequestError(413, f"query[{i}] has {len(text)} characters; {limit}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(422, f"query[{i}] is not valid Unicode: {error.reason}") from None
    return query
