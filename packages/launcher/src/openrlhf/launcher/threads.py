"""How many threads the processes of a run compute with on CPUs: of the cores that there are, by who works when.

In the synchronous pipeline engines and learner ranks take turns, so each side has all cores while it works; in the
asynchronous one either gets half. Pure functions of the machine, the configuration and the model; GPU runs ask none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import SECTIONS, model_flag, roles, section
from openrlhf.launcher.plan.shape import read_shape
from openrlhf.launcher.rules.violation import value_at
from openrlhf.learner.spec import Role

SMALL_MODEL = 3_000_000
"""Models of fewer parameters get one thread per process. Waking a second thread for every operation costs more than it
brings there: on two cores a training step of 0.1, 1, 5, 20 and 135 M parameters takes 1.32, 1.13, 0.76, 0.71 and 0.73
times as long with two threads as with one."""
VARIABLE = "OMP_NUM_THREADS"


def usable_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Cores that this process can keep busy: those that it may run on, at most what its cgroup's quota pays for.

    The quota is the least of its cgroup's and of those above it, rounded down, at least 1. root: of the file system;
    affinity: how many cores it may run on, None asks the system.
    """
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return max(1, min(cores, int(min(_quotas(root), default=float(cores)))))


def _quotas(root: Path) -> list[float]:
    """Cores' worth of CPU time of every cgroup that this process is in, v2 and v1, as far as it has a quota."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, inside = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(path.lstrip("/"))
        # the path may be the host's, of which a container sees nothing: its own group is then the top of the mount
        found += [quota for folder in (inside, *inside.parents) if (quota := _quota(mount / folder)) is not None]
    return found


def _quota(folder: Path) -> float | None:
    """Quota over period of one cgroup; None without a limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


@dataclass(frozen=True, kw_only=True)
class RankThreads:
    """Threads of a learner rank, by what it does: forward passes that make experience, and training."""

    score: int
    update: int


@dataclass(frozen=True, kw_only=True)
class ThreadPlan:
    """Threads of every process that computes. engine: of each worker of an engine. All others have one."""

    engine: int
    ranks: Mapping[Role, RankThreads]

    def __str__(self) -> str:
        """As the log shows it."""
        ranks = [
            f"{SECTIONS[role]} {t.score}" + (f" (training {t.update})" if t.update != t.score else "")
            for role, t in self.ranks.items()
        ]
        return ", ".join([f"engines {self.engine}", *ranks])


def plan_threads(
    config: TrainPPOConfig, *, cores: int, nodes: int = 1, environ: Mapping[str, str] = os.environ
) -> ThreadPlan | None:
    """The threads of a run on `nodes` machines with `cores` each; None where the user's OMP_NUM_THREADS decides.

    Processes that work at the same time share the cores of their node evenly: all roles make experience together,
    policy and critic train together, a reward model scores while engines sample.
    """
    if environ.get(VARIABLE):
        return None
    here = {role: section(config, role).num_gpus_per_node for role in roles(config)}
    engines = -(-(config.vllm.num_engines or 0) // nodes) * config.vllm.tensor_parallel_size
    engines += -(-config.judge.engines // nodes) * config.judge.tensor_parallel_size  # they work while others sample
    training = (Role.POLICY, Role.CRITIC)
    sampling_cores = cores // 2 if config.train.async_enable else cores
    learning_cores = cores - cores // 2 if config.train.async_enable else cores
    sampling = _share(sampling_cores, engines + here.get(Role.REWARD, 0))
    scoring = _share(learning_cores, sum(count for role, count in here.items() if role != Role.REWARD))
    updating = _share(learning_cores, sum(count for role, count in here.items() if role in training))

    def of(role: Role) -> RankThreads:
        if _is_small(value_at(config, model_flag(config, role))):
            return RankThreads(score=1, update=1)
        score = sampling if role == Role.REWARD else scoring
        return RankThreads(score=score, update=updating if role in training else score)

    small = _is_small(config.actor.model_name_or_path)
    return ThreadPlan(engine=1 if small else sampling, ranks={role: of(role) for role in here})


def _share(cores: int, processes: int) -> int:
    return max(1, cores // max(1, processes))


def _is_small(model: str | None) -> bool:
    """Whether threads would cost a model more than they bring; one whose size nobody knows yet is none."""
    try:
        return read_shape(str(Path(model or "").expanduser())).parameters < SMALL_MODEL
    except ValueError:
        return False
