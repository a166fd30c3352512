"""A teacher behind an OpenAI-compatible server: a small server with vLLM's JSON, and what a policy makes of it."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, PolicyDistillConfig
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.json_servers import RetryPolicy
from openrlhf.launcher.placement import roles
from openrlhf.launcher.ranks.remote_teacher import RemoteReference, read_places
from openrlhf.launcher.ranks.roles import PolicyRank, ReferenceRank
from openrlhf.launcher.redaction import redact_value
from openrlhf.launcher.teacher_check import TeacherServerError, TeacherServers, check_teacher_servers
from openrlhf.learner.spec import Role
from support.launcher_tokenizer import byte_tokenizer
from support.toy_ranks import references, sampled, toy_config, toy_rank

STUDENT = torch.tensor([[0.0, 0.4, 1.0], [0.3, 0.0, 0.1], [0.2, 0.2, 0.0]])
TEACHER = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 0.1], [0.0, 0.2, 1.0]])
FAST = RetryPolicy(timeout=5.0, attempts=3, backoff=0.01)


@dataclass
class Server:
    """Answers as vLLM's server with the table TEACHER for a model. fail: how many completions get 503 first."""

    url: str = ""
    key: str = "secret"
    fail: int = 0
    broken: bool = False
    models: list[str] = field(default_factory=lambda: ["big"])
    tokenizer: Any = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        places: list[Any] = [None]
        for before, token in zip(body["prompt"], body["prompt"][1:], strict=False):
            logp = TEACHER[before].log_softmax(-1).tolist()
            order = sorted(range(3), key=lambda i: -logp[i])
            given = {*order[: body["prompt_logprobs"]], token}
            places.append(
                {str(i): {"logprob": logp[i], "rank": 1 + order.index(i), "decoded_token": "x"} for i in given}
            )
        return {"choices": [{"text": "", **({} if self.broken else {"prompt_logprobs": places})}]}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/completions":
            self.fail -= 1
            return (503, {}) if self.fail >= 0 else (200, self.completion(body))
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        if path == "/tokenize" and self.tokenizer is not None:
            return 200, {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])}
        if path == "/detokenize" and self.tokenizer is not None:
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        return 404, {"detail": "Not Found"}


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            allowed = self.headers.get("authorization") == f"Bearer {state.key}"
            status, content = state.answer(self.path, body) if allowed else (401, {})
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = respond  # noqa: N815 (the names that the library calls)
        do_POST = respond  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{httpd.server_port}/v1"
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def algo(**options: Any) -> AlgoConfig:
    advantage, distill = AdvantageConfig(estimator="on_policy_distill"), PolicyDistillConfig(**options)
    return AlgoConfig(advantage=advantage, kl=KLConfig(init_coef=0.0), distill=distill)


def remote(server: Server, config: AlgoConfig, retry: RetryPolicy = FAST) -> RemoteReference:
    servers = TeacherServers(urls=(server.url,), model="big", api_key=server.key, retry=retry)
    return RemoteReference(servers, toy_config(config), lambda what, handles: list(handles))


ROWS = [sampled([0, 2, 1]), sampled([0, 1])]


def test_a_policy_learns_from_a_server(server: Server) -> None:
    """What `--ref.remote_url` and `--ref.api_key` lead to is what a teacher of the cluster says."""
    server.fail = 1  # one attempt in vain
    shares = [references(ROWS, (0.0, 0.0))]
    here = toy_rank(ReferenceRank, TEACHER, toy_config(algo()))
    there = remote(server, algo()).logprobs(shares)
    assert {i: v.tolist() for i, v in there.items()} == {
        i: pytest.approx(v.tolist(), abs=1e-6) for i, v in here.logprobs(shares).items()
    }
    assert [a["prompt"] for a in sorted(server.asked, key=lambda a: -len(a["prompt"]))] == [[0, 2, 1], [0, 1]]
    assert server.asked[0]["max_tokens"] == 1
    rank = toy_rank(PolicyRank, STUDENT, toy_config(algo()))
    batch = rank.prepare(shares, scores={"ref_logprobs": [there]}, kl_coef=0.0).batch
    d = TEACHER.log_softmax(-1) - STUDENT.log_softmax(-1)
    assert batch.advantages is not None
    assert torch.allclose(batch.advantages, torch.tensor([[0, d[0, 2], d[2, 1]], [0, d[0, 1], 0]]), atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_most_probable_tokens_come_from_a_server_too(server: Server, k: int) -> None:
    config = algo(divergence="forward", top_k=k)
    shares = [references(ROWS, (0.0, 0.0))]
    here = toy_rank(ReferenceRank, TEACHER, toy_config(config)).tell(shares)
    there = remote(server, config).tell(shares)
    for index, told in here.items():
        assert there[index]["ids"].tolist() == told["ids"].tolist()
        assert torch.allclose(there[index]["logprobs"], told["logprobs"], atol=1e-6)
        assert torch.allclose(there[index]["rest"].exp(), told["rest"].exp(), atol=1e-6)


def test_a_small_vocabulary_is_filled_up() -> None:
    told = read_places(
        [(4, {"4": {"logprob": math.log(0.75), "rank": 1}, "7": {"logprob": math.log(0.25), "rank": 2}})], 3
    )
    assert told["ids"].tolist() == [[4, 7, 7]]
    assert told["logprobs"].exp().tolist() == [pytest.approx([0.75, 0.25, 0.0])]
    assert float(told["rest"].exp()) == pytest.approx(0.0, abs=1e-7)


def test_what_a_server_does_wrong_is_said(server: Server) -> None:
    shares = [references(ROWS, (0.0, 0.0))]
    server.broken = True
    with pytest.raises(TeacherServerError, match=r"no log-probs of the prompt's tokens.*prompt_logprobs.*65 tokens"):
        remote(server, algo()).logprobs(shares)
    server.fail = 10**6
    with pytest.raises(TeacherServerError, match=r"teacher http://127.*gave up after 3 attempts.*HTTP 503"):
        remote(server, algo()).logprobs(shares)


def test_requests_under_way_end_before_an_error_is_raised(server: Server) -> None:
    answered: list[list[int]] = []
    answer = server.completion

    def unevenly(body: dict[str, Any]) -> dict[str, Any]:
        if body["prompt"] == [0, 1]:
            return {"choices": [{"text": ""}]}
        time.sleep(0.3)
        answered.append(body["prompt"])
        return answer(body)

    server.completion = unevenly
    with pytest.raises(TeacherServerError, match=r"no log-probs of the prompt's tokens"):
        remote(server, algo()).logprobs([references(ROWS, (0.0, 0.0))])
    assert answered == [[0, 2, 1]]


def configured(server: Server, **flags: Any) -> TrainPPOConfig:
    values = {"ref.remote_url": server.url, "ref.api_key": "secret", "algo.advantage.estimator": "on_policy_distill"}
    return build(TrainPPOConfig(), values | {name.replace("__", "."): value for name, value in flags.items()})


def test_a_server_is_tried_out_before_anything_starts(server: Server) -> None:
    tokenizer = byte_tokenizer()
    server.tokenizer = tokenizer
    config = configured(server)
    assert Role.REFERENCE not in roles(config)
    found = check_teacher_servers(config, tokenizer)
    assert (found.urls, found.model, found.api_key) == ((server.url,), "big", "secret")
    assert "secret" not in str(redact_value("ref.api_key", "secret"))
    server.models = ["big", "small"]
    assert check_teacher_servers(configured(server, ref__model_name_or_path="small"), tokenizer).model == "small"
    for flags, message in (
        ({}, r"serves \['big', 'small'\]. Fix: name one by --ref.model_name_or_path"),
        ({"ref__model_name_or_path": "other"}, r"'other' is not served"),
        ({"ref__api_key": "wrong"}, r"refuses the key \(HTTP 401\). Fix: --ref.api_key"),
        ({"ref__remote_url": "http://127.0.0.1:9/v1"}, r"no answer \(ConnectError.*vllm serve TEACHER"),
    ):
        with pytest.raises(ValueError, match=message):
            check_teacher_servers(configured(server, **flags), tokenizer)
    server.tokenizer = None
    with pytest.raises(ValueError, match=r"/detokenize gave HTTP 404.*OpenAI-compatible server with /tokenize"):
        check_teacher_servers(configured(server, ref__model_name_or_path="big"), tokenizer)


class Swapped:
    """A tokenizer that reads two ids the other way round."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([{70: 71, 71: 70}.get(i, i) for i in ids])


def test_a_token_that_means_something_else_is_named(server: Server) -> None:
    tokenizer = byte_tokenizer()
    server.tokenizer = Swapped(tokenizer)
    with pytest.raises(
        ValueError, match=r"token 70 is '.' for the actor and there '.'. Serve a model with the actor's"
    ):
        check_teacher_servers(configured(server), tokenizer)
