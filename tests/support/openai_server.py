"""A tiny OpenAI-compatible server over real HTTP, whose answers a test writes down."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any


class TinyServer:
    """`answer(path, body)` gives a status and JSON. Requests are kept: path, body, headers."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                path = self.path.removeprefix("/v1")
                owner.requests.append((path, body, {k.lower(): v for k, v in self.headers.items()}))
                status, reply = answer(path, body)
                text = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> TinyServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def chat_only(reply: Callable[[list[dict[str, str]]], str]) -> Callable[[str, dict[str, Any]], tuple[int, Any]]:
    """A server of /chat/completions that answers messages with what `reply` makes of them."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/chat/completions":
            return 404, {}
        return 200, {"choices": [{"message": {"content": reply(body["messages"])}, "finish_reason": "stop"}]}

    return answer
