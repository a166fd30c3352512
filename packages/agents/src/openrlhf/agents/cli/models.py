"""The model behind `check` and `eval`: a script, or any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openrlhf.agents.engine import EngineError, Generation, RequestRefusedError, SamplingParams, Tokenizer
from openrlhf.agents.proxies import proxy_of
from openrlhf.agents.testing.engine import ScriptedEngine
from openrlhf.agents.testing.tokenizer import ByteTokenizer

REQUEST_SECONDS = 600.0
TRIES = 5  # of a request that the server is too busy for, or cannot be reached for
BACKOFF_SECONDS = 1.0  # before the second try; twice as long before each further one
MAX_WAIT_SECONDS = 60.0
BUSY = (408, 409, 429, 500, 502, 503, 504)
UNKNOWN_PATH = (404, 405)
KEY = "OPENAI_API_KEY"
DEFAULT_ANSWERS = ("An answer.", "Another answer, a little longer.", "42", "")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "model (default: a script)",
        f"A server's key is read from the variable {KEY}. Its /completions is asked with the whole text so far (with "
        "token ids where --tokenizer is given and the server takes them), else /chat/completions with that text as "
        "messages.",
    )
    group.add_argument("--answer", action="append", help="an answer of the scripted model; repeat for several")
    group.add_argument("--base-url", help="an OpenAI-compatible server, for example http://127.0.0.1:8000/v1")
    group.add_argument("--model", default="", help="the server's model name")
    group.add_argument("--chat", action="store_true", help="ask /chat/completions even where there is /completions")
    group.add_argument("--tokenizer", help="a Hugging Face tokenizer (default: bytes); needs openrlhf-agents[hf]")
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--max-new-tokens", type=int, default=512)
    group.add_argument("--max-len", type=int, default=8192)
    group.add_argument("--max-turns", type=int, default=64)
    group.add_argument("--timeout", type=float, default=60.0, help="seconds for one reset or step, or one reward call")


def make_tokenizer(name: str | None) -> Any:
    """A Hugging Face tokenizer, or bytes."""
    if name is None:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'openrlhf-agents[hf]'") from error
    return AutoTokenizer.from_pretrained(name)


def make_engine(arguments: argparse.Namespace, tokenizer: Any, concurrency: int = 8) -> Any:
    """concurrency: requests to a server at the same time."""
    if arguments.base_url:
        ids = arguments.tokenizer is not None
        return ServerEngine(
            arguments.base_url, arguments.model, tokenizer, ids=ids, chat=arguments.chat, concurrency=concurrency
        )
    return ScriptedEngine(arguments.answer or DEFAULT_ANSWERS, tokenizer=tokenizer)


class ServerEngine:
    """An engine around a server's `/completions`, or `/chat/completions` where it has no other.

    ids: send token ids, and take them where the server gives them (vLLM's `return_token_ids`); else texts travel and
    ids and log-probs are made up here, which is good for looking at episodes and scores, not for training.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        ids: bool = False,
        chat: bool = False,
        concurrency: int = 8,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.tokenizer = tokenizer
        self.chat_only = chat
        self._ids = ids
        self._threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="request")
        self._talks: dict[str, list[dict[str, str]]] = {}

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> Generation:
        if images:
            raise EngineError("images are not sent to a server here: this command is for texts")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._generate, list(token_ids), sampling)

    def _generate(self, token_ids: list[int], sampling: SamplingParams) -> Generation:
        choice = None if self.chat_only else self._completion(token_ids, sampling)
        if choice is None:
            self.chat_only = True
            choice = self._chat(token_ids, sampling)
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        text = choice.get("text") if "text" in choice else choice["message"].get("content")
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not self._ids or not ids:
            ids = self.tokenizer.encode(text or "", add_special_tokens=False)
            ids += [self.tokenizer.eos_token_id] if finish == "stop" and self.tokenizer.eos_token_id is not None else []
            logprobs = []
        ids = ids if sampling.max_tokens is None else ids[: sampling.max_tokens]
        known = len(logprobs) == len(ids) and None not in logprobs
        if self.chat_only:
            self._remember(token_ids, ids, text or "")
        logprobs = logprobs if known else [-1.0] * len(ids)
        return Generation(token_ids=ids, logprobs=logprobs, versions=[0] * len(ids), finish_reason=finish)

    def _completion(self, token_ids: list[int], sampling: SamplingParams) -> Any:
        """The answer of /completions; None where the server has none."""
        body = self._body(sampling)
        if self._ids:
            try:
                asked = {"prompt": token_ids, "logprobs": 0, "return_token_ids": True}
                answer = self._post("/completions", {**body, **asked})
                return answer if answer is None else _choice(answer)
            except RequestRefusedError:
                self._ids = False  # a server that takes texts only
        answer = self._post("/completions", {**body, "prompt": self._text(token_ids)})
        return answer if answer is None else _choice(answer)

    def _chat(self, token_ids: list[int], sampling: SamplingParams) -> Any:
        """The answer of /chat/completions: what this engine answered is the assistant's, the rest the user's."""
        text = self._text(token_ids)
        known = max((t for t in list(self._talks) if text.startswith(t)), key=len, default="")
        messages = [*self._talks.get(known, []), {"role": "user", "content": text[len(known) :]}]
        answer = self._post("/chat/completions", {**self._body(sampling), "messages": messages})
        if answer is None:
            raise EngineError(f"{self.base_url} has neither /completions nor /chat/completions")
        self._talks[text] = messages
        return _choice(answer)

    def _remember(self, token_ids: list[int], ids: list[int], text: str) -> None:
        messages = self._talks.pop(self._text(token_ids), None)
        if messages is not None:
            self._talks[self._text([*token_ids, *ids])] = [*messages, {"role": "assistant", "content": text}]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _body(self, sampling: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        return body | ({"stop": list(sampling.stop)} if sampling.stop else {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer, or None where the server does not know the path. Tries again while the server is busy."""
        for number in range(1, TRIES + 1):
            try:
                return self._post_once(path, body)
            except _BusyError as busy:
                if number == TRIES:
                    raise EngineError(f"{busy} ({TRIES} tries)") from busy
                time.sleep(min(max(busy.wait, BACKOFF_SECONDS * 2 ** (number - 1)), MAX_WAIT_SECONDS))
        raise AssertionError

    def _post_once(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        if os.environ.get(KEY):
            headers["authorization"] = f"Bearer {os.environ[KEY]}"
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode(), headers)
        proxy = proxy_of(self.base_url)
        proxies: dict[str, str] = {} if proxy is None else {"http": proxy.url, "https": proxy.url}
        way = "" if proxy is None else f" (through {proxy})"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            with opener.open(request, timeout=REQUEST_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code in UNKNOWN_PATH:
                return None
            text = f"{self.base_url}{path}: {error.code} {error.read()[:500]!r}{way}"
            if error.code in BUSY:
                raise _BusyError(text, error.headers.get("retry-after")) from error
            raise RequestRefusedError(text) from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise _BusyError(f"{self.base_url}{path}: {error}{way}") from error
        except ValueError as error:
            raise EngineError(f"{self.base_url}{path}: no JSON: {error}{way}") from error


class _BusyError(EngineError):
    """The server may answer later. wait: seconds that it asks for."""

    def __init__(self, message: str, wait: str | None = None) -> None:
        super().__init__(message)
        self.wait = float(wait) if wait and wait.isdigit() else 0.0


def _choice(answer: Any) -> Any:
    """The one choice of an answer. Raises EngineError for what is no answer."""
    try:
        choice = answer["choices"][0]
        if "text" in choice or "content" in choice["message"]:
            return choice
    except (LookupError, TypeError):
        pass
    raise EngineError(f"the server's answer holds no choice: {str(answer)[:500]}")
