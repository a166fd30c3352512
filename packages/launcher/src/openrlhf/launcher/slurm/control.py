"""The line between the head and the other nodes of a run: who is there, where Ray is, when it ends.

One TCP connection per worker node, open as long as the node takes part, so that each side sees at once when the other
is gone. Both sides prove that they know the job's token (HMAC over fresh nonces) before anything else is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

GREETING_TIMEOUT = 5.0
"""Seconds for one answer while two sides get to know each other."""
GUESTS, GREETING_BYTES = 64, 4096
"""How many callers may be unproven at a time, and what one may say until then: anybody on the network can call."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A machine that lost its power or network is noticed after 25 seconds."""


class RefusedError(Exception):
    """The other side is not of this job."""


class Line:
    """One connection: JSON objects, a line each. `peer` names the other side."""

    def __init__(self, connection: socket.socket, peer: str = "") -> None:
        self._socket = connection
        self._buffer = b""
        self.peer = peer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, **message: Any) -> None:
        """Raises OSError when the other side is gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None if none came in time. Raises ConnectionError when the other side is gone."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self.take_in()
            except TimeoutError:
                return None
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def take_in(self) -> int:
        """Read once; how much waits to be received. Raises ConnectionError when the other side is gone."""
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError(f"{self.peer or 'the other side'} closed the connection")
        self._buffer += data
        return len(self._buffer)

    @property
    def has_message(self) -> bool:
        """Whether `receive` would return at once: a selector sees only what has not been read yet."""
        return b"\n" in self._buffer

    def close(self) -> None:
        """Close the connection; the other side sees it."""
        self._socket.close()

    @property
    def socket(self) -> socket.socket:
        return self._socket


@dataclass(frozen=True, eq=False)
class _Guest:
    """A caller that has not proven yet that it is of this job."""

    line: Line
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    until: float = field(default_factory=lambda: time.monotonic() + GREETING_TIMEOUT)


class Head:
    """The head's side: accepts the job's other nodes and remembers who left. Silent callers hold up nobody."""

    def __init__(self, port: int, token: str, nodes: Sequence[str], ranks: int = 1) -> None:
        """ranks: processes of the command on this node, of which all others must have as many."""
        self._token, self._nodes, self._ranks = token, tuple(nodes), ranks
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        dual = family == socket.AF_INET6
        self._server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=len(nodes) + 8)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self.lines: dict[int, Line] = {}
        self._guests: list[_Guest] = []
        self.lost: dict[str, str] = {}
        self.ended: dict[int, int] = {}
        self._silent: set[int] = set()

    @property
    def missing(self) -> list[str]:
        """Names of the nodes that have not come yet."""
        return [name for i, name in enumerate(self._nodes) if i and i not in self.lines]

    def poll(self, timeout: float, welcome: Callable[[], dict[str, Any]]) -> None:
        """Wait up to `timeout` seconds for something to happen; greet newcomers with `welcome()`."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._server:
                self._accept()
            elif isinstance(key.data, _Guest):
                self._hear(key.data, welcome)
            else:
                self._read(key.data)
        for guest in [guest for guest in self._guests if guest.until < time.monotonic()]:
            self._show_out(guest)

    def tell(self, **message: Any) -> None:
        """The same message to all nodes that are there."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # the selector tells
                line.send(**message)

    def probe(self, seconds: float) -> None:
        """Ask every node whether it is there; one that does not answer within `seconds` is lost."""
        deadline = time.monotonic() + seconds
        for index, line in self.lines.items():
            if line.peer not in self.lost:
                self._silent.add(index)
                with contextlib.suppress(OSError):  # the selector tells
                    line.send(ping=True)
        while self._silent and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if isinstance(key.data, int):
                    self._read(key.data)
        for index in self._silent:
            self.lost.setdefault(self.lines[index].peer, f"it did not answer for {seconds:.0f} s")
        self._silent.clear()

    def end(self) -> None:
        """Tell all nodes that the run is over, and close."""
        self.tell(end=True)
        for line in [*self.lines.values(), *(guest.line for guest in self._guests)]:
            line.close()
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        """Ask a caller for its proof; the longest unproven one makes room."""
        connection, _ = self._server.accept()
        connection.settimeout(GREETING_TIMEOUT)
        if len(self._guests) >= GUESTS:
            self._show_out(self._guests[0])
        guest = _Guest(Line(connection))
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)
        try:
            guest.line.send(nonce=guest.nonce)
        except OSError:
            self._show_out(guest)

    def _show_out(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.line.socket)
        guest.line.close()

    def _hear(self, guest: _Guest, welcome: Callable[[], dict[str, Any]]) -> None:
        """What a caller says. With its proof it takes part, with anything else it is turned away."""
        try:
            if guest.line.take_in() > GREETING_BYTES:
                raise RefusedError
            if not guest.line.has_message:
                return
            index = self._greet(guest)
            guest.line.send(**welcome())
        except (RefusedError, OSError, ValueError, KeyError, TypeError, RecursionError):
            self._show_out(guest)
            return
        self._guests.remove(guest)
        guest.line.peer = self._nodes[index]
        self.lines[index] = guest.line
        self._selector.modify(guest.line.socket, selectors.EVENT_READ, index)

    def _greet(self, guest: _Guest) -> int:
        answer = guest.line.receive(0)
        if answer is None or not hmac.compare_digest(str(answer["proof"]), proof(self._token, "worker", guest.nonce)):
            raise RefusedError
        index = int(answer["index"])
        if not 0 < index < len(self._nodes) or index in self.lines:
            raise RefusedError
        guest.line.send(proof=proof(self._token, "head", str(answer["nonce"])))
        if (ranks := int(answer["ranks"])) != self._ranks:
            as_many = f"{self._nodes[0]} for {self._ranks}: ask for as many on each, with --gpus-per-node"
            self.lost[self._nodes[index]] = f"it has GPUs for {ranks} ranks, {as_many}"
        return index

    def _read(self, index: int) -> None:
        line = self.lines[index]
        try:
            message = line.receive(GREETING_TIMEOUT)
            while message is not None and ("pong" in message or "ended" in message):
                self._silent.discard(index)
                if "ended" in message:
                    self.ended[index] = int(message["ended"])
                message = line.receive(0) if line.has_message else None
            why = "" if message is None else str(message.get("failed", message))
        except OSError as error:
            why = str(error)
        if why:
            self._silent.discard(index)
            self.lost.setdefault(line.peer, why)
            self._selector.unregister(line.socket)


def proof(token: str, side: str, nonce: str) -> str:
    """What only a holder of the token can answer to `nonce`."""
    return hmac.new(token.encode(), f"{side}:{nonce}".encode(), hashlib.sha256).hexdigest()


def find_head(
    addresses: Callable[[], Sequence[str]],
    ports: Sequence[int],
    token: str,
    index: int,
    seconds: float,
    ranks: int = 1,
) -> tuple[Line, dict[str, Any]]:
    """Try every address and port until the head of this job answers. Returns the line and the head's welcome.

    ranks: processes of the command on this node. Raises TimeoutError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    tried: list[str] = []
    while time.monotonic() < deadline:
        tried = list(addresses())
        for address in tried:
            for port in ports:
                try:
                    return _call(address, port, token, index, ranks)
                except (RefusedError, OSError, ValueError, KeyError):
                    continue
        time.sleep(0.3)
    places = ", ".join(tried) or "no address"
    raise TimeoutError(f"the head did not answer within {seconds:.0f} s (at {places}, ports {list(ports)})")


def _call(address: str, port: int, token: str, index: int, ranks: int) -> tuple[Line, dict[str, Any]]:
    line = Line(socket.create_connection((address, port), timeout=2), "the head")
    try:
        challenge = line.receive(GREETING_TIMEOUT)
        if challenge is None:
            raise RefusedError
        nonce = secrets.token_hex(16)
        line.send(index=index, ranks=ranks, nonce=nonce, proof=proof(token, "worker", str(challenge["nonce"])))
        answer = line.receive(GREETING_TIMEOUT)
        if answer is None or not hmac.compare_digest(str(answer["proof"]), proof(token, "head", nonce)):
            raise RefusedError
        welcome = line.receive(GREETING_TIMEOUT)
        if welcome is None:
            raise RefusedError
    except BaseException:
        line.close()
        raise
    return line, welcome
