"""The vLLM plugin: what every vLLM process of ours gets. Makes our weight receivers known, ends an engine core whose
parent is gone, and lets CPU kernels use AMX.

vLLM calls `register` through the entry point group `vllm.general_plugins` at the start of the frontend, of each
engine core and of each worker. It names the receivers by module path, so that only workers that use one import it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

RECEIVERS = {"gloo": "gloo", "nccl": "bounded_nccl", "ipc": "restartable_ipc"}
"""--vllm.sync_backend -> the name of its receiver in vLLM; "nccl" and "ipc" are vLLM's own, which ours extend."""
CLASSES = {
    "gloo": ("openrlhf.rollout.weights.gloo_engine", "GlooWeightTransferEngine"),
    "nccl": ("openrlhf.rollout.weights.cuda_engine", "BoundedNcclEngine"),
    "ipc": ("openrlhf.rollout.weights.cuda_engine", "RestartableIpcEngine"),
}
ENGINE_CORE_PROCESS = "EngineCore"
EXIT_CODE = 1


def register() -> None:
    """Register the receivers with vLLM's factory; calling it again changes nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for backend, name in RECEIVERS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, *CLASSES[backend])
    end_with_parent()
    allow_amx()


def allow_amx() -> None:
    """Ask the kernel for AMX tiles where the CPU has them; elsewhere nothing.

    Upstream fault (vLLM 0.32): its bf16 attention on CPUs uses AMX as soon as the CPU has it, but Linux lets only
    processes that asked do so, and ends others with SIGILL at the first tile instruction.
    """
    import torch

    torch.cpu._init_amx()


def end_with_parent() -> None:
    """End this process with its parent, if it is an engine core.

    Upstream fault (vLLM 0.32): workers watch a pipe to their parent, the engine core does not, so it lives on,
    with its memory, when its parent is killed (kill -9, out of memory). Can go once vLLM's core does the same.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(ENGINE_CORE_PROCESS):
        return

    def wait() -> None:
        parent.join()
        os._exit(EXIT_CODE)

    threading.Thread(target=wait, name="openrlhf-end-with-parent", daemon=True).start()
