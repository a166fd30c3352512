"""A real vLLM server as a teacher: its log-probs beside those of the same model, in the cluster's way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.core.config import AdvantageConfig, AlgoConfig, PolicyDistillConfig
from openrlhf.core.losses.distill import OutputLayer, top_tokens
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.ranks.remote_teacher import RemoteReference
from openrlhf.launcher.teacher_check import check_teacher_servers
from support.tiny_models import tiny_qwen3
from support.toy_ranks import references, sampled, toy_config

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(600)]

K = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_qwen3(tmp_path_factory.mktemp("teacher")))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """`vllm serve`, with a key."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    words += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "128", "--api-key", "secret"]
    words += ["--served-model-name", "teacher", "--max-logprobs", str(K), "--enforce-eager"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = model / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def test_a_vllm_server_says_what_its_model_says(url: str, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = build(TrainPPOConfig(), {"ref.remote_url": url, "ref.api_key": "secret"})
    servers = check_teacher_servers(config, tokenizer)
    assert servers.model == "teacher"
    rows = [sampled(tokenizer.encode(f"sort {i}4321 and go on", add_special_tokens=False), start=3) for i in range(12)]
    algo = AlgoConfig(
        advantage=AdvantageConfig(estimator="on_policy_distill"),
        distill=PolicyDistillConfig(divergence="forward", top_k=K),
    )
    remote = RemoteReference(servers, toy_config(algo), lambda what, handles: list(handles))
    shares = [references(rows, [0.0] * len(rows))]
    logprobs, told = remote.logprobs(shares), remote.tell(shares)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worst = 0.0
    for index, row in enumerate(rows):
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            logits = network(input_ids=ids, use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][2:]
        top = top_tokens(logits[2:], OutputLayer(weight=None), K)
        assert told[index]["ids"].tolist() == top.ids.tolist()
        for here, there in (
            (own, logprobs[index]),
            (top.logprobs, told[index]["logprobs"]),
            (top.rest, told[index]["rest"]),
        ):
            worst = max(worst, float((here - there).abs().max()))
    print(f"largest difference of a log-prob: {worst:.1e}")
    assert worst <= 1e-4
