"""The allocation that this process belongs to, read from Slurm's environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.launcher.slurm.names import count_gpus, expand_nodes, tasks_per_node


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One node's view of a job. index: this node's place in `nodes`; the head is the first. restarts: earlier lives.

    group: which part of a heterogeneous job this node is in; the head is in part 0, as all nodes of other jobs are.
    """

    job_id: int
    nodes: tuple[str, ...]
    index: int
    cpus: int
    gpus: int
    restarts: int = 0
    group: int = 0

    @property
    def head(self) -> str:
        return self.nodes[0]

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def host(self) -> str:
        return self.nodes[self.index]


def read_allocation(environ: Mapping[str, str], *, detected_gpus: int = 0) -> Allocation:
    """The allocation of a process that `srun` started once per node.

    The place in the list comes from SLURM_NODEID, not from addresses: those of several interfaces mislead. Raises
    ValueError outside of a job, for several tasks per node, and for a node that is in two parts of a heterogeneous job.
    """
    if "SLURM_JOB_ID" not in environ:
        raise ValueError("not inside a Slurm job (SLURM_JOB_ID is not set): use `openrlhf-launch slurm -- ...`")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    nodes = expand_nodes(listed)
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or "1")
    if any(count != 1 for count in tasks):
        raise ValueError(f"one task per node is needed, this step has {tasks}: set --ntasks-per-node=1")
    index = int(environ.get("SLURM_NODEID", "0"))
    if index >= len(nodes):
        raise ValueError(f"SLURM_NODEID={index} is outside of the node list {listed!r}")
    cpus = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE") or "1"
    granted = environ.get("SLURM_GPUS_ON_NODE")
    return Allocation(
        job_id=int(environ["SLURM_JOB_ID"]),
        nodes=tuple(nodes),
        index=index,
        cpus=int(cpus),
        gpus=count_gpus(granted) if granted else detected_gpus,
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        group=_group_of(nodes[index], environ),
    )


def _group_of(node: str, environ: Mapping[str, str]) -> int:
    parts = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in range(int(environ.get("SLURM_HET_SIZE", 0)))]
    found = [i for i, part in enumerate(parts) if part and node in expand_nodes(part)]
    if len(found) > 1:
        raise ValueError(f"{node!r} is in the parts {found} of this heterogeneous job: give --exclusive")
    return found[0] if found else 0
