"""Requests per second of the reward server: one client after the other against 64 at once.

    python benchmarks/serve_rm.py [--requests 2000] [--clients 64] [--hidden-size 64] [--layers 2] [--words 0]

Starts `openrlhf.cli.serve_rm` with a small random model on a free port. Also checks that every request gets its own
reward. The clients write HTTP by hand, so that the figures are the server's. Batching pays as long as one request does
not fill the device: on a CPU core that takes a tiny model and short texts, on a GPU most models and texts are like
that. `--hidden-size 256 --layers 4 --words 7` is a case where one text fills a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.launcher_reward_model import tiny_reward_model


class Client:
    """One keep-alive connection."""

    async def connect(self, url: str) -> Client:
        """Open the connection."""
        parts = urlsplit(url)
        self._head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: "
        self._reader, self._writer = await asyncio.open_connection(parts.hostname, parts.port)
        return self

    async def reward(self, text: str) -> float:
        """The reward of one text."""
        body = json.dumps({"query": [text]})
        self._writer.write(f"{self._head}{len(body)}\r\n\r\n{body}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        assert length is not None, head
        return json.loads(await self._reader.readexactly(int(length[1])))["rewards"][0]


async def run(url: str, texts: list[str], clients: int) -> tuple[list[float], float]:
    """(rewards, seconds) of all texts from so many clients at once."""
    connections = [await Client().connect(url) for _ in range(clients)]
    rewards = [0.0] * len(texts)

    async def work(number: int) -> None:
        for i in range(number, len(texts), clients):
            rewards[i] = await connections[number].reward(texts[i])

    began = time.perf_counter()
    await asyncio.gather(*(work(n) for n in range(clients)))
    return rewards, time.perf_counter() - began


def main() -> int:
    """Print the figures; exit status 1 when an answer went to the wrong client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--words", type=int, default=0, help="filler words per text, about 8 tokens each")
    options = parser.parse_args()
    texts = [f"question {i % 50}: {'?' * (i % 7)}" + " because" * options.words for i in range(options.requests)]
    heads = options.hidden_size // 32
    sizes = {"hidden_size": options.hidden_size, "num_hidden_layers": options.layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_reward_model(Path(folder) / "m", statistics=None, **sizes)
        command = [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward.model_name_or_path", model, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = next(m[0] for line in server.stdout if (m := re.search(r"http://\S+/get_reward", line)))
                some = texts[: max(options.requests // 10, 50)]
                asyncio.run(run(url, some, 1))  # warm-up
                alone, slow = asyncio.run(run(url, some, 1))
                together, fast = asyncio.run(run(url, texts, options.clients))
            finally:
                server.terminate()
    wrong = sum(abs(a - b) > 1e-4 for a, b in zip(alone, together, strict=False))
    rates = len(some) / slow, len(texts) / fast
    print(f"one at a time: {rates[0]:.0f} requests/s; {options.clients} clients: {rates[1]:.0f} requests/s")
    print(f"ratio {rates[1] / rates[0]:.1f}; wrong answers: {wrong} of {len(alone)} checked")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
