"""JSON questions to HTTP servers: retried where that can help, shared between several that answer alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from openrlhf.agents.proxies import proxy_of
from openrlhf.launcher.proxies import AsyncProxiedTransport, through
from openrlhf.launcher.redaction import redact

log = logging.getLogger(__name__)

TOO_MANY_REQUESTS = 429
_SHOWN_BODY = 200


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how fast a request is repeated.

    timeout: seconds for one attempt, from connecting to the last byte. attempts: at most so many, at least one per
    URL. backoff: seconds before the second attempt, doubled each time up to max_backoff; a server's Retry-After
    counts instead, up to max_backoff.
    """

    timeout: float = 60.0
    attempts: int = 5
    backoff: float = 0.5
    max_backoff: float = 8.0

    def pause(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after failed attempt number `attempt` (0, 1, ...)."""
        wanted = self.backoff * 2**attempt if retry_after is None else retry_after
        return min(wanted, self.max_backoff)


class _TemporaryError(Exception):
    """An attempt failed in a way that another attempt may not."""

    def __init__(self, reason: str, *, timed_out: bool = False, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.retry_after = retry_after


@dataclass
class _Server:
    url: str
    running: int = 0
    failures: int = 0  # in a row

    @property
    def name(self) -> str:
        """The URL without a password."""
        return redact(self.url)


class JsonServers:
    """Servers that share the load; a request that fails on one is repeated on another. Use it from one event loop.

    kind: what they are, for messages. flag: that gives their URLs; timeout_flag: the seconds of an attempt.
    api_key: sent as `Authorization: Bearer ...`. max_concurrency: requests under way at the same time.
    errors: raised when no server gave an answer, and when the last attempt timed out.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        kind: str,
        flag: str,
        timeout_flag: str = "",
        errors: tuple[type[Exception], type[Exception]] = (RuntimeError, TimeoutError),
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        max_concurrency: int = 64,
    ) -> None:
        for url in urls:
            if httpx.URL(url).scheme not in ("http", "https"):
                raise ValueError(f"{flag} {redact(url)!r}: expected an http:// or https:// URL")
        if not urls:
            raise ValueError(f"{flag}: no URL given")
        self._kind = kind
        self._timeout_flag = f" ({timeout_flag})" if timeout_flag else ""
        self._error, self._timeout_error = errors
        self._servers = [_Server(url) for url in urls]
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._retry = retry or RetryPolicy()
        self._slots = asyncio.Semaphore(max_concurrency)
        limits = httpx.Limits(max_connections=max_concurrency, max_keepalive_connections=max_concurrency)
        transport = AsyncProxiedTransport(limits=limits)
        self._client = httpx.AsyncClient(transport=transport, timeout=None)  # every attempt has a deadline of its own

    async def ask(self, body: bytes) -> tuple[Any, str]:
        """The parsed answer to a POST, and the URL that gave it.

        Raises the errors of the constructor when no server gave an answer, at once for an answer that a repetition will
        not change (4xx, no JSON).
        """
        async with self._slots:
            return await self._ask(body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, body: bytes) -> tuple[Any, str]:
        """The parsed answer and the URL that gave it."""
        attempts = max(self._retry.attempts, len(self._servers))
        began = time.monotonic()
        last: _Server | None = None
        for attempt in range(attempts):
            server = self._pick(last)
            last = server
            server.running += 1
            try:
                answer = await self._attempt(server.url, body)
                server.failures = 0
                return answer, server.url
            except _TemporaryError as error:
                server.failures += 1
                level = logging.WARNING if server.failures == 1 else logging.INFO
                log.log(level, "%s %s: %s (attempt %d of %d)", self._kind, server.name, error, attempt + 1, attempts)
                if attempt + 1 == attempts:
                    kind = self._timeout_error if error.timed_out else self._error
                    spent = time.monotonic() - began
                    tried = f"gave up after {attempts} attempts in {spent:.1f} s"
                    raise kind(f"{self._kind} {server.name}: {tried}; last: {error}") from error
                await asyncio.sleep(self._retry.pause(attempt, error.retry_after))
            finally:
                server.running -= 1
        raise AssertionError("the loop returns or raises")

    def _pick(self, last: _Server | None) -> _Server:
        """The healthiest, then least busy server; not the one that just failed where there is another."""
        others = [s for s in self._servers if s is not last] or self._servers
        return min(others, key=lambda s: (s.failures > 0, s.running))

    async def _attempt(self, url: str, body: bytes) -> Any:
        try:
            async with asyncio.timeout(self._retry.timeout):
                response = await self._client.post(url, content=body, headers=self._headers)
        except TimeoutError:
            proxy = proxy_of(url)
            way = "" if proxy is None else f" through {proxy}"
            reason = f"no answer within {self._retry.timeout:g} s{self._timeout_flag}{way}"
            raise _TemporaryError(reason, timed_out=True) from None
        except httpx.TransportError as error:
            raise _TemporaryError(redact(f"{type(error).__name__}: {error}")) from error
        if response.is_server_error or response.status_code == TOO_MANY_REQUESTS:
            raise _TemporaryError(_describe(response), retry_after=_retry_after(response))
        if not response.is_success:
            raise self._error(f"{self._kind} {redact(url)}: {_describe(response)}")
        try:
            return response.json()
        except ValueError:
            raise self._error(f"{self._kind} {redact(url)}: expected JSON, got {_describe(response)}") from None


def _describe(response: httpx.Response) -> str:
    body = response.text.strip()
    shown = body if len(body) <= _SHOWN_BODY else body[:_SHOWN_BODY] + "..."
    return f"HTTP {response.status_code} {response.reason_phrase}: {shown!r}{through(response)}"


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else None
