"""How many cores there are, and how many threads every process gets of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.ray.cluster import _fewest_cores
from openrlhf.launcher.ray.start import engine_specs
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.threads import RankThreads, ThreadPlan, plan_threads, usable_cores
from openrlhf.learner.spec import Role
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.arguments import environment
from support.launcher_flags import parse_train_ppo

POD = "kubepods/pod1/c1"


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("contents", "affinity", "cores"),
    [
        ({}, 16, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 192, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 192, 2),  # rounded down
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 192, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 3, 3),
        (
            {"proc/self/cgroup": f"0::/{POD}\n", f"sys/fs/cgroup/{POD}/cpu.max": "max 100000"}
            | {"sys/fs/cgroup/kubepods/pod1/cpu.max": "600000 100000"},
            16,
            6,
        ),
        # a container that sees its own group at the top of the mount
        ({"proc/self/cgroup": f"0::/{POD}\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 16, 8),
        (
            {"proc/self/cgroup": f"12:cpuset:/x\n4:cpu,cpuacct:/{POD}\n0::/y\n"}
            | {
                f"sys/fs/cgroup/cpu/{POD}/cpu.cfs_{k}_us": v for k, v in (("quota", "300000\n"), ("period", "100000\n"))
            },
            16,
            3,
        ),
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/\n"}
            | {f"sys/fs/cgroup/cpu/cpu.cfs_{k}_us": v for k, v in (("quota", "-1\n"), ("period", "100000\n"))},
            16,
            16,
        ),
    ],
)
def test_cores_are_those_that_affinity_and_quota_leave(
    contents: dict[str, str], affinity: int, cores: int, tmp_path: Path
) -> None:
    assert usable_cores(files(tmp_path, contents), affinity) == cores


def test_a_lone_node_counts_its_own_cores_and_many_ask_ray() -> None:
    assert _fewest_cores([{"CPU": 192.0}]) == usable_cores()
    assert _fewest_cores([{"CPU": 16.0}, {"CPU": 4.0}]) == 4
    assert _fewest_cores([{"CPU": 16.0}, {}]) == 1  # a head that is given no work


BASE = (
    "--actor.model_name_or_path hub/big --data.prompt_dataset d --reward.remote_url http://h/score "
    "--algo.kl.init_coef 0 --algo.advantage.estimator group_norm"
)
TINY = (
    '{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192, "vocab_size": 261}'
)


def config_of(line: str = "") -> TrainPPOConfig:
    return resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), Machine(gpus=0))[0]


def plan(line: str = "", **kwargs: Any) -> ThreadPlan:
    found = plan_threads(config_of(line), environ={}, **kwargs)
    assert found is not None
    return found


def same(count: int) -> RankThreads:
    return RankThreads(score=count, update=count)


GAE = "--algo.advantage.estimator gae --algo.kl.init_coef 0.01"


@pytest.mark.parametrize(
    ("line", "cores", "engine", "ranks"),
    [
        # taking turns, either side has all
        ("--vllm.num_engines 1", 2, 2, {Role.POLICY: same(2)}),
        ("--vllm.num_engines 1 --actor.num_gpus_per_node 2", 2, 2, {Role.POLICY: same(1)}),
        ("--vllm.num_engines 2 --actor.num_gpus_per_node 4", 16, 8, {Role.POLICY: same(4)}),
        ("--vllm.num_engines 1 --vllm.tensor_parallel_size 2", 8, 4, {Role.POLICY: same(8)}),
        ("--vllm.num_engines 3", 8, 2, {Role.POLICY: same(8)}),
        ("--vllm.num_engines 1", 1, 1, {Role.POLICY: same(1)}),
        ("--vllm.num_engines 4 --actor.num_gpus_per_node 4", 2, 1, {Role.POLICY: same(1)}),
        # at the same time, each has half
        ("--vllm.num_engines 1 --train.async_enable", 2, 1, {Role.POLICY: same(1)}),
        ("--vllm.num_engines 1 --train.async_enable", 16, 8, {Role.POLICY: same(8)}),
        ("--vllm.num_engines 1 --train.async_enable", 5, 2, {Role.POLICY: same(3)}),
        ("--vllm.num_engines 1 --train.async_enable --train.partial_rollout_enable", 4, 2, {Role.POLICY: same(2)}),
        ("--vllm.num_engines 2 --train.async_enable --actor.num_gpus_per_node 2", 16, 4, {Role.POLICY: same(4)}),
        # three roles make experience together, two of them train
        (
            f"--vllm.num_engines 1 {GAE}",
            12,
            12,
            {
                Role.POLICY: RankThreads(score=4, update=6),
                Role.CRITIC: RankThreads(score=4, update=6),
                Role.REFERENCE: same(4),
            },
        ),
    ],
)
def test_threads_of_every_process(line: str, cores: int, engine: int, ranks: dict[Role, RankThreads]) -> None:
    found = plan(line, cores=cores)
    assert found.engine == engine
    assert found.ranks == ranks


def test_a_reward_model_scores_while_engines_sample() -> None:
    found = plan("--reward.model_name_or_path hub/rm --reward.remote_url None --vllm.num_engines 1", cores=8)
    assert (found.engine, found.ranks[Role.REWARD], found.ranks[Role.POLICY]) == (4, same(4), same(8))


def test_the_fullest_node_counts() -> None:
    found = plan("--vllm.num_engines 3 --actor.num_nodes 2 --actor.num_gpus_per_node 2", cores=8, nodes=2)
    assert (found.engine, found.ranks[Role.POLICY]) == (4, same(4))


def test_a_small_model_gets_one_thread(tmp_path: Path) -> None:
    files(tmp_path, {"config.json": TINY})
    found = plan(f"--actor.model_name_or_path {tmp_path} --vllm.num_engines 1", cores=16)
    assert (found.engine, found.ranks[Role.POLICY]) == (1, same(1))


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_threads(config_of(), cores=16, environ={"OMP_NUM_THREADS": "3"}) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan_threads(config_of(), cores=16) is None


def test_an_engine_is_started_with_its_threads() -> None:
    config = config_of("--vllm.num_engines 2")
    threads = plan_threads(config, cores=8, environ={})
    assert [spec.cpu_threads for spec in engine_specs(config, gpus=0, threads=threads)] == [4, 4]
    assert environment(EngineSpec(model="m", cpu_threads=4))["OMP_NUM_THREADS"] == "4"


def test_the_log_shows_what_differs() -> None:
    assert str(plan(f"--vllm.num_engines 1 {GAE}", cores=12)) == (
        "engines 12, actor 4 (training 6), critic 4 (training 6), ref 4"
    )
