"""One learner rank as a Ray actor: process set-up and weight transfer; the work of its role is in `ranks/roles.py`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError

from openrlhf.launcher.ranks.batches import RankBatch
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.remote_teacher import RemoteReference
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, Rank, ReferenceRank, RewardRank
from openrlhf.launcher.ray.calls import DEATHS, WorkerDiedError, first_line
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_client import FleetClient
from openrlhf.launcher.ray.remote import Remote, serves
from openrlhf.launcher.ray.stopped import end_when_stopped
from openrlhf.launcher.teacher_check import TeacherServers
from openrlhf.launcher.threads import RankThreads
from openrlhf.learner.folders.shared import host, sees
from openrlhf.learner.spec import LearnerSpec, Role

if TYPE_CHECKING:
    from openrlhf.learner.learner import Learner
    from openrlhf.learner.lora_stream import Form
    from openrlhf.rollout.weights.sender import Sender
    from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Where a rank stands, and where the others meet it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """What torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How weights travel: --vllm.sync_backend, and the engines, which senders over nccl and CUDA IPC call themselves.

    num_workers: of each engine.
    """

    backend: str
    engines: Sequence[Remote[EngineActor]] = ()
    num_workers: Sequence[int] = ()

    def sender(self, rank: int, buffer_bytes: int) -> Sender | None:
        """The end of this rank, where it has one. nccl and ipc import vLLM and need CUDA.

        buffer_bytes: what travels at once over nccl and ipc, not less than the largest tensor.
        """
        address = ray.util.get_node_ip_address()
        if self.backend == "gloo":
            from openrlhf.rollout.weights.sender import WeightSender

            return WeightSender(master_address=address) if rank == 0 else None
        from openrlhf.rollout.weights.cuda_sender import IpcSender, NcclSender

        limit = UPDATE_TIMEOUTS[self.backend]
        engines = FleetClient(engines=self.engines, num_workers=self.num_workers, update_timeout=limit)
        if self.backend == "ipc":
            return IpcSender(rank=rank, buffer_bytes=buffer_bytes, engines=engines)
        return NcclSender(master_address=address, buffer_bytes=buffer_bytes, engines=engines) if rank == 0 else None


UPDATE_TIMEOUTS = {"nccl": 1800.0, "ipc": 15.0}
"""Seconds for one `update_weights`: over nccl a whole push, whose messages have a bound of their own; over ipc one
message."""
TIMEOUTS = {"samples": 300.0}
"""Of what is there already and only has to travel."""
WORK_TIMEOUT = 24 * 3600.0
"""Bound of one epoch's update or one batch's forwards: days of work are no fault. A dead rank is seen at once, one that
was stopped is ended (`ray/stopped.py`), one that waits for others in vain by `COLLECTIVE_TIMEOUT` of the learner."""


def _fetch(what: str, refs: Sequence[Any]) -> list[Any]:
    """Samples or other ranks' results, once they have them. Raises WorkerDiedError when the wait is in vain."""
    limit = TIMEOUTS.get(what, WORK_TIMEOUT)
    try:
        return ray.get(list(refs), timeout=limit)
    except GetTimeoutError as error:
        raise WorkerDiedError(f"{what}: {len(refs)} of them did not arrive within {limit:g} s") from error
    except DEATHS as error:
        raise WorkerDiedError(f"{what}: their rank died ({first_line(error)})") from error


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def wire_specs(learner: Learner, *, skip_frozen: bool = False, form: Form = "merged") -> list[TensorSpec]:
    """The learner's weights as a push moves them, in the order of its stream."""
    from openrlhf.rollout.weights.wire import TensorSpec, aligned

    infos = learner.weight_metadata(skip_frozen=skip_frozen, form=form)
    return aligned([TensorSpec(i.name, str(i.dtype).removeprefix("torch."), i.shape) for i in infos])


@dataclass(frozen=True)
class Kept:
    """Stands for a `RankBatch` outside the rank that holds it: nobody else needs its tensors."""

    number: int


class LearnerActor:
    """The process of a rank. Methods are collective over the role's ranks unless they say so.

    It has the methods of its role too: `serves` gives them to the actor of each role, below.
    """

    kind: ClassVar[type[Rank]]

    def __init__(self) -> None:
        self.threads: RankThreads | None = None
        self.kept: dict[int, RankBatch] = {}
        self.number = 0

    def node(self) -> tuple[str, str, int, list[str]]:
        """(node id, IP address, a free port, accelerator ids): what the address book is made of."""
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port(), ids

    def blind_to(self, path: str) -> str | None:
        """The name of this machine, if a file that is there cannot be seen from here. Every rank for itself."""
        return None if sees(path) else host()

    def setup(
        self, address: RankAddress, spec: LearnerSpec, config: RankConfig, threads: RankThreads | None = None
    ) -> None:
        """Join the process group and load the model. threads: on CPU; None leaves them to OMP_NUM_THREADS."""
        from openrlhf.launcher.ray.devices import local_device_index

        end_when_stopped(os.getpid(), f"{spec.role} rank {address.rank}")
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ.update(address.environment())
        if ids:
            os.environ["LOCAL_RANK"] = str(local_device_index(ids, os.environ))
        from openrlhf.learner.setup import init_distributed

        init_distributed()
        from openrlhf.learner.learner import Learner

        self.rank = address.rank
        self.threads = threads
        self.sender: Sender | None = None
        self.plan: BucketPlan | None = None
        self.bucket_bytes = 0
        self.skip_frozen = False
        self.form: Form = "merged"
        self.stream: Iterator[list[tuple[str, Any]]] = iter(())
        self.to_come = 0
        self.role = self.kind(Learner(spec), config, resolve=_fetch)
        self.role.learner.give_back()

    def open_weight_group(self, world_size: int, generation: int, transfer: Transfer, bucket_bytes: int) -> Any:
        """The meeting point of a new weight group. Rank 0 sends; with CUDA IPC every rank does, to its own device."""
        if self.sender is None or transfer.backend != "gloo":
            largest = max(spec.nbytes for spec in wire_specs(self.role.learner))
            if self.sender is not None:
                self.sender.close()
            self.sender = transfer.sender(self.rank, max(bucket_bytes, largest))
        return None if self.sender is None else self.sender.open(world_size, generation)

    def connect_weight_group(self) -> None:
        """Ranks with a sender: wait for the engines."""
        if self.sender is not None:
            self.sender.connect()

    def plan_push(self, bucket_bytes: int, skip_frozen: bool, form: Form) -> BucketPlan:
        """All ranks: what pushes move from now on, in which buckets.

        skip_frozen: only what training changes. form: what becomes of adapters.
        """
        from openrlhf.rollout.weights.sender import WeightSender
        from openrlhf.rollout.weights.wire import plan_buckets

        self.bucket_bytes = bucket_bytes
        self.skip_frozen, self.form = skip_frozen, form
        if isinstance(self.sender, WeightSender):
            bucket_bytes = self.sender.message_bytes(bucket_bytes)
        specs = wire_specs(self.role.learner, skip_frozen=skip_frozen, form=form)
        self.plan = plan_buckets(specs, bucket_bytes)
        return self.plan

    def push(self, version: int) -> None:
        """All ranks: stream the weights; those with a sender send them."""
        from openrlhf.rollout.weights.sender import send_or_drain

        assert self.plan is not None, "plan_push() comes before push()"
        stream = self.role.learner.named_parameter_buckets(
            self.bucket_bytes, skip_frozen=self.skip_frozen, wanted=self.sender is not None, form=self.form
        )
        try:
            send_or_drain(self.sender, stream, self.plan, version)
        finally:
            self.role.learner.give_back()

    def use_threads(self, *, trains: bool) -> None:
        """As many threads as training, or making experience, may have."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads.update if trains else self.threads.score)

    def open_stream(self, bucket_bytes: int) -> int:
        """All ranks: begin to stream the model to another one; how many buckets there will be."""
        count, self.stream = self.role.learner.model_buckets(bucket_bytes, wanted=self.rank == 0)
        self.to_come = count
        return count

    def next_bucket(self) -> list[tuple[str, Any]]:
        """All ranks: the stream's next bucket in host memory, on rank 0; the others only take part."""
        try:
            bucket = [(name, tensor.to("cpu", copy=True)) for name, tensor in next(self.stream)]
            self.to_come -= 1
            if not self.to_come:
                next(self.stream, None)  # parameters are gathered until the next bucket is asked for
            return bucket
        finally:
            self.role.learner.give_back()

    def keep(self, answer: Any) -> Any:
        """A batch stays here, in the place of the one before; what goes out stands for it."""
        if not isinstance(answer, RankBatch):
            return answer
        self.number += 1
        self.kept = {self.number: answer}
        return Kept(self.number)

    def opened(self, argument: Any) -> Any:
        """The batch that an argument stands for."""
        if not isinstance(argument, Kept):
            return argument
        assert argument.number in self.kept, f"batch {argument.number} is gone: {self.number} were prepared since"
        return self.kept[argument.number]


def _on_role(actor: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a method of the actor's role. Afterwards the device's other users can have the memory it took."""
    actor.use_threads(trains=method == "update")
    try:
        return actor.keep(getattr(actor.role, method)(*map(actor.opened, args), **kwargs))
    finally:
        actor.role.learner.give_back()


@serves(PolicyRank, _on_role)
class PolicyActor(LearnerActor):
    """A rank of the policy."""

    kind = PolicyRank


@serves(CriticRank, _on_role)
class CriticActor(LearnerActor):
    """A rank of the critic."""

    kind = CriticRank


@serves(ReferenceRank, _on_role)
class ReferenceActor(LearnerActor):
    """A rank of the reference model."""

    kind = ReferenceRank


@serves(RewardRank, _on_role)
class RewardActor(LearnerActor):
    """A rank of the in-cluster reward model."""

    kind = RewardRank


def _on_servers(actor: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(actor.remote, method)(*args, **kwargs)


@serves(ReferenceRank, _on_servers)
class RemoteReferenceActor(LearnerActor):
    """Asks servers in the place of the ranks of a reference model; it has none."""

    kind = ReferenceRank

    def connect(self, servers: TeacherServers, config: RankConfig) -> None:
        """Be ready to ask."""
        self.remote = RemoteReference(servers, config, resolve=_fetch)


ACTORS: dict[Role, type[LearnerActor]] = {
    Role.POLICY: PolicyActor,
    Role.CRITIC: CriticActor,
    Role.REFERENCE: ReferenceActor,
    Role.REWARD: RewardActor,
}
