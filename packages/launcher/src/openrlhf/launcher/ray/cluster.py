"""The Ray that a run uses: one that others started, used as it is, or our own, which leaves nothing behind.

Our own has its own token, its own short temporary folder (removed at the end) and writes nothing into the home folder.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import worker as ray_worker
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET

from openrlhf.launcher import signals
from openrlhf.launcher.machine import Machine, detect_machine, installed_flash_attention, running_ray
from openrlhf.launcher.placement import nodes_apart
from openrlhf.launcher.ray import warm
from openrlhf.launcher.ray.leftovers import RUN_ID_VARIABLE, Guard, sweep
from openrlhf.launcher.ray.node import ROOM, object_store_bytes, own_environment
from openrlhf.launcher.ray.scratch import ROOT_VARIABLE
from openrlhf.launcher.ray.stopped import end_when_stopped
from openrlhf.launcher.ray.warm import WarmStart
from openrlhf.launcher.threads import VARIABLE as THREADS
from openrlhf.launcher.threads import usable_cores

log = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Deprecations inside torch 2.13 and vLLM 0.32 that no user can act on.
    "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger,"
    "ignore::FutureWarning:vllm.triton_utils.dispatcher",
    "RAY_DEDUP_LOGS": "0",
}
"""Defaults of worker processes; what the user has set wins."""

NEEDED = (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET)
"""Processes of Ray that a run cannot do without."""

SPIN, WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
CPU_WORKER_ENVIRONMENT = {
    THREADS: "1",
    # OpenMP's threads look for their next operation for a moment, about a millisecond, then they sleep. By default they
    # look ten times as long, on a core that other processes want: beside any other load a step takes two to four times
    # as long as with one thread. Asleep at once (OMP_WAIT_POLICY=passive) they are late for every operation.
    SPIN: "20000",
    "DS_ACCELERATOR": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",  # as its engines there: they and all others are forks of one process
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_LOGS": "-torch._library.triton",  # its warning that there is no Triton
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Further defaults on machines without a GPU: no compiler, a small KV cache, one thread per process. Engines and
learner ranks get as many as `launcher/threads.py` says."""


@dataclass
class StartTimes:
    """Seconds until each part was ready, since the parts began to start together; driver and Ray come before that.

    engine_load: what the slowest engine took of its part for loading the model, total: since the driver was started.
    """

    seconds: dict[str, float]
    began: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    async def of(self, part: str, ready: Awaitable[T]) -> T:
        """Await a part."""
        answer = await ready
        self.seconds[part] = self.elapsed()
        log.info("%s ready after %.1f s", part, self.seconds[part])
        return answer

    def metrics(self) -> dict[str, float]:
        return {f"timing/start_{part}": value for part, value in self.seconds.items()}

    def __str__(self) -> str:
        return ", ".join(f"{part.replace('_', ' ')} {value:.1f} s" for part, value in self.seconds.items())


@dataclass
class Cluster:
    """A connected Ray. `gpus` is how many real GPUs it has, whatever number it was started with.

    cores: of each node, of the one with the fewest. apart: the parts of a run that it has nodes of their own for.
    """

    started: bool
    run_id: str
    gpus: int = 0
    nodes: int = 1
    cores: int = 1
    apart: frozenset[str] = frozenset()
    temp_dir: Path | None = None
    guard: Guard | None = None
    warm: WarmStart | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What the driver took until then, and Ray."""
    saved_environment: dict[str, str | None] = field(default_factory=dict)

    def worker_environment(self) -> dict[str, str]:
        """Environment variables for every worker process."""
        defaults = WORKER_ENVIRONMENT if self.gpus else WORKER_ENVIRONMENT | CPU_WORKER_ENVIRONMENT
        if self.temp_dir is not None:
            defaults = defaults | {ROOT_VARIABLE: str(self.temp_dir)}
        if WAIT_POLICY in os.environ:
            defaults = {k: v for k, v in defaults.items() if k != SPIN}
        own = {RUN_ID_VARIABLE: self.run_id}
        if self.warm is not None:
            own[warm.VARIABLE] = self.warm.path
        return {k: os.environ.get(k, v) for k, v in defaults.items()} | own

    def ended(self) -> str:
        """Which part of a Ray of our own, without which nothing goes on, has ended; "" where none has."""
        node: Any = ray_worker._global_node if self.started else None
        dead = [] if node is None else node.dead_processes()
        return ", ".join(f"{kind} (exit code {process.returncode})" for kind, process in dead if kind in NEEDED)

    def close(self) -> None:
        """Disconnect; end what we started and remove our temporary folder. Safe to call twice."""
        ray.shutdown()
        if self.warm is not None:
            self.warm.close()
        if self.started:
            sweep(self.run_id, self.temp_dir)
            if self.temp_dir is not None:
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            if self.guard is not None:
                self.guard.close()
        for name, value in self.saved_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.saved_environment:
            self.saved_environment.clear()
            _reload_ray_authentication()


def short_temp_dir() -> Path:
    """A new folder with room for Ray's socket paths: in $TMPDIR if that is short enough, else in /tmp."""
    root = tempfile.gettempdir()
    room = ROOM - len("/rXXXXXXXX")
    if len(os.fsencode(root)) > room:
        log.warning("TMPDIR=%r is too long for Ray's sockets (at most %d characters): using /tmp", root, room)
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix="r", dir=root))


def reserve() -> Cluster:
    """What a run needs before Ray: its id; for a Ray of our own its folder, token and guard.

    Where there is no GPU, the process that imports what workers share starts here too.
    """
    run_id = secrets.token_hex(8)
    os.environ[RUN_ID_VARIABLE] = run_id
    if _address() is not None:
        return Cluster(started=False, run_id=run_id)
    temp_dir = short_temp_dir()
    ours = own_environment(os.environ, secrets.token_hex(32))
    cluster = Cluster(
        started=True, run_id=run_id, temp_dir=temp_dir, saved_environment={k: os.environ.get(k) for k in ours}
    )
    try:
        cluster.guard = Guard(run_id, temp_dir)
        os.environ.update(ours)
        _reload_ray_authentication()
        if not detect_machine().gpus:
            cluster.warm = WarmStart(temp_dir, os.environ | cluster.worker_environment())
    except BaseException:
        cluster.close()
        raise
    return cluster


def connect(cluster: Cluster | None = None) -> Cluster:
    """Join the Ray of RAY_ADDRESS or of this machine; where there is none, start one for this run.

    cluster: what `reserve` gave. Raises ConnectionError when RAY_ADDRESS names a Ray that does not answer.
    """
    age, began = process_age(), time.perf_counter()
    try:
        cluster = _start(cluster or reserve())
    except SystemExit as stop:
        # ray.init installs a handler of its own, which exits with 15 where ours would with 143
        if stop.code == signal.SIGTERM:
            raise signals.Interrupted(signal.SIGTERM) from stop
        raise
    signals.install()
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        cluster.nodes = len(alive)
        cluster.cores = _fewest_cores([node["Resources"] for node in alive])
        cluster.apart = nodes_apart(ray.cluster_resources())
        cluster.gpus = sum(_real_gpus_by_node().values())
        cluster.seconds = {"driver": age, "ray": time.perf_counter() - began}
    except BaseException:
        cluster.close()
        raise
    return cluster


def _fewest_cores(resources: Sequence[Mapping[str, float]]) -> int:
    """Cores of the node with the fewest. Where this one is alone it is asked itself: Ray may be told any number."""
    if len(resources) == 1:
        return usable_cores()
    return max(1, min(int(node.get("CPU", 0)) for node in resources))


def process_age() -> float:
    """Seconds since this process was started."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def running_machine() -> Machine | None:
    """The hardware of the Ray that this run would join; None where it would start its own or cannot reach that Ray.

    The machine of the driver says nothing about it: a head node often has no GPU.
    """
    address = _address()
    if address is None:
        return None
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except ConnectionError:
        return None
    try:
        per_node = _real_gpus_by_node()
        return Machine(
            gpus=max(per_node.values(), default=0),
            nodes=max(len(per_node), 1) if per_node else 1,
            flash_attention=installed_flash_attention(),
        )
    finally:
        ray.shutdown()


def _address() -> str | None:
    return os.environ.get("RAY_ADDRESS") or running_ray()


def _start(cluster: Cluster) -> Cluster:
    """Join, or start a Ray of our own; Ray gives its node 30 s, which a busy machine may need twice."""
    if not cluster.started:
        address = _address()
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
        log.info("Joined the Ray at %s", address)
        return cluster
    try:
        return _start_once(cluster)
    except Exception as error:
        if signals.received() is not None:
            raise
        log.warning("Ray did not start (%s): trying once more", error)
    try:
        return _start_once(reserve())
    except Exception as error:
        raise RuntimeError(f"a local Ray did not start twice; is the machine overloaded? {error}") from error


def _start_once(cluster: Cluster) -> Cluster:
    try:
        with _own_process_groups():
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=max(usable_cores(), detect_machine().gpus),  # it starts a worker per CPU at once
                object_store_memory=object_store_bytes(),
                logging_level=logging.WARNING,
                log_to_driver=True,
                _temp_dir=str(cluster.temp_dir),
            )
    except BaseException:
        cluster.close()
        raise
    log.info("Started a local Ray in %s", cluster.temp_dir)
    node: Any = ray_worker._global_node
    for kind in NEEDED:  # stopped, they would hold up the end of the run too
        for info in node.all_processes[kind]:
            end_when_stopped(info.process.pid, f"Ray's {kind}")
    return cluster


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Ray's daemons, started meanwhile, get a process group each.

    Ray 2.60 leaves them in the driver's, and has no option against it: a TERM to the group, as `timeout` and many
    supervisors send it, would end them first, and Ray then ends the driver with code 1 before it can clean up.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _reload_ray_authentication() -> None:
    """Ray reads RAY_AUTH_* when it is imported; it has no public way to read them again (2.60)."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@ray.remote(num_cpus=0, max_retries=0)
def _probe_gpus() -> int:
    """Real accelerators of the node that this runs on, from its device files; loads no ML library."""
    from ray._private.accelerators import get_all_accelerator_managers

    return max(
        (
            manager.get_current_node_num_accelerators()
            for manager in get_all_accelerator_managers()
            if manager.get_resource_name() == "GPU"
        ),
        default=0,
    )


def _real_gpus_by_node() -> dict[str, int]:
    """Node id -> GPUs it has and offers, for nodes with any; `ray start --num-gpus 8` alone makes none."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    claims = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    probes = {
        node: _probe_gpus.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node, claim in claims.items()
        if claim > 0
    }
    found = dict(zip(probes, ray.get(list(probes.values()), timeout=60), strict=True))
    real = {node: min(claims[node], count) for node, count in found.items()}
    return {node: count for node, count in real.items() if count}
