"""The rows of `openrlhf-launch selfcheck` as plain data, and which of them a machine can run. Imports no ML library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

HERE = "openrlhf.launcher.selfcheck"
PUSH_FIX = (
    "do not train here with this --vllm.sync_backend; install the pinned set again (make setup, or make SET=gpu setup) "
    "and run `openrlhf-launch selfcheck --only {name}` again"
)
REINSTALL = "install the pinned set again: make setup (make SET=gpu setup for GPUs)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check.

    function: "module:name" of an `outcome.Check`. shows: what is true if it is ok. fix: what to do when it fails.
    needs: "gpu", "gpus=N" or "package:NAME" (a distribution); without any a CPU will do.
    bound_s: seconds that it may take on a machine with GPUs (see `Allowance`).
    shares: neighbours of the same word run in one process, which saves loading libraries; empty: in one of its own.
    """

    name: str
    shows: str
    function: str
    fix: str
    needs: tuple[str, ...] = ()
    bound_s: float = 10.0
    shares: str = ""


CPU_BOUND_S = 600.0
"""Of a row on a machine without a GPU, whose few cores run everything else too."""


class Allowance:
    """How long each row may take: its own bound, and on a GPU what the rows before it left over.

    So a slow row needs not fail while there is time, and all rows together end within the sum of their bounds.
    """

    def __init__(self, *, gpus: int) -> None:
        self._cpu = not gpus
        self._left = 0.0

    def of(self, row: Row) -> float:
        """Seconds for this row."""
        return CPU_BOUND_S if self._cpu else row.bound_s + self._left

    def spent(self, row: Row, seconds: float) -> None:
        """The row is over."""
        self._left = max(0.0, self.of(row) - seconds)


def _push(name: str, shows: str, *needs: str, bound_s: float) -> Row:
    function = f"{HERE}.push:{name.replace('-', '_')}"
    fix = PUSH_FIX.format(name=name)
    return Row(name=name, shows=shows, function=function, fix=fix, needs=needs, bound_s=bound_s, shares="engine")


ROWS: tuple[Row, ...] = (
    Row(
        name="versions",
        shows="the installed packages fit each other and the driver",
        function=f"{HERE}.installation:versions",
        fix=REINSTALL,
        bound_s=15.0,
        shares="learner",
    ),
    Row(
        name="attention",
        shows="padded and packed samples, those with shared prompts, and installed flash attention give one gradient",
        function=f"{HERE}.attention:attention",
        fix="train with --ds.attn_implementation sdpa (eager if sdpa fails too) and without --ds.packing_samples and "
        "--train.dynamic_batch_enable, and with --train.share_prompt off, or install flash-attn again: pip install "
        "flash-attn --no-build-isolation",
        bound_s=15.0,
        shares="learner",
    ),
    Row(
        name="learner-step",
        shows="optimiser steps make the loss fall; tokens per second, on a GPU with the shape of 0.6 B and as MFU",
        function=f"{HERE}.learning:learner_step",
        fix=REINSTALL,
        bound_s=35.0,
        shares="learner",
    ),
    Row(
        name="zero3",
        shows="partitioned parameters (--ds.zero_stage 3) take the same steps as whole ones",
        function=f"{HERE}.learning:zero3",
        fix="train with --ds.zero_stage 2",
        shares="learner",
    ),
    Row(
        name="sleep-wake",
        shows="a sleeping learner gives its training states' memory back and steps again after it woke",
        function=f"{HERE}.learning:sleep_wake",
        fix="train without --ds.enable_sleep",
        needs=("gpu",),
        shares="learner",
    ),
    Row(
        name="liger",
        shows="Liger's kernels give the same log-probs",
        function=f"{HERE}.learning:liger",
        fix="train without --ds.use_liger_kernel",
        needs=("gpu", "package:liger-kernel"),
        bound_s=10.0,
        shares="learner",
    ),
    Row(
        name="lora",
        shows="adapters learn, their base is the reference, and engines get both merged",
        function=f"{HERE}.learning:lora",
        fix="train without --ds.lora.rank, or install peft again: pip install peft",
        needs=("package:peft",),
        bound_s=5.0,
        shares="learner",
    ),
    Row(
        name="lora-4bit",
        shows="the same on 4-bit weights",
        function=f"{HERE}.learning:lora_4bit",
        fix="train without --ds.load_in_4bit, or install bitsandbytes again: pip install bitsandbytes",
        needs=("gpu", "package:bitsandbytes"),
        shares="learner",
    ),
    Row(
        name="offload",
        shows="an optimiser in host memory (--ds.adam_offload) takes the same steps",
        function=f"{HERE}.learning:offload",
        fix="train without --ds.adam_offload, or install a C++ compiler: DeepSpeed builds its CPU Adam with it",
        needs=("gpu",),
        bound_s=30.0,
        shares="learner",
    ),
    Row(  # alone: what it sets holds for the life of a process
        name="determinism",
        shows="the same steps twice give the same weights, bit for bit",
        function=f"{HERE}.learning:determinism",
        fix="--train.full_determinism_enable does not hold here: a resumed run will differ from one never stopped; "
        "train with --ds.attn_implementation sdpa, or do without",
        bound_s=15.0,
    ),
    _push(
        "push-gloo",
        "after a push over gloo the engine computes what the learner does (tied, untied in bf16, a tensor larger than "
        "a bucket); bytes per second",
        bound_s=30.0,
    ),
    _push(
        "push-shared",
        "the same in shared memory, which engines on the trainer's host get without a GPU; needs no room in /dev/shm",
        bound_s=10.0,
    ),
    _push("push-ipc", "the same over CUDA IPC, engine and learner on one GPU", "gpu", bound_s=25.0),
    Row(
        name="push-adapter",
        shows="an engine that serves an adapter, which pushes bring alone, scores and samples as the learner computes",
        function=f"{HERE}.push_adapter:push_adapter",
        fix="train with --vllm.lora_push merged",
        needs=("gpu",),
        bound_s=15.0,
        shares="engine",
    ),
    Row(
        name="engine-lost",
        shows="an engine killed in the middle of a push is noticed within 15 s; another one gets everything",
        function=f"{HERE}.push:engine_lost",
        fix="do not leave runs alone: one that loses an engine hangs here; look at the network between its processes",
        bound_s=20.0,
        shares="engine",
    ),
    _push("colocated", "engine and learner share a GPU: sleep, step, wake, push, score", "gpu", bound_s=15.0),
    _push("push-nccl", "the same over nccl, engine and learner on a GPU each", "gpus=2", bound_s=40.0),
    Row(
        name="generation",
        shows="tokens per second of an engine through agents' executor, router and Ray, beside the same engine bare",
        function=f"{HERE}.generation:generation",
        fix="look at what else uses the cores, and raise --agent.num_workers",
        bound_s=30.0,
    ),
    Row(
        name="ranks",
        shows="two learner ranks take the same steps as one",
        function=f"{HERE}.ranks:ranks",
        fix="look at nccl between the GPUs (NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 where peer access is broken)",
        needs=("gpus=2",),
        bound_s=50.0,
    ),
    Row(
        name="tensor-parallel",
        shows="a model cut over two GPUs (--ds.tensor_parallel_size 2) takes the same steps as one",
        function=f"{HERE}.ranks:tensor_parallel",
        fix="train with --ds.tensor_parallel_size 1",
        needs=("gpus=2",),
        bound_s=50.0,
    ),
    Row(
        name="sequence-parallel",
        shows="packed rows cut over two GPUs (--ds.ring_attn_size 2) give the same steps as whole ones on one",
        function=f"{HERE}.ranks:sequence_parallel",
        fix="train with --ds.ring_attn_size 1",
        needs=("gpus=2",),
        bound_s=40.0,
    ),
)


def lacking(row: Row, *, gpus: int, packages: Collection[str]) -> str:
    """Why a row can't run on a machine with `gpus` GPUs and these distributions; empty if it can."""
    for need in row.needs:
        kind, _, name = need.partition(":")
        if kind == "package":
            if name not in packages:
                return f"{name} is not installed"
            continue
        wanted = 1 if need == "gpu" else int(need.removeprefix("gpus="))
        if gpus < wanted:
            return f"needs {wanted} GPU{'s' if wanted > 1 else ''}, this machine has {gpus or 'none'}"
    return ""


def chosen(names: Sequence[str], rows: Sequence[Row] = ROWS) -> list[Row]:
    """The rows of these names in the table's order; all of them without names. Raises ValueError for an unknown one."""
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name!r}: there is no such row; choose from {', '.join(known)}")
    return [row for row in rows if not names or row.name in names]
