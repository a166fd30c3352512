"""Real vLLM engines in a process of their own, and the models that they are to hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.weights.sender import SendReport, WeightSender
from openrlhf.rollout.weights.wire import plan_buckets, specs_of
from support.rollout_engine import EngineHost
from support.tiny_models import tiny_qwen3, tiny_qwen3_moe

PROMPT = [10, 20, 30, 40]


class Stage:
    """Engines, their models, and a weight group that is made once per engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.current: dict[str, torch.nn.Module] = {}
        self.versions = {"tied": 0, "untied": 0, "mixture": 0}
        self.sent: dict[str, list[tuple[str, torch.Tensor]]] = {}
        """What a push sends: the tensors of the checkpoint, in which every expert has its own."""
        self._senders: dict[str, WeightSender] = {}
        self.generation = 0
        self._models = 0
        specs = []
        for name in self.versions:
            path = self.new_model(name)
            # A model's own sampling defaults must change nothing.
            defaults = {"eos_token_id": 1, "do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0}
            (Path(path) / "generation_config.json").write_text(json.dumps(defaults))
            specs.append(EngineSpec(model=path, name=name, max_model_len=256, enable_prefix_caching=name == "tied"))
        self.host = EngineHost(specs)
        self.pool = ThreadPoolExecutor(4)

    def new_model(self, name: str) -> str:
        self._models += 1
        path, seed = str(self.folder / f"{name}-{self._models}"), self._models
        path = tiny_qwen3_moe(path, seed) if name == "mixture" else tiny_qwen3(path, tied=name == "tied", seed=seed)
        self.sent[name] = sorted(load_file(Path(path) / "model.safetensors").items())
        self.current[name] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return path

    def connect(self, name: str) -> WeightSender:
        self.generation += 1
        sender = self._senders[name] = WeightSender()
        address = sender.open(2, self.generation)
        joining = self.host.submit(name, "init_weight_transfer", address.for_engine(1))
        sender.connect()
        joining.result(60)
        return sender

    def push(self, name: str) -> SendReport:
        """New random weights, pushed in several buckets."""
        self.new_model(name)
        sender = self._senders.get(name) or self.connect(name)
        version = self.versions[name] + 1
        named = self.sent[name]
        plan = plan_buckets(specs_of(named), 100_000)
        receiving = self.host.submit(name, "receive_weights", plan, version)
        report = sender.send([[pair] for pair in named], plan, version)
        receiving.result(180)
        self.versions[name] = version
        return report

    def logprobs(self, name: str, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """The model's own log-probs in float64: one per token, 0.0 for the first."""
        with torch.no_grad():
            logits = self.current[name](torch.tensor([list(ids)])).logits[0, :-1].double() / temperature
        targets = torch.tensor(list(ids[1:]))[:, None]
        return [0.0, *torch.log_softmax(logits, -1).gather(-1, targets)[:, 0].tolist()]

    def generate(self, name: str, prompt: Sequence[int] = PROMPT, **sampling: object) -> Generation:
        return self.host.call(name, "generate", request(prompt, **sampling))

    def check(self, name: str, prompt: Sequence[int], answer: Generation, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs and the model's."""
        own = self.logprobs(name, [*prompt, *answer.token_ids], temperature)[len(prompt) :]
        assert len(own) == len(answer.logprobs) == len(answer.versions) == len(answer.token_ids)
        return max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True))


def request(prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", token_ids=list(prompt), sampling=SamplingParams().with_(**sampling))
