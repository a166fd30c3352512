"""The HTTP server: routes, authorisation, sessions by id. starlette and uvicorn, on the caller's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from openrlhf.agents.chat import wires
from openrlhf.agents.chat.answer import Answer, make_choice
from openrlhf.agents.chat.call import Call
from openrlhf.agents.chat.fields import ApiError, bad_request, shown
from openrlhf.agents.chat.session import ChatSession, Plan
from openrlhf.agents.chat.wires.anthropic import count_tokens
from openrlhf.agents.chat.wires.completions_request import read_tokenize_request
from openrlhf.agents.chat.wires.wire import Wire
from openrlhf.agents.engine import EngineError, RequestRefusedError
from openrlhf.agents.json_text import parse_json, well_formed
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
MAY_BE_CUT = re.compile(rb"\\u[dD]|\xed|\x00")
"""What a body holds that may have halves of surrogate pairs: their escapes, their bytes, or UTF-16 and UTF-32."""
KEEP_ALIVE_SECONDS = 30 * 86400  # a connection waits for its session, whatever the agent does between two calls


class _Server(uvicorn.Server):
    """Leaves the signal handlers of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


@dataclass
class ChatServer:
    """Serves the sessions registered with it, on 127.0.0.1 and a free port, behind a random token.

    A session is named by the path (`{url}/s/{session_id}/v1`), by the API key (`session_key`), by the header
    `X-Session-Id` or by `session_id` in the body. model_names: under which the policy is asked for; none: any name.
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

    def session_key(self, session_id: str) -> str:
        """An API key that names the session, for clients that know nothing else of it."""
        return f"{self.token}:{session_id}"

    def app(self) -> Starlette:
        """The ASGI application."""
        chat, messages, responses = wires.COMPLETIONS, wires.MESSAGES, wires.RESPONSES
        paths = [
            ("/v1/chat/completions", "POST", self._answers(chat), chat),
            ("/v1/messages", "POST", self._answers(messages), messages),
            ("/v1/messages/count_tokens", "POST", self._count_tokens, messages),
            ("/v1/responses", "POST", self._answers(responses), responses),
            ("/v1/responses/{response_id}", "GET", self._response, responses),
            ("/v1/models", "GET", self._models, chat),
            ("/v1/models/{model:path}", "GET", self._one_model, chat),
            ("/tokenize", "POST", self._tokenize, chat),
            ("/v1/tokenize", "POST", self._tokenize, chat),
        ]
        routes = [Route("/health", self._health)]
        for path, method, handler, wire in paths:
            for prefix in ("", "/s/{session_id}"):
                routes.append(Route(f"{prefix}{path}", self._guarded(handler, wire), methods=[method]))
        handlers = {404: _not_found, 405: _not_found}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _guarded(self, handler: Any, wire: Wire) -> Any:
        """Checks the token and turns every failure into the API's JSON."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorise(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                refusal = _refusal(error, request.url.path)
                return JSONResponse(wire.error(refusal), status_code=refusal.status)

        return guarded

    def _authorise(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        key, _, session_id = given.partition(":")
        if not secrets.compare_digest(key.encode(), self.token.encode()):
            raise ApiError(401, "wrong or missing API key: use the api_key of this run", code="invalid_api_key")
        request.state.key_session = session_id or None

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        names = self.model_names or ("policy",)
        if "anthropic-version" in request.headers:
            models = [_model(name, anthropic=True) for name in names]
            return JSONResponse({"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return JSONResponse({"object": "list", "data": [_model(name, anthropic=False) for name in names]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(_model(name, anthropic="anthropic-version" in request.headers))

    def _check_model(self, name: str) -> None:
        if self.model_names and name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"the model {shown(name)} does not exist; served: {known}"
            raise ApiError(404, message, code="model_not_found")

    async def _tokenize(self, request: Request) -> Response:
        body = await _json(request)
        session = self._session(request, body)
        text, special, strings = read_tokenize_request(body, session.renderer)
        ids = session.tokenizer.encode(text, add_special_tokens=special)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": session.max_length}
        if strings:
            answer["token_strs"] = [session.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        return JSONResponse(answer)

    async def _count_tokens(self, request: Request) -> Response:
        body = await _json(request)
        return JSONResponse(await count_tokens(body, self._session(request, body)))

    async def _response(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        stored = self._session(request, None).stored.get(name)
        if stored is None:
            raise ApiError(404, f"response {shown(name)} not found", code="response_not_found")
        return JSONResponse(stored["response"])

    def _answers(self, wire: Wire) -> Any:
        async def answers(request: Request) -> Response:
            body = await _json(request)
            session = self._session(request, body)
            call = wire.read(body, session)
            self._check_model(call.model)
            plan = session.plan(call.conversation, call.tools, call.options, call.ending)
            call = replace(call, sampling=session.constrained(call, plan))
            generations = await _while_connected(request, session, _generate_all(session, plan, call))
            choices = [make_choice(session, plan, call, generation) for generation in generations]
            answer = Answer(session=session, plan=plan, call=call, choices=choices)
            if call.display.stream:
                return StreamingResponse(_events(wire, answer), media_type="text/event-stream")
            response = JSONResponse(wire.body(answer))  # written before anything is recorded
            if not wire.commit(answer):
                raise session_ended()
            return response

        return answers

    def _session(self, request: Request, body: Any) -> ChatSession:
        """The session that the request names; where it does so twice, it must be the same.

        Beside path or key the header may be the client's own name of its talk: one that is no session of ours is that.
        """
        names = [request.path_params.get("session_id"), request.state.key_session]
        header = request.headers.get("x-session-id")
        if header in self.sessions or not any(names):
            names.append(header)
        given = body.get("session_id") if isinstance(body, dict) else None
        named = [name for name in (*names, given) if name is not None]
        if any(name != named[0] for name in named):
            raise bad_request(f"'session_id' {shown(named[-1])} is not the session of the path or key", "session_id")
        session = self.sessions.get(named[0]) if named and isinstance(named[0], str) else None
        if session is None:
            message = f"unknown session {shown(named[0] if named else None)}"
            raise ApiError(404, message, param="session_id", code="session_not_found")
        return session


def _model(name: str, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "openrlhf"}


def _refusal(error: Exception, path: str) -> ApiError:
    """What a client is told of a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefusedError):  # no 5xx: clients would send it again
        return bad_request(f"the engine refused the request: {error}", code="request_refused")
    if isinstance(error, EngineError):
        return ApiError(503, f"the engine failed: {error}")
    logger.error("chat server: %s", path, exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}")


def session_ended() -> ApiError:
    return ApiError(404, "the session has ended: run_agent() has returned", param="session_id", code="session_ended")


async def _generate_all(session: ChatSession, plan: Plan, call: Call) -> list[Any]:
    """n samples of one prompt, each with a seed of its own. When one fails the others are cancelled."""
    seed = call.sampling.seed
    tasks = []
    for i in range(call.n):
        own = seed if seed is None or i == 0 else sample_seed(seed, False, 0, 0, i, 0)
        tasks.append(asyncio.ensure_future(session.generate(plan, call.sampling.with_(seed=own))))
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


async def _events(wire: Wire, answer: Answer) -> AsyncIterator[str]:
    """Server-sent events. The reply is recorded when all of it was handed over, before the last events."""
    numbers = itertools.count()
    for chunk in wire.chunks(answer):
        yield wire.event(chunk, next(numbers))
    if not wire.commit(answer):
        yield wire.event((wire.error_event or wire.error)(session_ended()), next(numbers))
        return
    for chunk in wire.last_chunks(answer):
        yield wire.event(chunk, next(numbers))
    if wire.end:
        yield wire.end


async def _json(request: Request) -> Any:
    content = await request.body()
    try:
        value = parse_json(content)
        return well_formed(value) if MAY_BE_CUT.search(content) else value
    except ValueError as error:
        raise bad_request(f"the body is no valid JSON: {error}") from error


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refusal = ApiError(status, f"no such endpoint: {request.method} {request.url.path}", code="not_found")
    wire = wires.MESSAGES if "/v1/messages" in request.url.path else wires.COMPLETIONS
    return JSONResponse(wire.error(refusal), status_code=status)
