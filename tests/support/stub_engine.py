"""An inference engine in plain PyTorch and transformers: one sample at a time, no cache, no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from openrlhf.agents.engine import Generation
from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import EngineDownError, GenerateRequest, RequestRejectedError
from openrlhf.rollout.weights.group import GroupAddress, WeightGroup
from openrlhf.rollout.weights.wire import BucketPlan, torch_dtype


class StubEngine:
    """An `InferenceEngine`. Samples at a temperature; refuses top-p, top-k, min-p and penalties."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.name = spec, spec.name
        self.version = 0
        self._unfit = ""
        self._running: dict[str, bool] = {}  # request -> whether it was aborted
        self._go = asyncio.Event()
        self._go.set()
        self._paused = False
        self._group: WeightGroup | None = None

    @staticmethod
    def environment(spec: EngineSpec) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    async def start(self, *, serve: bool = True) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.spec.model, dtype=torch_dtype(self.spec.dtype))
        self.model.eval().requires_grad_(False)
        self._unfit = "" if serve else "it has started and waits for its first weight push"

    # -- generation

    async def generate(self, request: GenerateRequest) -> Generation:
        sampling = request.sampling
        if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, -1, 0.0) or request.images:
            raise RequestRejectedError(f"{self.name} can't serve request {request.request_id}: {sampling}")
        prompt, ends = list(request.token_ids), {*sampling.stop_token_ids, self.model.config.eos_token_id}
        room = (self.spec.max_model_len or 1 << 20) - len(prompt)
        seed = torch.Generator().manual_seed(sampling.seed or 0)
        answer: dict[str, list[Any]] = {"token_ids": [], "logprobs": [], "versions": []}
        reason = "length"
        self._running[request.request_id] = False
        try:
            for _ in range(min(sampling.max_tokens or room, room)):
                await self._turn(request.request_id)
                if self._running[request.request_id]:
                    reason = "abort"
                    break
                logprobs = self._logprobs([*prompt, *answer["token_ids"]], sampling.temperature or 1.0)[-1]
                greedy = sampling.temperature == 0
                token = int(logprobs.argmax() if greedy else logprobs.exp().multinomial(1, generator=seed))
                for name, value in zip(answer, (token, min(float(logprobs[token]), 0.0), self.version), strict=True):
                    answer[name].append(value)
                if token in ends and not sampling.ignore_eos:
                    reason = "stop"
                    break
        finally:
            del self._running[request.request_id]
        return Generation(**answer, finish_reason=reason)

    async def _turn(self, request_id: str) -> None:
        """Let others go on; wait while the engine is paused or takes weights."""
        await asyncio.sleep(0)
        await self._go.wait()
        if self._unfit:
            raise EngineDownError(f"{self.name} must not serve request {request_id}: {self._unfit}")

    def _logprobs(self, ids: list[int], temperature: float) -> torch.Tensor:
        """[T, V]: log-probabilities of what follows each token."""
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float() / temperature, -1)

    # -- control

    async def health(self) -> EngineHealth:
        running = len(self._running)
        return EngineHealth(version=self.version, running=running, paused=self._paused, unfit=self._unfit)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        scores = []
        for row in rows:
            await self._turn("score")
            targets = torch.tensor(row[1:])[:, None]
            scores.append([0.0, *self._logprobs(list(row), 1.0)[:-1].gather(-1, targets)[:, 0].tolist()])
        return scores

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        chosen = [name for name in self._running if request_ids is None or name in request_ids]
        self._running.update(dict.fromkeys(chosen, True))
        return len(chosen)

    async def pause(self, *, clear_cache: bool = False) -> None:
        self._paused = True
        self._go.clear()

    async def resume(self) -> None:
        self._paused = False
        self._go.set()

    async def sleep(self) -> None: ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None: ...

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        offset, address = info["rank_offset"], {k: v for k, v in info.items() if k != "rank_offset"}
        self._group = await asyncio.to_thread(WeightGroup.join, GroupAddress(**address), offset)

    async def receive_weights(self, plan: BucketPlan, version: int) -> None:
        self._go.clear()
        self._unfit = "a weight push has failed; it needs a complete one first"
        try:
            await asyncio.to_thread(self._load, plan, version)
            self.version, self._unfit = version, ""
        except RuntimeError as error:
            raise EngineDownError(f"{self.name} could not receive weights: {error}") from error
        finally:
            if not self._paused:
                self._go.set()

    def _load(self, plan: BucketPlan, version: int) -> None:
        assert self._group is not None, "join a group first"
        for name, tensor in self._group.receive(plan, version):
            self.model.get_parameter(name).copy_(tensor)

    async def start_weight_update(self) -> None:
        raise EngineDownError(f"{self.name} takes pushes over gloo only")

    async def update_weights(self, info: dict[str, Any]) -> None:
        raise EngineDownError(f"{self.name} takes pushes over gloo only")

    async def finish_weight_update(self, version: int) -> None:
        raise EngineDownError(f"{self.name} takes pushes over gloo only")

    async def give_up_push(self) -> EngineHealth:
        return await self.health()

    async def shutdown(self) -> None: ...
