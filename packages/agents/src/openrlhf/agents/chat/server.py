"""The HTTP server: routes, authorisation, sessions by id. starlette and uvicorn, on the caller's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from openrlhf.agents.chat.fields import ApiError, bad_request, shown
from openrlhf.agents.chat.request import NUMBERS, ChatRequest, read_chat_request, read_tokenize_request
from openrlhf.agents.chat.response import Answer, make_choice
from openrlhf.agents.chat.session import ChatSession, Plan
from openrlhf.agents.engine import EngineError, RequestRefusedError, SamplingParams
from openrlhf.agents.failures import warn_once
from openrlhf.agents.json_text import parse_json
from openrlhf.agents.sampling import sample_seed

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    message = "the chat server needs: pip install 'openrlhf-agents[server]'"
    raise ModuleNotFoundError(message, name=error.name) from error

logger = logging.getLogger(__name__)
T = TypeVar("T")
HOST = "127.0.0.1"
START_SECONDS = 10.0
STOP_SECONDS = 5.0
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 30 * 86400  # a connection waits for its session, whatever the agent does between two calls
SURROGATE = re.compile("[\ud800-\udfff]")


class _Server(uvicorn.Server):
    """Leaves the signal handlers of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


@dataclass
class ChatServer:
    """Serves the sessions registered with it, on 127.0.0.1 and a free port, behind a random token.

    A session is named by the path (`{url}/s/{session_id}/v1`, for clients that only know a base URL) or by
    `session_id` in the body.
    """

    model_names: Sequence[str] = ("policy",)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    sessions: dict[str, ChatSession] = field(default_factory=dict)
    url: str = ""
    _server: _Server | None = None
    _task: asyncio.Task[None] | None = None
    _socket: socket.socket | None = None

    async def start(self) -> None:
        """Binds and serves on the running loop."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))  # bound here and handed over: nobody can take the port in between
        listener.listen(BACKLOG)
        self._socket = listener
        config = uvicorn.Config(
            self.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_SECONDS):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.005)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Ends the server and its connections."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=STOP_SECONDS)
        if self._socket is not None:
            self._socket.close()
        self._server = self._task = self._socket = None

    def add(self, session: ChatSession) -> str:
        """Registers a session under a new id."""
        session_id = secrets.token_urlsafe(12)
        self.sessions[session_id] = session
        return session_id

    def remove(self, session_id: str) -> None:
        """Ends a session: calls under way are cancelled and refused, and none is recorded any more."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.close()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route("/health", self._health)]
        for prefix in ("", "/s/{session_id}"):
            routes += [
                Route(f"{prefix}/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/v1/models", self._guarded(self._models)),
                Route(f"{prefix}/tokenize", self._guarded(self._tokenize), methods=["POST"]),
                Route(f"{prefix}/v1/tokenize", self._guarded(self._tokenize), methods=["POST"]),
            ]
        handlers = {404: _not_found, 405: _not_found}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _guarded(self, handler: Any) -> Any:
        """Checks the token and turns every failure into the API's JSON."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorise(request)
                return await handler(request)
            except ApiError as error:
                return JSONResponse(error.body(), status_code=error.status)
            except RequestRefusedError as error:  # no 5xx: clients would send it again
                refused = bad_request(f"the engine refused the request: {error}", code="request_refused")
                return JSONResponse(refused.body(), status_code=refused.status)
            except EngineError as error:
                return JSONResponse(ApiError(503, f"the engine failed: {error}").body(), status_code=503)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                logger.exception("chat server: %s", request.url.path)
                return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), status_code=500)

        return guarded

    def _authorise(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "wrong or missing API key: use the api_key of this run", code="invalid_api_key")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "openrlhf"} for name in self.model_names]
        return JSONResponse({"object": "list", "data": data})

    async def _tokenize(self, request: Request) -> Response:
        body = await _json(request)
        session = self._session(request, body)
        text, special, strings = read_tokenize_request(body, session.renderer)
        ids = session.tokenizer.encode(text, add_special_tokens=special)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": session.max_length}
        if strings:
            answer["token_strs"] = [session.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        return JSONResponse(answer)

    async def _chat(self, request: Request) -> Response:
        body = await _json(request)
        session = self._session(request, body)
        chat = read_chat_request(body, session.sampling, session.vocabulary)
        if chat.model not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"the model {shown(chat.model)} does not exist; served: {known}", code="model_not_found"
            )
        _warn_of_sampling(session.sampling, chat.sampling)
        plan = session.plan(chat.conversation, chat.tools, chat.options, chat.ending)
        generations = await _while_connected(request, session, _generate_all(session, plan, chat))
        choices = [make_choice(session, plan, chat, generation) for generation in generations]
        answer = Answer(session=session, plan=plan, request=chat, choices=choices)
        if chat.display.stream:
            return StreamingResponse(_events(answer), media_type="text/event-stream")
        if not answer.commit():
            raise session_ended()
        return JSONResponse(answer.body())

    def _session(self, request: Request, body: Any) -> ChatSession:
        named = request.path_params.get("session_id")
        given = body.get("session_id") if isinstance(body, dict) else None
        session_id = given if named is None else named
        if given not in (None, session_id):
            raise bad_request(f"'session_id' {shown(given)} is not the session of the path", "session_id")
        session = self.sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            message = f"unknown session {shown(session_id)}"
            raise ApiError(404, message, param="session_id", code="session_not_found")
        return session


def session_ended() -> ApiError:
    return ApiError(404, "the session has ended: run_agent() has returned", param="session_id", code="session_ended")


def _warn_of_sampling(template: SamplingParams, given: SamplingParams) -> None:
    changed = [name for name in (*NUMBERS, "top_k") if getattr(given, name) != getattr(template, name)]
    if changed:
        warn_once(
            logger,
            "sampling of a client",
            "a client samples with %s of its own, which is honoured; the trainer expects that of the run",
            ", ".join(changed),
        )


async def _generate_all(session: ChatSession, plan: Plan, chat: ChatRequest) -> list[Any]:
    """n samples of one prompt, each with a seed of its own. When one fails the others are cancelled."""
    seed = chat.sampling.seed
    tasks = []
    for i in range(chat.n):
        own = seed if seed is None or i == 0 else sample_seed(seed, False, 0, 0, i, 0)
        tasks.append(asyncio.ensure_future(session.generate(plan, chat.sampling.with_(seed=own))))
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(*tasks)


async def _while_connected(request: Request, session: ChatSession, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away or the session ends."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    ended = asyncio.ensure_future(session.closed.wait())
    try:
        await asyncio.wait([task, gone, ended], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise session_ended() if ended.done() else ClientDisconnect
    finally:
        await _cancel(task, gone, ended)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(answer: Answer) -> AsyncIterator[str]:
    """Server-sent events. The reply is recorded when all of it was handed over, before the last events."""
    for chunk in answer.chunks():
        yield _event(chunk)
    if not answer.commit():
        yield _event(session_ended().body())
        return
    for chunk in answer.last_chunks():
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, allow_nan=False)}\n\n"


async def _json(request: Request) -> Any:
    try:
        return _well_formed(parse_json(await request.body()))
    except ValueError as error:
        raise bad_request(f"the body is no valid JSON: {error}") from error


def _well_formed(value: Any) -> Any:
    """With U+FFFD in the place of halves of surrogate pairs, as every encoder of UTF-8 writes them: no tokenizer takes
    them, and an agent that cuts its texts to a length may well cut an emoji in two."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"no such endpoint: {request.method} {request.url.path}"
    return JSONResponse(ApiError(status, message, code="not_found").body(), status_code=status)
