from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from openrlhf.agents.types import StopReason, Trajectory, Turn
from openrlhf.core.config import AlgoConfig, PolicyLossConfig
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import RewardRank
from openrlhf.launcher.rewards.http import HttpRewardSource
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.serving.scorer import RewardScorer
from openrlhf.launcher.serving.serve import bind, check_exposure, greeting, serve_rm
from openrlhf.launcher.supervised_config import ServedRewardConfig, ServeRMConfig
from openrlhf.learner.config import DsConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import LearnerSpec, Role
from support.launcher_reward_model import tiny_reward_model
from support.tiny_models import byte_tokenizer

DS = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
TEXTS = ["<|user|>2+2?<|end|><|assistant|>4<|end|>", "short", "a longer text than the others, with ünïcode"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_reward_model(tmp_path_factory.mktemp("rm") / "m", statistics=(0.5, 2.0))


def expected_rewards(model: str) -> list[float]:
    """The plain way: one text at a time through transformers' own class."""
    plain: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = byte_tokenizer()
    ids = [tokenizer(t, add_special_tokens=False, return_tensors="pt")["input_ids"] for t in TEXTS]
    with torch.no_grad():
        return [plain(input_ids=i).logits.item() for i in ids]


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 2}, {"packing": True}])
def test_rewards_equal_the_models_own(model: str, options: dict[str, Any]) -> None:
    ds = replace(DS, packing_samples=options.pop("packing", False))
    scorer = RewardScorer(model, ds, max_len=100, **options)
    assert scorer.score(scorer.tokenize(TEXTS)) == pytest.approx(expected_rewards(model), abs=1e-5)


def test_b044_the_reward_is_read_at_the_last_token(model: str) -> None:
    scorer = RewardScorer(model, DS, max_len=100)
    ids = [5, 1, 7, 1]  # an end token (1) in the prompt
    assert scorer.score([ids, ids + [1] * 9])[0] == pytest.approx(scorer.score([ids])[0], abs=1e-5)
    assert scorer.score([ids])[0] != pytest.approx(scorer.score([ids[:2]])[0], abs=1e-3)


def test_b120_a_model_in_the_cluster_and_a_server_give_the_same_rewards(model: str) -> None:
    tokenizer: Any = byte_tokenizer()
    ids = tokenizer(TEXTS, add_special_tokens=False)["input_ids"]
    samples = [sampled(row) for row in ids]
    texts = [tokenizer.decode(s.token_ids, skip_special_tokens=False) for s in samples]  # what a server is sent
    config = RankConfig(
        algo=AlgoConfig(),
        policy_loss=PolicyLossConfig(),
        value_clip=0.5,
        max_len=100,
        agg_constant=1.0,
        pad_token_id=0,
    )
    learner = Learner(LearnerSpec(role=Role.REWARD, model_path=model, ds=DS, score_micro_batch_size=2))
    trainer = RewardRank(learner, config, resolve=lambda what, handles: [samples for _ in handles])
    refs = [SampleRef(handle="h", position=i, index=i, reward=0.0, length=len(ids[i])) for i in range(len(samples))]
    rewards = trainer.rewards([refs])
    scorer = RewardScorer(model, DS, max_len=100)
    served = scorer.score(scorer.tokenize(texts))
    assert list(rewards.values()) == pytest.approx(served, abs=1e-6)
    assert served == pytest.approx(expected_rewards(model), abs=1e-5)
    assert learner.reward_mean_std == (0.5, 2.0)  # where the trainer's running normalisation starts


def sampled(ids: list[int]) -> Trajectory:
    """A finished sample of which the first token is the prompt."""
    rest = len(ids) - 1
    return Trajectory(
        token_ids=ids,
        trainable=[0, *[1] * rest],
        logprobs=[0.0, *[-1.0] * rest],
        versions=[-1, *[0] * rest],
        prompt_length=1,
        turns=[Turn(start=1, end=len(ids), finish_reason="stop")],
        stop_reason=StopReason.DONE,
        group_id="e0-p0",
        sample_index=0,
    )


def test_normalisation_uses_the_stored_statistics(model: str, tmp_path: Path) -> None:
    scorer = RewardScorer(model, DS, max_len=100, normalize=True)
    expected = [(r - 0.5) / 2.0 for r in expected_rewards(model)]
    assert scorer.score(scorer.tokenize(TEXTS)) == pytest.approx(expected, abs=1e-5)
    bare = tiny_reward_model(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"--reward\.normalize_enable: .* has no mean and std"):
        RewardScorer(bare, DS, max_len=100, normalize=True)


def test_exposure_and_greeting() -> None:
    check_exposure(ServeRMConfig())
    check_exposure(ServeRMConfig(host="0.0.0.0", api_key="k"))
    check_exposure(ServeRMConfig(host="0.0.0.0", insecure=True))
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 can be reached .*--api_key KEY, or --insecure"):
        check_exposure(ServeRMConfig(host="0.0.0.0"))
    assert "--host 0.0.0.0 --api_key KEY" in greeting(ServeRMConfig(), 5000)
    assert ":5000/get_reward --reward.api_key KEY" in greeting(ServeRMConfig(host="0.0.0.0", api_key="geheim"), 5000)
    assert "geheim" not in greeting(ServeRMConfig(host="0.0.0.0", api_key="geheim"), 5000)


def test_mistakes_end_the_server_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--host 127\.0\.0\.1 --port {port}: cannot listen there"):
            bind("127.0.0.1", port)
    assert serve_rm(ServeRMConfig(port=0)) == 1
    assert "--reward.model_name_or_path is missing" in capsys.readouterr().err
    missing = ServedRewardConfig(model_name_or_path="/no/model")
    assert serve_rm(ServeRMConfig(port=0, reward=missing, ds=DS)) == 1
    wanted = "give a folder with a Hugging Face model or a hub name"
    assert capsys.readouterr().err == f"error: --reward.model_name_or_path '/no/model': not found; {wanted}\n"  # L10


@pytest.fixture
def server(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command on a free port: the process and its URL."""
    command = [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward.model_name_or_path", model]
    command += ["--port", "0", "--data.max_len", "100", "--api_key", "k"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"http://\S+/get_reward", line):
                yield process, match[0]
                break
        else:
            raise AssertionError("the server said no URL")
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()


def say_nonsense(url: str) -> str:
    """What the server answers to what is no HTTP."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=30) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def test_the_command_serves_the_trainers_client_and_stops_gracefully(
    server: tuple[subprocess.Popen[str], str], model: str
) -> None:
    process, url = server
    expected = expected_rewards(model)

    async def ask_until_term() -> list[list[float | None]]:
        source = HttpRewardSource([url], api_key="k")
        one = await source.score(TEXTS, [""] * 3, [None] * 3)
        many = [asyncio.create_task(source.score([TEXTS[i % 3]], [""], [None])) for i in range(200)]
        await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        results = [list(one.rewards), [r for t in many for r in (await t).rewards]]
        await source.close()
        return results

    one, many = asyncio.run(ask_until_term())
    assert one == pytest.approx(expected, abs=1e-4)
    assert many == pytest.approx([expected[i % 3] for i in range(200)], abs=1e-4)
    assert httpx.post(url, json={"query": ["a"]}).status_code == 401
    refusal = say_nonsense(url)  # N17
    assert refusal.startswith("HTTP/1.1 400 Bad Request")
    assert json.loads(refusal.partition("\r\n\r\n")[2]) == {"error": "Invalid HTTP request received."}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
