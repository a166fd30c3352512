"""The quickstart's rewards, with a note of every call: from a file, and from a server that can be spoiled."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import reward

CALLS = "calls"
HANG_S = 600.0

NOTED = """

import pathlib

plain = reward_func


def reward_func(queries, prompts, labels):
    question = prompts[0].partition("<|user|>")[2].partition("<|end|>")[0]
    with (pathlib.Path(__file__).parent / "calls").open("a") as calls:
        calls.write(question + "\\n")
    return plain(queries, prompts, labels)
"""


def reward_file() -> str:
    """The quickstart's, which notes the question of every call beside itself."""
    return Path(reward.__file__).read_text() + NOTED


def question_of(prompt: str) -> str:
    """What the user asks in a rendered prompt."""
    return prompt.partition("<|user|>")[2].partition("<|end|>")[0]


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed."""


class RewardServer:
    """Serves the quickstart's rewards on a port of its own, and notes the question of every call in a file."""

    def __init__(self, calls: Path) -> None:
        self._calls, self._lock = calls, threading.Lock()
        self._how, self._left = "", 0
        self._well = threading.Event()
        self._well.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = outer.answer(json.loads(body))
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/reward"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def spoil(self, how: str, count: int) -> None:
        """Spoil the next `count` answers: `hang`, `nonsense`, `fail`; "" and 0: serve well again."""
        with self._lock:
            self._how, self._left = how, count
        self._well.set()
        if count:
            self._well = threading.Event()

    def answer(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        with self._lock:
            how, self._left = (self._how if self._left > 0 else ""), self._left - 1
        if how == "hang":
            self._well.wait(HANG_S)
        if how == "fail":
            return 500, b"out of order"
        if how == "nonsense":
            return 200, b"<html>It works!</html>" if self._left % 2 else b'{"rewards": [1, "x"]}'
        with self._lock, self._calls.open("a") as calls:
            calls.write(question_of(asked["prompts"][0]) + "\n")
        return 200, json.dumps(reward.reward_func(asked["query"], asked["prompts"], asked["labels"])).encode()

    def close(self) -> None:
        self._well.set()
        self._http.shutdown()
        self._http.server_close()
