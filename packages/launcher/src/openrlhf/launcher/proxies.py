"""httpx transports that choose the proxy for each request as `openrlhf.agents.proxies` does.

httpx's own reading of the environment sends loopback addresses to the proxy and knows no networks in NO_PROXY.
"""

from __future__ import annotations

from typing import Any

import httpx

from openrlhf.agents.proxies import Proxy, proxy_of

PROXY = "proxy"
"""Key of a response's `extensions`: the proxy that it came through, as text for a message."""


class ProxiedTransport(httpx.BaseTransport):
    """For `httpx.Client(transport=...)`. Failures of a connection through a proxy name it."""

    def __init__(self, **options: Any) -> None:
        """options: of httpx.HTTPTransport, for each of the connection pools."""
        self._options = {"verify": httpx.create_ssl_context(), **options}  # slow, so not within a request's time
        self._pools: dict[str | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(str(request.url))
        url = None if proxy is None else proxy.url
        if url not in self._pools:
            self._pools[url] = httpx.HTTPTransport(proxy=url, **self._options)
        try:
            return _marked(self._pools[url].handle_request(request), proxy)
        except httpx.TransportError as error:
            raise _named(error, proxy, request) from error

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class AsyncProxiedTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient(transport=...)`. Failures of a connection through a proxy name it."""

    def __init__(self, **options: Any) -> None:
        """options: of httpx.AsyncHTTPTransport, for each of the connection pools."""
        self._options = {"verify": httpx.create_ssl_context(), **options}  # slow, so not within a request's time
        self._pools: dict[str | None, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(str(request.url))
        url = None if proxy is None else proxy.url
        if url not in self._pools:
            self._pools[url] = httpx.AsyncHTTPTransport(proxy=url, **self._options)
        try:
            return _marked(await self._pools[url].handle_async_request(request), proxy)
        except httpx.TransportError as error:
            raise _named(error, proxy, request) from error

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()


def through(response: httpx.Response) -> str:
    """ " (through the proxy ...)" for a message about a response that came through one, else nothing."""
    return f" (through {response.extensions[PROXY]})" if PROXY in response.extensions else ""


def _marked(response: httpx.Response, proxy: Proxy | None) -> httpx.Response:
    if proxy is not None:
        response.extensions[PROXY] = str(proxy)
    return response


def _named(error: httpx.TransportError, proxy: Proxy | None, request: httpx.Request) -> httpx.TransportError:
    return error if proxy is None else type(error)(f"{error} (through {proxy})", request=request)
