"""A real Slurm on one machine for tests: a few nodes, without systemd, cgroups or a database. Needs root.

Every node has its own network, host name, process table, shared memory and folder for temporary files ($SLURM_TMPDIR),
and shares the disk with the others. All daemons are children of this process and die with it; the first process of a
node takes the whole node with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "shellcheck": "shellcheck",
}
"""Program -> Debian's package."""
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
SLOTS = 8
UP_SECONDS = 60.0
CPUS, MEMORY, GPUS = 8, 6000, 4
"""Of a node. Slurm only counts them: the CPUs are more than the machine has, the GPUs are null devices."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({head})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
FirstJobId={first_job}
ReturnToService=2
SlurmdTimeout=30
KillWait=5
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:h100:{gpus}
{nodes}
PartitionName=debug Nodes=ALL Default=YES PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
"""cred_expire: a requeued job waits so long before it starts again. FirstJobId: jobs of two clusters have different
temporary folders. low is pre-empted by high, with a warning first where a job asked for one."""

# The autodetected plugin looks for a cgroup file system, which a network namespace hides; v1 is only named here.
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"


def missing_for_slurm() -> str:
    """Why this machine cannot run the cluster; empty if it can."""
    if os.geteuid() != 0:
        return "the Slurm cluster of the tests makes network namespaces: it needs root"
    if subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, check=False).returncode:
        return "the Slurm cluster of the tests makes network namespaces: this container may not"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    packages = dict.fromkeys(PROGRAMS[name] for name in lacking)
    return f"no {', '.join(lacking)} here: apt-get install {' '.join(packages)}" if lacking else ""


def search_path() -> str:
    """PATH with the folders of the daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class MiniSlurm:
    """One cluster: `node1` to `nodeN`. `start` and `stop` it; `kill_node` cuts the power of a node."""

    def __init__(self, nodes: int = 3) -> None:
        self.slot, self._lock = _take_slot()
        self.root = Path(tempfile.mkdtemp(prefix="oslurm-"))
        self.names = [f"node{i}" for i in range(1, nodes + 1)]
        self.network = f"10.97.{self.slot}"
        self.bridge = f"orhbr{self.slot}"
        self.configuration = self.root / "slurm.conf"
        self.local = self.root / "tmp"
        """Where each node has a folder of its own."""
        self._environ = os.environ | self.client_environment
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def client_environment(self) -> dict[str, str]:
        """What Slurm's programs need to find this cluster, and what its jobs are told about their nodes."""
        return {"PATH": search_path(), "SLURM_CONF": str(self.configuration), "SLURM_TMPDIR": str(self.local)}

    def start(self) -> None:
        """Everything up, all nodes idle. Raises RuntimeError with the logs when they are not in time."""
        self._write_configuration()
        self._make_network()
        munge = ["--force", f"--socket={self.root}/munge.sock", f"--key-file={self.root}/munge.key"]
        munge += [f"--{name}-file={self.root}/munge.{name}" for name in ("pid", "seed", "log")]
        self._daemons = [self._spawn("munged", "--foreground", *munge)]
        self._wait((self.root / "munge.sock").exists, "munge")
        self._daemons.append(self._spawn("slurmctld", "-D"))
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.idle_nodes() == len(self.names), "idle nodes")

    def stop(self) -> None:
        """Nothing of the cluster is left."""
        for process in [*self._nodes.values(), *reversed(self._daemons)]:
            process.send_signal(signal.SIGTERM if process in self._daemons else signal.SIGKILL)
        for process in [*self._nodes.values(), *self._daemons]:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._remove_network()
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()

    def start_node(self, name: str) -> None:
        """A node's daemon in namespaces of its own; bash is its first process and collects orphans."""
        (self.root / f"spool-{name}").mkdir(exist_ok=True)
        here = f"-n {self._namespace(name)}"
        self._ip(f"{here} link set eth0 up", f"{here} route replace default via {self.network}.254")
        mounts = f"mount -t tmpfs -o size=2g tmpfs /dev/shm; mount -t tmpfs tmpfs {self.local}"
        inside = f"hostname {name}; {mounts}; slurmd -D -N {name} & wait $!"
        apart = ["unshare", *NAMESPACES[1:], "--fork", "--kill-child", "--mount-proc", "bash", "-c", inside]
        self._nodes[name] = self._spawn("ip", "netns", "exec", self._namespace(name), *apart, log=name)

    def kill_node(self, name: str) -> None:
        """Cut the power: all processes of a node end at once, and the network hears nothing of it."""
        process = self._nodes.pop(name)
        self._ip(f"-n {self._namespace(name)} link set eth0 down")
        process.kill()
        process.wait()

    def repair(self) -> None:
        """Start the nodes again that were killed; until all could run a job."""
        for name in self.names:
            if not self.is_up(name):
                self.start_node(name)
        self._wait(lambda: self.idle_nodes() == len(self.names), "idle nodes")

    def is_up(self, name: str) -> bool:
        """Whether the node runs."""
        return name in self._nodes

    def local_folders(self) -> list[Path]:
        """The temporary folders of all nodes, as seen from outside of them."""
        return [Path(f"/proc/{process.pid}/root{self.local}") for process in self._nodes.values()]

    def local_files(self) -> list[Path]:
        """What lies in them."""
        return [path for root in self.local_folders() for path in root.iterdir()]

    def idle_nodes(self) -> int:
        """How many nodes could run a job now."""
        shown = self.run("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D", check=False)
        return sum(int(line) for line in shown.split())

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """What a client program prints."""
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def _write_configuration(self) -> None:
        nodes = [f"NodeName={name} NodeAddr={self.network}.{i}" for i, name in enumerate(self.names, start=1)]
        values = {
            "host": socket.gethostname().split(".")[0],
            "head": f"{self.network}.254",
            "port": 16810 + self.slot,
            "root": self.root,
            "plugins": next(Path("/usr/lib").glob("*/slurm-wlm")),
            "first_job": 10_000 * (self.slot + 1) + os.getpid() % 9_000,
            "nodes": "\n".join(nodes),
        }
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        self.local.mkdir()
        self.configuration.write_text(CONFIGURATION.format(cpus=CPUS, memory=MEMORY, gpus=GPUS, **values))
        (self.root / "cgroup.conf").write_text(CGROUP)
        for i in range(GPUS):
            device = self.root / f"gpu{i}"
            subprocess.run(["mknod", str(device), "c", "1", "3"], check=True, timeout=10)
        (self.root / "gres.conf").write_text(f"Name=gpu Type=h100 File={self.root}/gpu[0-{GPUS - 1}]\n")
        (self.root / "munge.key").write_bytes(os.urandom(128))
        (self.root / "munge.key").chmod(0o600)

    def _make_network(self) -> None:
        self._remove_network()  # of a process that was killed while it held this slot
        self._ip(f"link add {self.bridge} type bridge", f"addr add {self.network}.254/24 dev {self.bridge}")
        self._ip(f"link set {self.bridge} up")
        hosts = ["127.0.0.1 localhost", f"{self.network}.254 {socket.gethostname().split('.')[0]}"]
        hosts += [f"{self.network}.{i} {name}" for i, name in enumerate(self.names, start=1)]
        for i, name in enumerate(self.names, start=1):
            space, cable = self._namespace(name), f"orhv{self.slot}-{i}"
            folder = Path("/etc/netns") / space  # `ip netns exec` puts its files over those of /etc
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(hosts) + "\n")
            self._ip(f"netns add {space}", f"link add {cable} type veth peer name eth0 netns {space}")
            self._ip(f"link set {cable} master {self.bridge} up", f"-n {space} link set lo up")
            self._ip(f"-n {space} addr add {self.network}.{i}/24 dev eth0")

    def _remove_network(self) -> None:
        for name in self.names:
            self._ip(f"netns del {self._namespace(name)}", check=False)
            shutil.rmtree(Path("/etc/netns") / self._namespace(name), ignore_errors=True)
        self._ip(f"link del {self.bridge}", check=False)

    def _ip(self, *commands: str, check: bool = True) -> None:
        for command in commands:
            words = ["ip", *command.split()]
            subprocess.run(words, env=self._environ, check=check, capture_output=not check, timeout=30)

    def _namespace(self, name: str) -> str:
        return f"orh{self.slot}-{name}"

    def _spawn(self, *command: str, log: str = "") -> subprocess.Popen[bytes]:
        """Start a daemon that is killed when this process ends, however it ends."""
        words = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.root / f"{log or command[0]}.log").open("ab") as out:
            return subprocess.Popen(
                words, env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + UP_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in self.root.glob("*.log"))
                raise RuntimeError(f"no {what} within {UP_SECONDS:.0f} s\n{logs}")
            time.sleep(0.1)


def _take_slot() -> tuple[int, IO[str]]:
    """The lowest number that no other cluster on this machine has, and the lock that says so."""
    for slot in range(SLOTS):
        lock = (Path(tempfile.gettempdir()) / f"openrlhf-slurm-{slot}.lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return slot, lock
    raise RuntimeError(f"{SLOTS} test clusters are running on this machine already")


def main(words: Sequence[str]) -> int:
    """`python mini_slurm.py COMMAND...`: bring a cluster up, run a command with its SLURM_CONF, take it down."""
    cluster = MiniSlurm()
    try:
        cluster.start()
        environ = os.environ | cluster.client_environment
        return subprocess.run(list(words) or ["bash"], env=environ, check=False).returncode
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
