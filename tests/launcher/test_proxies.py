"""Our HTTP clients under a cluster-wide proxy."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import threading
from collections.abc import Iterator

import pytest
from PIL import Image

from openrlhf.agents.rewards import RewardError, RewardResult
from openrlhf.launcher.data.images import read_image
from openrlhf.launcher.json_servers import RetryPolicy
from openrlhf.launcher.rewards.http import HttpRewardSource

DEAD = "http://user:secret@127.0.0.1:9"
RETRY = RetryPolicy(timeout=20.0, attempts=2, backoff=0.01)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No proxy in the environment."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(buffer, "PNG")
    return buffer.getvalue()


class Server(http.server.BaseHTTPRequestHandler):
    """A reward and image server, or a forward proxy: then it is asked for whole URLs. `asked` keeps what it was."""

    asked: list[str]
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(json.dumps({"rewards": [0.5]}).encode())

    def do_GET(self) -> None:
        self._answer(picture())

    def _answer(self, content: bytes) -> None:
        self.asked.append(self.path)
        self.send_response(self.status, "Said so")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    handler = type("Handler", (Server,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", handler
        running.shutdown()


def score(url: str) -> RewardResult:
    async def main() -> RewardResult:
        source = HttpRewardSource([url], retry=RETRY)
        try:
            return await source.score(["qa"], ["q"], ["a"])
        finally:
            await source.close()

    return asyncio.run(main())


def test_r04_servers_on_loopback_are_asked_without_the_proxy(
    clean: pytest.MonkeyPatch, server: tuple[str, type[Server]]
) -> None:
    clean.setenv("HTTP_PROXY", DEAD)
    url, handler = server
    assert score(f"{url}/get_reward").rewards == [0.5]
    assert read_image(f"{url}/red.png") == picture()
    assert handler.asked == ["/get_reward", "/red.png"]


def test_r04_others_are_asked_through_the_proxy(clean: pytest.MonkeyPatch, server: tuple[str, type[Server]]) -> None:
    url, handler = server
    clean.setenv("http_proxy", url)
    assert score("http://node1:5000/get_reward").rewards == [0.5]
    assert read_image("http://192.0.2.1/red.png") == picture()
    assert handler.asked == ["http://node1:5000/get_reward", "http://192.0.2.1/red.png"]


@pytest.mark.parametrize("no_proxy", ["127.0.0.0/8,10.0.0.0/8", "fd00::/8"])
def test_r04_networks_in_no_proxy(clean: pytest.MonkeyPatch, server: tuple[str, type[Server]], no_proxy: str) -> None:
    """Only the address of the network is kept from the proxy; httpx itself cannot even read those of IPv6."""
    url, handler = server
    clean.setenv("HTTP_PROXY", url)
    clean.setenv("NO_PROXY", no_proxy)
    assert score("http://192.0.2.1:5000/get_reward").rewards == [0.5]
    handler.asked.clear()
    inside = "http://10.255.255.255:9/get_reward" if "10." in no_proxy else "http://[fd00::1]:9/get_reward"
    with pytest.raises(RewardError) as error:
        asyncio.run(asyncio.wait_for(_score_quickly(inside), 30))
    assert "proxy" not in str(error.value)
    assert handler.asked == []


async def _score_quickly(url: str) -> RewardResult:
    source = HttpRewardSource([url], retry=RetryPolicy(timeout=0.2, attempts=1))
    try:
        return await source.score(["qa"], ["q"], ["a"])
    finally:
        await source.close()


def test_r04_failures_name_the_proxy_and_keep_its_password(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("HTTP_PROXY", DEAD)
    named = r"ConnectError: .*\(through the proxy http://\*\*\*@127\.0\.0\.1:9 of HTTP_PROXY; hosts in NO_PROXY are"
    with pytest.raises(RewardError, match=named) as error:
        score("http://node1:5000/get_reward")
    assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match=r"red\.png' could not be fetched: .*through the proxy .* of HTTP_PROXY"):
        read_image("http://node1/red.png")


def test_r04_what_a_proxy_answers_itself_names_it(clean: pytest.MonkeyPatch, server: tuple[str, type[Server]]) -> None:
    url, handler = server
    handler.status = 403
    clean.setenv("HTTP_PROXY", url)
    with pytest.raises(RewardError, match=rf"HTTP 403 Said so: .* \(through the proxy {url} of HTTP_PROXY"):
        score("http://node1:5000/get_reward")
    with pytest.raises(ValueError, match=rf"HTTP 403 Said so \(through the proxy {url} of HTTP_PROXY"):
        read_image("http://node1/red.png")
