"""OpenAI-compatible servers, asked before a run starts: whether they are there, take the key and serve the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from openrlhf.launcher.redaction import redact


@dataclass(frozen=True, kw_only=True)
class ServerWords:
    """How messages speak of a server. flag: gives its URL. key: how a key is given. model: how one of several models is
    named. start: the command that starts one. needs: what it must have beside what all such servers have."""

    flag: str
    key: str
    model: str
    start: str
    needs: str = ""


def server_root(url: str) -> str:
    """The part of an OpenAI-compatible server's URL that all its addresses share."""
    return url.partition("?")[0].rstrip("/").removesuffix("/v1")


def ask_server(
    client: httpx.Client, url: str, path: str, words: ServerWords, body: dict[str, Any] | None = None
) -> Any:
    """The JSON answer to a GET, or to a POST of `body`. Raises ValueError with what is wrong and the fix."""
    address = f"{server_root(url)}{path}"
    try:
        response = client.get(address) if body is None else client.post(address, json=body)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ValueError(
            f"{words.flag} {redact(url)!r}: no answer ({type(error).__name__}: {redact(str(error))}). Start the "
            f"server, as in {words.start}, and give its URL, such as http://host:8000/v1"
        ) from None
    if response.status_code in (401, 403):
        raise ValueError(
            f"{words.flag} {redact(url)!r} refuses the key (HTTP {response.status_code}). Fix: {words.key}"
        )
    if not response.is_success:
        raise ValueError(
            f"{words.flag} {redact(url)!r}: {path} gave HTTP {response.status_code}: {response.text[:200]!r}. It must "
            f"be an OpenAI-compatible server{words.needs}"
        )
    return response.json()


def served_model(client: httpx.Client, url: str, name: str, words: ServerWords) -> str:
    """The name of the model that the server has: `name`, or its only one. Raises ValueError."""
    served = [model["id"] for model in ask_server(client, url, "/v1/models", words)["data"]]
    if name and name not in served:
        raise ValueError(f"{words.model} {name!r} is not served by {redact(url)!r}, which has {served!r}")
    if not name and len(served) != 1:
        raise ValueError(f"{words.flag} {redact(url)!r} serves {served!r}. Fix: name one by {words.model}")
    return name or served[0]
