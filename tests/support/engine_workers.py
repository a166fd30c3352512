"""Engines without a model runner: our `VllmEngine` over vLLM's own worker sessions, receivers and layer-wise reload.

What they load is a module of the trainer's parameters. They live in threads of the process that makes them.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.launcher.ray.remote import Remote
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.engine import VllmEngine

LAYER_PARTS = (".self_attn.", ".mlp.")
"""What vLLM makes one layer of: it is put together when the last of its tensors has come."""


class Loaded(nn.Module):
    """Holds tensors of these shapes in layers like those of an engine's model.

    faults: what is raised once a tensor of this name has been loaded, each one time.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, str]] = {}
        self.faults: dict[str, BaseException] = {}
        layers: dict[str, nn.Module] = {}
        for name, tensor in like.items():
            part = next((p for p in LAYER_PARTS if p in name), None)
            layer, _, rest = name.partition(part) if part else (name, "", "weight")
            layer, rest = f"{layer}{part or ''}".strip(".").replace(".", "/"), rest.replace(".", "/")
            module = layers.setdefault(layer, nn.Module())
            module.register_parameter(rest, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
            self.places[name] = (layer, rest)
        self.layers = nn.ModuleDict(layers)

    def parameter(self, name: str) -> nn.Parameter:
        layer, rest = self.places[name]
        return getattr(self.layers[layer], rest)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As models of vLLM do it: through the parameters' loaders, which the reload has wrapped.

        The parameters are those of the beginning, also where the reload puts a finished layer's own in their place.
        """
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = {name: self.parameter(name) for name in self.places}
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            if name in self.faults:
                raise self.faults.pop(name)

    def state(self) -> dict[str, Tensor]:
        """Copies by the trainer's names."""
        return {name: self.parameter(name).detach().clone() for name in self.places}


def worker(backend: str, model: Loaded, *, rank: int, device: int, timeout_s: float) -> Any:
    """vLLM's worker with nothing but the state of a weight update."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    from openrlhf.rollout.weights import plugin

    plugin.register()
    record_metadata_for_reloading(model)
    parallel: Any = SimpleNamespace(rank=rank, world_size=1, data_parallel_index=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    made: Any = Worker.__new__(Worker)
    receiver = WeightTransferEngineFactory._registry[plugin.RECEIVERS[backend]]()
    place = torch.device("cpu", device) if backend == "ipc" else torch.device("cpu")
    built: Any = receiver
    made.weight_transfer_engine = built(SimpleNamespace(), config, place, model)
    made.weight_transfer_engine.timeout_s = timeout_s
    made.vllm_config, made.rank = config, rank
    made._weight_update_active = made._weight_update_is_draft = False
    made.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    return made


class Llm:
    """The calls of `AsyncLLM` that a push makes; each goes to every worker, in a thread of its own."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = workers
        self.errored = False
        self._pool = ThreadPoolExecutor(len(workers))

    async def _all(self, method: str, *args: Any) -> None:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._pool, getattr(w, method), *args) for w in self.workers]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def collective_rpc(self, method: str) -> None:
        """What `AdapterWorker` does before vLLM's manager of adapters has the word; there is none here."""
        assert method == "install_adapter"
        for made in self.workers:
            made.adapter = made.weight_transfer_engine.parts.take()[0]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._all("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        await self._all("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._all("update_weights", request.update_info)

    async def finish_weight_update(self) -> None:
        await self._all("finish_weight_update")

    async def update_weight_version(self, version: str) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def get_weight_version(self) -> str:
        return ""


class Calls:
    """Stands for Ray's actor of an engine: arguments are pickled, calls are futures."""

    def __init__(self, engine: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Future[Any]:
            sent = pickle.loads(pickle.dumps(args))
            return asyncio.run_coroutine_threadsafe(getattr(self._engine, method)(*sent), self._loop)

        return SimpleNamespace(remote=call)


class Engines:
    """Several engines and their loop."""

    def __init__(
        self, backend: Any, like: Mapping[str, Tensor], *, workers: Sequence[int], timeout_s: float, lora_rank: int = 0
    ) -> None:
        """workers: how many of each engine; they are on the devices 0, 1, ... in this order."""
        self.loop = asyncio.new_event_loop()
        self.num_workers = list(workers)
        self.models: list[Loaded] = []
        self.engines: list[VllmEngine] = []
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        for number, count in enumerate(workers):
            spec = EngineSpec(
                model="M",
                name=f"engine {number}",
                tensor_parallel_size=count,
                sync_backend=backend,
                lora_rank=lora_rank,
            )
            own = []
            for rank in range(count):
                self.models.append(Loaded(like))
                device = len(self.models) - 1
                own.append(worker(backend, self.models[-1], rank=rank, device=device, timeout_s=timeout_s))
            engine = asyncio.run_coroutine_threadsafe(self._made(spec, own), self.loop).result(10)
            self.engines.append(engine)
        self.remotes = [Remote[Any](e.name, Calls(e, self.loop)) for e in self.engines]

    @staticmethod
    async def _made(spec: EngineSpec, workers: Sequence[Any]) -> VllmEngine:
        engine = VllmEngine(spec)
        engine._llm = Llm(workers)  # type: ignore[assignment]
        return engine

    @property
    def workers(self) -> list[Any]:
        """All workers of all engines."""
        return [made for engine in self.engines for made in engine._llm.workers]  # type: ignore[union-attr]

    def states(self) -> list[dict[str, Tensor]]:
        """What each worker holds."""
        return [model.state() for model in self.models]

    def close(self) -> None:
        for made in self.workers:
            made.weight_transfer_engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)


def answers(refs: Sequence[Any], *, what: str, timeout: float) -> list[Any]:
    """In place of `calls.get`: the first failure is raised at once."""
    from concurrent.futures import FIRST_EXCEPTION, wait

    done, late = wait(refs, timeout, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if late:
        raise TimeoutError(f"{what}: no answer within {timeout:g} s")
    return [future.result() for future in refs]
