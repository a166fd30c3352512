"""What a call of the policy's endpoints costs an agent worker beside the engine's own time.

    python benchmarks/endpoints.py [--concurrency 64] [--turns 8]

Clients in a process of their own play conversations of some turns with five tools, all at the same time, over kept
connections; the engine answers at once. Shown per format: milliseconds of the worker's
processor per call, those of a bare call of the engine, and the difference; the share of tokens that were tokenised
among the new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.server import ChatServer
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, SampleEngine
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.testing import ScriptedEngine

AIM_MS, AIM_TOKENISED = 5.0, 1.05
ANSWER = "The answer is somewhere between these two numbers, I believe. " * 4
QUESTION = "And what follows from this, in one or two sentences of plain words? " * 6
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
NAMES = ("read", "write", "search", "run", "test")
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    "messages": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    "responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
}
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


def tokenizer() -> Any:
    """A tokenizer of Hugging Face's with one id per byte, and a template in the manner of Qwen's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    made.chat_template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


async def client(url: str, key: str, sessions: list[str], wire: str, turns: int) -> None:
    """Plays all conversations at once."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=len(sessions), max_keepalive_connections=len(sessions))
    async with httpx.AsyncClient(headers=headers, timeout=600, limits=limits) as http:

        async def play(session: str) -> None:
            history: list[dict[str, str]] = []
            for _ in range(turns):
                history.append({"role": "user", "content": QUESTION})
                body: dict[str, Any] = {"model": "policy", "tools": TOOLS[wire]}
                body["input" if wire == "responses" else "messages"] = history
                if wire == "messages":
                    body["max_tokens"] = 512
                reply = await http.post(f"{url}/s/{session}/v1/{PATHS[wire]}", json=body)
                reply.raise_for_status()
                history.append({"role": "assistant", "content": ANSWER})

        await asyncio.gather(*(play(session) for session in sessions))


async def measure(wire: str, concurrency: int, turns: int) -> dict[str, float]:
    """Seconds of the processor per call with the server, and of the engine alone."""
    tools = tokenizer()
    renderer = ChatRenderer(tools)
    ids = [*tools.encode(ANSWER, add_special_tokens=False), tools.eos_token_id]
    engine = ScriptedEngine([ids], tokenizer=tools, keep_requests=False)
    settings = EpisodeSettings(max_length=1_000_000, agent=AgentConfig(max_turns=turns))
    server = ChatServer()
    await server.start()
    sessions = {
        server.add(session): session
        for session in (
            ChatSession(renderer, tools, SampleEngine(engine, settings=settings), SamplingParams(), 1_000_000)
            for _ in range(concurrency)
        )
    }
    counted = 0
    plain = tools.encode

    def encode(text: str, **options: Any) -> list[int]:
        nonlocal counted
        found = plain(text, **options)
        counted += len(found)
        return found

    tools.encode = encode
    renderer.render([{"role": "user", "content": QUESTION}], TOOLS["chat"])  # loads what templates need, once
    order = json.dumps([server.url, server.token, list(sessions), wire, turns])
    began = time.process_time()
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", stdin=subprocess.PIPE)
    await process.communicate(order.encode())
    used = time.process_time() - began
    await server.stop()
    assert process.returncode == 0, "the clients failed"
    calls = concurrency * turns
    bare = SampleEngine(engine, settings=settings)
    prompt = list(range(200)) * 10
    began = time.process_time()
    for _ in range(calls):
        await bare.generate(prompt, SamplingParams(max_tokens=1000))
    alone = time.process_time() - began
    new = sum(len(b.recorder) - b.recorder.trainable.count(1) for s in sessions.values() for b in s.branches)
    return {"with": 1000 * used / calls, "alone": 1000 * alone / calls, "tokenised": counted / new}


def main() -> int:
    """Prints a line per wire format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        url, key, sessions, wire, turns = json.load(sys.stdin)
        asyncio.run(client(url, key, sessions, wire, turns))
        return 0
    print(f"{args.concurrency} conversations of {args.turns} turns at once; ms of the worker's processor per call")
    good = True
    for wire in PATHS:
        found = asyncio.run(measure(wire, args.concurrency, args.turns))
        overhead = found["with"] - found["alone"]
        good = good and overhead <= AIM_MS and found["tokenised"] <= AIM_TOKENISED
        print(
            f"{wire:10} {found['with']:6.2f}, engine alone {found['alone']:5.2f}, overhead "
            f"{overhead:6.2f} (aim {AIM_MS:g}); tokenised {found['tokenised']:.3f} of the new tokens"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
