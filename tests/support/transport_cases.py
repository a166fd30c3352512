"""Weight pushes from real trainer ranks into engine workers, over each backend; run by `learner_ranks`.

Ours are the trainer's and the engine's code from `LearnerActor.push` to `VllmEngine`, vLLM's the trainer engines, the
worker's session, the receivers and the reload. Not there: Ray, a model runner, a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from openrlhf.core.config import PolicyLossConfig
from openrlhf.launcher.ray import learner_actor
from openrlhf.launcher.ray.learner_actor import LearnerActor, Transfer
from openrlhf.learner.config import LoraConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.lora_stream import Form
from openrlhf.learner.objective import PolicyObjective
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec, plan_buckets
from support.cuda_stand_in import stand_in_for_cuda
from support.engine_workers import Engines, Loaded, answers
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import make_spec, share

NO_ADAPTERS = LoraConfig()
BUCKET = 20_000
"""Bytes; the embedding of the tiny models has 32,768."""
SILENCE_S = 3.0
"""Bound of waits in a push that must fail; those that must succeed get more, since the machine may be busy."""
PATIENCE_S = 60.0
HALF_OF_A_LAYER = "model.layers.1.self_attn.k_proj.weight"
OBJECTIVE = PolicyObjective(config=PolicyLossConfig())


def engine_sizes(backend: str, world: int) -> list[int]:
    """Workers of each engine: over ipc as many as trainer ranks, on their devices."""
    return [world // 2, world - world // 2] if backend == "ipc" and world > 1 else [1] if backend == "ipc" else [1, 2]


class Run:
    """One rank's learner and actor; on rank 0 the engines as well."""

    def __init__(self, rank: int, world: int, folder: Path, backend: str, learner: Learner) -> None:
        self.rank, self.world, self.folder, self.learner = rank, world, folder, learner
        self.backend = backend = "gloo" if backend == "shared" else backend
        self.held = load_file(Path(learner.spec.model_path) / "model.safetensors")
        sizes = engine_sizes(backend, world)
        rank_of_adapter = learner.spec.ds.lora.rank
        self.form: Form = "apart" if rank_of_adapter else "merged"
        self.skip_frozen = False
        self.engines = None
        if rank == 0:
            options: Any = {"workers": sizes, "timeout_s": PATIENCE_S, "lora_rank": rank_of_adapter}
            self.engines = Engines(backend, self.held, **options)
        self.sizes, self.generation, self.version = sizes, 0, 0
        self.actor: Any = LearnerActor()
        self.actor.rank, self.actor.sender = rank, None
        self.actor.role = SimpleNamespace(learner=self.learner)

    def connect(self) -> None:
        """A new group, as `WeightPush` makes one."""
        self.generation += 1
        engines = () if self.engines is None else self.engines.remotes
        transfer = Transfer(backend=self.backend, engines=engines, num_workers=self.sizes)
        opened = self.actor.open_weight_group(1 + sum(self.sizes), self.generation, transfer, BUCKET)
        joining: list[Any] = []
        if self.backend == "gloo" and self.engines is not None:
            offset = 1
            for engine, size in zip(self.engines.remotes, self.sizes, strict=True):
                joining.append(engine.ask(EngineControl.init_weight_transfer, opened.for_engine(offset)))
                offset += size
        elif self.backend == "nccl" and self.engines is not None:
            self.actor.sender._timeout_s = PATIENCE_S
        self.actor.connect_weight_group()
        answers(joining, what="join", timeout=30)
        self.actor.plan_push(BUCKET, self.skip_frozen, self.form)

    def push(self) -> None:
        """Rank 0 raises what went wrong; the others never do, and end when it does."""
        self.version += 1
        receiving: list[Any] = []
        if self.backend == "gloo" and self.engines is not None:
            receiving = [
                engine.ask(EngineControl.receive_weights, self.actor.plan, self.version)
                for engine in self.engines.remotes
            ]
        self.actor.push(self.version)
        answers(receiving, what="receive", timeout=30)

    def wait_no_longer_than(self, seconds: float) -> None:
        """The bound of waits in the next push over this connection."""
        if self.backend == "ipc":
            learner_actor.UPDATE_TIMEOUTS["ipc"] = seconds
            self.connect()
        elif self.backend == "nccl" and self.engines is not None:
            groups = [self.actor.sender._engines.group]
            groups += [w.weight_transfer_engine._guard for w in self.engines.workers]
            for group in filter(None, groups):
                group._timeout_s = seconds

    def give_up(self) -> None:
        """What the controller asks of the engines after a failed push."""
        if self.engines is not None:
            answers([e.ask(EngineControl.give_up_push) for e in self.engines.remotes], what="give up", timeout=60)

    def differences(self) -> list[str]:
        """Tensors of any worker that are not bit for bit what the trainer holds (`held`)."""
        states = [] if self.engines is None else self.engines.states()
        return [
            f"worker {number}: {name}"
            for number, state in enumerate(states)
            for name, tensor in self.held.items()
            if not torch.equal(state[name], tensor)
        ]

    def train(self) -> None:
        """One optimiser step; `held` is then what a checkpoint in the files' form has."""
        self.learner.update(share(make_batch(), [0, 1, 2, 3], self.rank, self.world), OBJECTIVE)
        path = self.folder / f"trained-{self.backend}-{self.learner.spec.ds.zero_stage}-{self.world}-{len(self.held)}"
        self.learner.export_hf(str(path))
        before, self.held = self.held, load_file(path / "model.safetensors")
        assert any(not torch.equal(before[name], self.held[name]) for name in before)

    def close(self) -> None:
        if self.engines is not None:
            self.engines.close()


@contextmanager
def run(
    rank: int, world: int, folder: Path, backend: str, *, stage: int, model: str, lora: LoraConfig = NO_ADAPTERS
) -> Iterator[Run]:
    (folder / "handles").mkdir(exist_ok=True)
    spec = make_spec(folder, stage=stage, model=model)
    learner = Learner(replace(spec, ds=replace(spec.ds, lora=lora)))  # first: ZeRO-3 replaces torch.empty meanwhile
    limits = {**learner_actor.UPDATE_TIMEOUTS, "ipc": PATIENCE_S}
    far = mock.patch("openrlhf.rollout.weights.group.listen", side_effect=OSError("a test of gloo"))
    with (
        far if backend == "gloo" else nullcontext(),
        stand_in_for_cuda(folder / "handles", rank),
        mock.patch("openrlhf.launcher.ray.engine_client.get", answers),
        mock.patch.object(learner_actor, "UPDATE_TIMEOUTS", limits),
    ):
        made = Run(rank, world, folder, backend, learner)
        try:
            yield made
        finally:
            made.close()


def pushes(backend: str, stage: int, model: str, *, trained: bool) -> Case:
    """A push of the start weights; trained: another one over the same connection after an optimiser step."""

    def case(rank: int, world: int, folder: Path) -> dict[str, Any]:
        with run(rank, world, folder, backend, stage=stage, model=model) as own:
            own.connect()
            own.push()
            found = {"different": own.differences(), "names": sorted(own.held)}
            if trained:
                own.train()
                own.push()
                found["different"] += own.differences()
            return found

    return case


def break_engine(own: Run) -> str:
    """The last worker fails while it loads, with some of a layer's tensors there and others not."""
    if own.engines is not None:
        own.engines.models[-1].faults[HALF_OF_A_LAYER] = RuntimeError("load broke")
    return "load broke|did not answer within|closed|closure|reset|Timed out|is gone"


def silence_engine(own: Run) -> str:
    """The last worker stops in the middle for longer than the bound."""

    def stop(model: Loaded, load: Callable[..., None]) -> Callable[..., None]:
        def once(weights: Any) -> None:
            model.load_weights = load  # type: ignore[method-assign]
            time.sleep(3 * SILENCE_S)
            load(weights)

        return once

    if own.engines is not None and own.backend != "gloo":
        model = own.engines.models[-1]
        model.load_weights = stop(model, model.load_weights)  # type: ignore[method-assign]
    return f"within {SILENCE_S:g} s"


def break_trainer(own: Run) -> str:
    """The stream does not bring what was announced from the middle on."""
    plan: BucketPlan = own.actor.plan
    tensors = plan.tensors
    if own.backend == "gloo":  # takes the tensors of a bucket in any order
        own.actor.plan = plan_buckets([*tensors, TensorSpec("missing", "float32", (4,))], BUCKET)
        return "without 1 planned weights"
    own.actor.plan = plan_buckets([*tensors[:9], *tensors[10:], tensors[9]], BUCKET)
    return "push plan"


FAULTS: dict[str, tuple[Callable[[Run], str], float]] = {
    "engine-fails": (break_engine, SILENCE_S),
    "engine-silent": (silence_engine, SILENCE_S),
    "trainer-fails": (break_trainer, 3 * SILENCE_S),
}
"""What breaks a push, and the bound of its waits."""


def failures(backend: str, stage: int, faults: tuple[str, ...]) -> Case:
    """Pushes that fail on one side in the middle; after each one a new group, and everything again."""

    def case(rank: int, world: int, folder: Path) -> dict[str, Any]:
        with run(rank, world, folder, backend, stage=stage, model="qwen3") as own:
            own.connect()
            own.push()
            found: dict[str, Any] = {}
            for fault in faults:
                own.train()
                breaks, bound = FAULTS[fault]
                own.wait_no_longer_than(bound)
                plan = own.actor.plan
                wanted, said = breaks(own), ""
                try:
                    own.push()
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                own.actor.plan = plan
                own.give_up()
                own.wait_no_longer_than(PATIENCE_S)
                own.connect()
                own.push()
                found[fault] = {"wanted": wanted, "said": said, "different": own.differences()}
            return found

    return case


def silent_trainer(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Engines that were told of a push which never comes."""
    with run(rank, world, folder, "nccl", stage=2, model="qwen3") as own:
        own.connect()
        own.wait_no_longer_than(SILENCE_S)
        said = ""
        if own.engines is not None:
            told = announced(own.actor.plan)
            try:
                refs = [engine.ask(EngineControl.start_weight_update) for engine in own.engines.remotes]
                answers(refs, what="start", timeout=30)
                refs = [engine.ask(EngineControl.update_weights, told) for engine in own.engines.remotes]
                answers(refs, what="update", timeout=30)
            except Exception as error:
                said = str(error)
        own.give_up()
        own.connect()
        own.push()
        return {"said": said, "different": ", ".join(own.differences())}


def lost_in_meeting(rank: int, world: int, folder: Path) -> dict[str, str]:
    """An engine that does not come to the meeting of a new group."""
    with run(rank, world, folder, "nccl", stage=2, model="qwen3") as own:
        said = ""
        if own.engines is not None:
            sizes, own.sizes = own.sizes, [*own.sizes, 1]  # one more worker than there are
            try:
                transfer = Transfer(backend="nccl", engines=own.engines.remotes, num_workers=sizes)
                own.actor.open_weight_group(1 + sum(own.sizes), 1, transfer, BUCKET)
                sender: Any = own.actor.sender
                sender._timeout_s = SILENCE_S
                own.actor.connect_weight_group()
            except RuntimeError as error:
                said = str(error)
            own.sizes = sizes
            time.sleep(SILENCE_S)
        own.connect()
        own.push()
        return {"said": said, "different": ", ".join(own.differences())}


def announced(plan: BucketPlan) -> dict[str, Any]:
    """What engines are told of a push over nccl."""
    told: dict[str, Any] = {"names": [t.name for t in plan.tensors], "dtype_names": [t.dtype for t in plan.tensors]}
    return told | {"shapes": [list(t.shape) for t in plan.tensors]}


MODELS = ("qwen3", "untied")
BACKENDS = ("nccl", "ipc", "gloo", "shared")
ALL_FAULTS = {
    **dict.fromkeys(("gloo", "shared"), ("engine-fails", "trainer-fails")),
    **dict.fromkeys(("nccl", "ipc"), tuple(FAULTS)),
}
CASES: dict[str, Case] = {
    **{
        f"push-{backend}-{stage}-{model}": pushes(backend, stage, model, trained=False)
        for backend in BACKENDS
        for stage in range(4)
        for model in MODELS
    },
    **{
        f"trained-{backend}-{stage}-{model}": pushes(backend, stage, model, trained=True)
        for backend in BACKENDS
        for stage in range(4)
        for model in MODELS
    },
    **{f"failures-{backend}": failures(backend, 3, ALL_FAULTS[backend]) for backend in ALL_FAULTS},
    "silent_trainer": silent_trainer,
    "lost_in_meeting": lost_in_meeting,
}
