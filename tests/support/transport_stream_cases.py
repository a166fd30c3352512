"""Pushes whose two ends are one after the other in one process; run by `learner_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from openrlhf.rollout.weights.guard import GuardedGroup
from openrlhf.rollout.weights.wire import aligned, plan_buckets, specs_of
from support import cuda_stand_in
from support.cuda_stand_in import stand_in_for_cuda
from support.engine_workers import Loaded, worker
from support.learner_ranks import Case
from support.stream_checker import SameProcess, StreamChecker
from support.stream_checker import Stream as CheckedStream
from support.transport_cases import BUCKET, announced


def streams(buffers: int) -> Case:
    """A push over `buffers` CUDA streams, sender and receiver one after the other, watched by a `StreamChecker`."""

    def case(rank: int, world: int, folder: Path) -> dict[str, Any]:
        from vllm.distributed.weight_transfer import nccl_engine

        from openrlhf.rollout.weights import cuda_sender

        held = load_file(folder / "untied" / "model.safetensors")
        plan, size = plan_buckets(specs_of(held.items()), BUCKET), 40_000  # not less than the embedding
        checker = StreamChecker()
        pipe = SameProcess(checker)
        with (
            stand_in_for_cuda(folder, 0),
            mock.patch("torch.cuda.Stream", CheckedStream),
            mock.patch.object(CheckedStream, "checker", checker, create=True),
            mock.patch.object(cuda_stand_in, "_DEFAULT", CheckedStream()),
            mock.patch.object(cuda_sender, "NUM_BUFFERS", buffers),
        ):
            sender = cuda_sender.NcclSender(master_address="", buffer_bytes=size, engines=mock.Mock())
            sender.open(2, 1)
            with mock.patch.object(nccl_engine, "open_trainer_endpoint", return_value=pipe):
                sender.connect()
            model = Loaded(held)
            receiver: Any = worker("nccl", model, rank=0, device=0, timeout_s=60).weight_transfer_engine
            receiver.packed, receiver.packed_buffer_size_bytes, receiver.packed_num_buffers = True, size, buffers
            receiver._guard = GuardedGroup(pipe.receiving())
            with checker:
                trained = {name: tensor + 0 for name, tensor in held.items()}  # the last step's, still under way
                names = list(trained)
                parts = [names[i : i + 5] for i in range(0, len(names), 5)]
                gathered = ([(name, trained[name] + 0) for name in part] for part in parts)  # as under ZeRO-3
                sender.send(gathered, plan, 1)
                sent = list(checker.found)
                receiver.start_weight_update()
                receiver.update_weights(announced(plan))
            receiver.finish_weight_update()
        state = model.state()
        different = [name for name in held if not torch.equal(state[name], held[name])]
        return {"sent": sent, "received": checker.found[len(sent) :], "different": different}

    return case


def mixed(rank: int, world: int, folder: Path) -> dict[str, list[str]]:
    """Pushes over nccl and ipc of tensors of two dtypes, with an odd number of the narrower one first."""
    from vllm.distributed.weight_transfer import nccl_engine

    from openrlhf.rollout.weights import cuda_sender

    held = {
        "model.norm.weight": torch.arange(3).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.arange(4.0) / 3,
        "model.layers.0.mlp.up_proj.weight": torch.arange(10).bfloat16(),
    }
    plan = plan_buckets(aligned(specs_of(held.items())), BUCKET)
    found: dict[str, list[str]] = {}
    with stand_in_for_cuda(folder, 0):
        for backend in ("nccl", "ipc"):
            model, pipe = Loaded(held), SameProcess(StreamChecker())
            made = worker(backend, model, rank=0, device=0, timeout_s=60)
            receiver = made.weight_transfer_engine
            engines: Any = made if backend == "ipc" else mock.Mock()
            made.finish_weight_update = lambda _=None, made=made: type(made).finish_weight_update(made)
            sender: Any = (
                cuda_sender.IpcSender(rank=0, buffer_bytes=BUCKET, engines=engines)
                if backend == "ipc"
                else cuda_sender.NcclSender(master_address="", buffer_bytes=BUCKET, engines=engines)
            )
            sender.open(2, 1)
            with mock.patch.object(nccl_engine, "open_trainer_endpoint", return_value=pipe):
                sender.connect()
            sender.send([list(held.items())], plan, 1)
            if backend == "nccl":
                receiver.packed, receiver.packed_buffer_size_bytes, receiver.packed_num_buffers = True, BUCKET, 1
                receiver._guard = GuardedGroup(pipe.receiving())
                made.start_weight_update()
                made.update_weights(announced(plan))
                made.finish_weight_update()
            state = model.state()
            found[backend] = [name for name in held if not torch.equal(state[name], held[name])]
    return found


CASES: dict[str, Case] = {"streams-1": streams(1), "streams-2": streams(2), "mixed": mixed}
