"""A teacher behind servers: where it is, and whether it can be asked.

It is there, serves one model, and means the same by every token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.json_servers import JsonServers, RetryPolicy
from openrlhf.launcher.openai_servers import ServerWords, ask_server, served_model, server_root
from openrlhf.launcher.proxies import ProxiedTransport
from openrlhf.launcher.redaction import redact
from openrlhf.launcher.same_tokens import PROBES

FLAG = "--ref.remote_url"
WORDS = ServerWords(
    flag=FLAG,
    key="--ref.api_key KEY",
    model="--ref.model_name_or_path",
    start="vllm serve TEACHER",
    needs=" with /tokenize and /detokenize, as vLLM's is (vllm serve TEACHER)",
)
IDS_AT_ONCE = 2048
TIMEOUT = 60.0
WAY_OUT = "Serve a model with the actor's tokenizer"
ANSWER_TIMEOUT = 600.0
"""Seconds for one sample, from connecting to the last byte: a busy server lets requests wait."""


class TeacherServerError(RuntimeError):
    """No server gave what is needed of a teacher."""


@dataclass(frozen=True, kw_only=True)
class TeacherServers:
    """Where a teacher is asked. urls: with or without /v1 at their end. model: the name that it is served under."""

    urls: tuple[str, ...]
    model: str
    api_key: str | None = None
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(timeout=ANSWER_TIMEOUT))

    def completions(self) -> JsonServers:
        """A client, to be made and used within one event loop."""
        return JsonServers(
            [f"{server_root(url)}/v1/completions" for url in self.urls],
            kind="teacher",
            flag="--ref.remote_url",
            errors=(TeacherServerError, TeacherServerError),
            api_key=self.api_key,
            retry=self.retry,
        )


def check_teacher_servers(config: TrainPPOConfig, tokenizer: Any) -> TeacherServers:
    """The servers of `--ref.remote_url`, tried out.

    Raises ValueError with what is wrong and the fix: a server that is away or refuses the key, several models and no
    name, token ids that mean something else.
    """
    urls = tuple(part.strip() for part in (config.ref.remote_url or "").split(",") if part.strip())
    key = config.ref.api_key
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    name = config.ref.model_name_or_path or ""
    with httpx.Client(transport=ProxiedTransport(), timeout=TIMEOUT, headers=headers) as client:
        for url in urls:
            name = served_model(client, url, name, WORDS)
            _check_tokens(client, url, name, tokenizer)
    return TeacherServers(urls=urls, model=name, api_key=key)


def _check_tokens(client: httpx.Client, url: str, name: str, tokenizer: Any) -> None:
    """Every token's text, and the ids of texts that are cut in many ways."""
    size = 1 + max(tokenizer.get_vocab().values())
    for start in range(0, size, IDS_AT_ONCE):
        ids = list(range(start, min(start + IDS_AT_ONCE, size)))
        if found := _different(client, url, name, tokenizer, ids):
            raise ValueError(f"{FLAG} {redact(url)!r} ({name}): {found}. {WAY_OUT}")
    for text in PROBES:
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        theirs, ours = (
            ask_server(client, url, "/tokenize", WORDS, body)["tokens"],
            tokenizer.encode(text, add_special_tokens=False),
        )
        if theirs != ours:
            said = f"the text {text!r} is {ours[:8]} for the actor and there {theirs[:8]}"
            raise ValueError(f"{FLAG} {redact(url)!r} ({name}): {said}. {WAY_OUT}")


def _different(client: httpx.Client, url: str, name: str, tokenizer: Any, ids: list[int]) -> str:
    """The first of the ids whose text is another, in words; nothing where they agree."""
    asked = ask_server(client, url, "/detokenize", WORDS, {"model": name, "tokens": ids})
    theirs, ours = asked["prompt"], tokenizer.decode(ids)
    if theirs == ours:
        return ""
    if len(ids) == 1:
        return f"token {ids[0]} is {ours!r} for the actor and there {theirs!r}"
    middle = len(ids) // 2
    first = _different(client, url, name, tokenizer, ids[:middle])
    return first or _different(client, url, name, tokenizer, ids[middle:]) or f"tokens {ids[0]} to {ids[-1]} differ"
