"""The model behind `check` and `run`: a script, or any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from openrlhf.agents.engine import EngineError, Generation, SamplingParams, Tokenizer
from openrlhf.agents.proxies import proxy_of
from openrlhf.agents.testing.engine import ScriptedEngine
from openrlhf.agents.testing.tokenizer import ByteTokenizer

REQUEST_SECONDS = 120.0
DEFAULT_ANSWERS = ("An answer.", "Another answer, a little longer.", "42", "")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (default: a script)")
    group.add_argument("--answer", action="append", help="an answer of the scripted model; repeat for several")
    group.add_argument("--base-url", help="an OpenAI-compatible server, for example http://127.0.0.1:8000/v1")
    group.add_argument("--model", default="", help="the server's model name")
    group.add_argument("--tokenizer", help="a Hugging Face tokenizer (default: bytes); needs openrlhf-agents[hf]")
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--max-new-tokens", type=int, default=512)
    group.add_argument("--max-len", type=int, default=8192)
    group.add_argument("--max-turns", type=int, default=64)
    group.add_argument("--timeout", type=float, default=60.0, help="seconds for one reset or step")


def make_tokenizer(name: str | None) -> Any:
    """A Hugging Face tokenizer, or bytes."""
    if name is None:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'openrlhf-agents[hf]'") from error
    return AutoTokenizer.from_pretrained(name)


def make_engine(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    if arguments.base_url:
        return CompletionsEngine(arguments.base_url, arguments.model, tokenizer)
    return ScriptedEngine(arguments.answer or DEFAULT_ANSWERS, tokenizer=tokenizer)


class CompletionsEngine:
    """An engine around a server's `/completions`, or `/chat/completions` where it has no other.

    It knows texts only, so log-probs are made up: good for looking at episodes, not for training.
    """

    def __init__(self, base_url: str, model: str, tokenizer: Tokenizer) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.tokenizer = tokenizer
        self.chat_only = False

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> Generation:
        prompt = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        text, finish = await asyncio.to_thread(self._complete, prompt, sampling)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if finish == "stop" and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        limit = sampling.max_tokens
        ids = ids if limit is None else ids[:limit]
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason=finish)

    def _complete(self, prompt: str, sampling: SamplingParams) -> tuple[str, str]:
        body = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if not self.chat_only:
            answer = self._post("/completions", {**body, "prompt": prompt})
            if answer is not None:
                return answer["choices"][0]["text"], _ended(answer["choices"][0])
            self.chat_only = True
        answer = self._post("/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]})
        if answer is None:
            raise EngineError(f"{self.base_url} has neither /completions nor /chat/completions")
        return answer["choices"][0]["message"]["content"] or "", _ended(answer["choices"][0])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer, or None where the server does not know the path."""
        headers = {"content-type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode(), headers)
        proxy = proxy_of(self.base_url)
        proxies: dict[str, str] = {} if proxy is None else {"http": proxy.url, "https": proxy.url}
        way = "" if proxy is None else f" (through {proxy})"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            with opener.open(request, timeout=REQUEST_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                return None
            raise EngineError(f"{self.base_url}{path}: {error.code} {error.read()[:500]!r}{way}") from error
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            raise EngineError(f"{self.base_url}{path}: {error}{way}") from error


def _ended(choice: Any) -> str:
    """How an answer ended, of the many words that servers have for it: cut by its length, or by itself."""
    return "length" if choice.get("finish_reason") == "length" else "stop"
