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

    function: "module:name" of an `outcome.Check`, called in a process of its own. shows: what is true if it is ok.
    needs: "gpu", "gpus=N" or "package:NAME" (a distribution); without any a CPU will do. fix: what to do when it fails.
    bound_s: the process is ended after this many seconds.
    """

    name: str
    shows: str
    function: str
    fix: str
    needs: tuple[str, ...] = ()
    bound_s: float = 240.0


def _push(name: str, shows: str, *needs: str, bound_s: float = 600.0) -> Row:
    function = f"{HERE}.push:{name.replace('-', '_')}"
    fix = PUSH_FIX.format(name=name)
    return Row(name=name, shows=shows, function=function, fix=fix, needs=needs, bound_s=bound_s)


ROWS: tuple[Row, ...] = (
    Row(
        name="versions",
        shows="the installed packages fit each other and the driver",
        function=f"{HERE}.installation:versions",
        fix=REINSTALL,
    ),
    Row(
        name="attention",
        shows="packed and padded samples, and flash attention where it is installed, give the same gradient",
        function=f"{HERE}.attention:attention",
        fix="train with --ds.attn_implementation sdpa (eager if sdpa fails too) and without --ds.packing_samples and "
        "--train.dynamic_batch_enable, or install flash-attn again: pip install flash-attn --no-build-isolation",
    ),
    Row(
        name="learner-step",
        shows="optimiser steps make the loss fall; tokens per second",
        function=f"{HERE}.learning:learner_step",
        fix=REINSTALL,
    ),
    Row(
        name="determinism",
        shows="the same steps twice give the same weights, bit for bit",
        function=f"{HERE}.learning:determinism",
        fix="--train.full_determinism_enable does not hold here: a resumed run will differ from one never stopped; "
        "train with --ds.attn_implementation sdpa, or do without",
    ),
    Row(
        name="zero3",
        shows="partitioned parameters (--ds.zero_stage 3) take the same steps as whole ones",
        function=f"{HERE}.learning:zero3",
        fix="train with --ds.zero_stage 2",
    ),
    _push("push-gloo", "after a push over gloo the engine computes what the learner does (tied, untied, big tensor)"),
    _push("push-ipc", "the same over CUDA IPC, engine and learner on one GPU", "gpu"),
    _push("push-nccl", "the same over nccl, engine and learner on a GPU each", "gpus=2"),
    _push("colocated", "engine and learner share a GPU: sleep, step, wake, push, score", "gpu"),
    Row(
        name="sleep-wake",
        shows="a sleeping learner gives its training states' memory back and steps again after it woke",
        function=f"{HERE}.learning:sleep_wake",
        fix="train without --ds.enable_sleep",
        needs=("gpu",),
    ),
    Row(
        name="offload",
        shows="an optimiser in host memory (--ds.adam_offload) takes the same steps",
        function=f"{HERE}.learning:offload",
        fix="train without --ds.adam_offload, or install a C++ compiler: DeepSpeed builds its CPU Adam with it",
        needs=("gpu",),
        bound_s=600.0,
    ),
    Row(
        name="liger",
        shows="Liger's kernels give the same log-probs",
        function=f"{HERE}.learning:liger",
        fix="train without --ds.use_liger_kernel",
        needs=("gpu", "package:liger-kernel"),
    ),
    Row(
        name="lora-4bit",
        shows="adapters on 4-bit weights learn",
        function=f"{HERE}.learning:lora_4bit",
        fix="train without --ds.load_in_4bit, or install bitsandbytes again: pip install bitsandbytes",
        needs=("gpu", "package:bitsandbytes"),
    ),
    Row(
        name="ranks",
        shows="two learner ranks take the same steps as one",
        function=f"{HERE}.ranks:ranks",
        fix="look at nccl between the GPUs (NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 where peer access is broken)",
        needs=("gpus=2",),
        bound_s=600.0,
    ),
    Row(
        name="tensor-parallel",
        shows="a model cut over two GPUs (--ds.tensor_parallel_size 2) takes the same steps as one",
        function=f"{HERE}.ranks:tensor_parallel",
        fix="train with --ds.tensor_parallel_size 1",
        needs=("gpus=2",),
        bound_s=600.0,
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
