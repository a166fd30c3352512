"""Heterogeneous jobs: the script, what each group of nodes is for, where placement puts parts, and what is refused."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.placement import NODE_CAPACITY, NODE_SHARE, node_resource, nodes_apart, plan_placement
from openrlhf.launcher.ray import node
from openrlhf.launcher.slurm.allocation import Allocation
from openrlhf.launcher.slurm.options import read_options
from openrlhf.launcher.slurm.parts import Place, make_part
from openrlhf.launcher.slurm.ports import PortBlock
from openrlhf.launcher.slurm.runs import make_spec, read_run
from openrlhf.launcher.slurm.spec import NodeSpec, from_json
from openrlhf.launcher.slurm.submit import _parser, main

FLAGS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]
FLAGS += ["--algo.advantage.estimator", "reinforce", "--rollout.n_samples_per_prompt", "1", "--algo.kl.init_coef", "0"]
FLAGS += ["--vllm.num_engines", "4", "--actor.num_gpus_per_node", "8"]
ENGINES = ["--het", "engines=--nodes 2 --gpus-per-node 2 --partition small --cpus-per-task 8"]
AGENTS = ["--het", "agents=--nodes 3 --cpus-per-task 64 --partition cpu --exclusive"]
JOB = ["--gpus-per-node", "8", "--partition", "big", "--account", "a", "--cpus-per-task", "16"]


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENRLHF_SLURM_CONFIG", raising=False)


def options(*words: str) -> argparse.Namespace:
    return read_options(_parser(), list(words))


def test_the_script_of_a_heterogeneous_job(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    assert main([*JOB, *ENGINES, *AGENTS, "--gpu-form", "gres=gpu:x:{}", "--dry-run", "--", *FLAGS]) == 0
    text = capsys.readouterr().out
    head, engines, agents = text.split("#SBATCH hetjob\n")
    agents = agents.split("\n\n")[0]
    assert "#SBATCH --gres=gpu:x:8" in head.splitlines()
    wanted = "account=a cpus-per-task=8 gres=gpu:x:2 nodes=2 ntasks-per-node=1 partition=small signal=USR2@300 time=60"
    assert engines.splitlines() == [f"#SBATCH --{word}" for word in [*wanted.split(), "requeue"]]
    wanted = (
        "account=a cpus-per-task=64 nodes=3 ntasks-per-node=1 partition=cpu signal=USR2@300 time=60 exclusive requeue"
    )
    assert agents.splitlines() == [f"#SBATCH --{word}" for word in wanted.split()]
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    steps = " ".join(shlex.split(line)).split(" : ")
    for i, (nodes, cpus) in enumerate([(1, 16), (2, 8), (3, 64)]):
        for word in (f"--het-group={i}", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}"):
            assert word in steps[i].split()
        assert "-m submitit.core._submit" in steps[i]
    assert "%j" not in line
    assert '/slurm_logs/"$SLURM_JOB_ID"/"$SLURM_JOB_ID"_%t_log.out' in line
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60, check=False).returncode == 0


def test_nodes_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(options(*JOB, *ENGINES, *AGENTS), read_run(FLAGS))
    assert spec.apart == (("engine",), ("agent",))
    assert from_json(spec.node_command()[-1]) == spec
    started: list[list[str]] = []
    monkeypatch.setattr(node, "RayNode", lambda arguments, environ: started.append(arguments))
    monkeypatch.setattr(node, "start_shielded", lambda *args: None)
    for group in range(3):
        here = Allocation(job_id=1, nodes=("a", "b", "c"), index=group, cpus=1, gpus=0, group=group)
        for each in (spec, NodeSpec(command=("trainer",))):
            make_part(each, Place(here=here, block=PortBlock(20000), ip="10.0.0.1", environ={})).begin("10.0.0.1:20000")
    said = [[word for word in words if word.startswith("--resources")] for words in started]
    names = ["rest", "engine", "agent"]
    assert said == [x for name in names for x in ([f'--resources={{"openrlhf-part-{name}": {NODE_CAPACITY}}}'], [])]
    assert nodes_apart(["CPU", *(f"openrlhf-part-{name}" for name in names)]) == {"engine", "agent"}


def test_placement_keeps_the_parts_apart() -> None:
    config = parse(TRAIN_PPO_RAY, FLAGS).config
    apart = {"engine", "agent"}
    plan = plan_placement(config, gpus=20, nodes=3, apart=apart)
    bundles = {pool.name: pool.bundles for pool in plan.pools}
    assert bundles["policy"] == ({"GPU": 1.0, "CPU": 1.0, "openrlhf-part-rest": NODE_SHARE},) * 8
    assert bundles["engine"] == ({"GPU": 1.0, "CPU": 1.0, "openrlhf-part-engine": NODE_SHARE},) * 4
    on_cpus = plan_placement(config, gpus=0, nodes=1, apart=apart)
    assert {seat.nodes for seat in on_cpus.seats["policy"]} == {"openrlhf-part-rest"}
    assert {seat.nodes for seat in on_cpus.seats["engine"]} == {"openrlhf-part-engine"}
    assert plan_placement(config, gpus=20, nodes=3) == plan_placement(config, gpus=20, nodes=3, apart=())
    assert plan.part_of("engine") == {"openrlhf-part-engine": NODE_SHARE}  # of an engine that is added later
    assert node_resource("engine", ()) == ""
    assert nodes_apart(["openrlhf-joined-1"]) == frozenset()


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (["--het", "engines"], [], "--het 'engines': write --het engines='--nodes 2 --gpus-per-node 8'"),
        (["--het", "engine=--nodes 1"], [], "--het engine: this is no part to set nodes apart for: engines, judge"),
        (["--het", "actor=--nodes 1"], [], "the actor trains on the nodes of the job's own options"),
        (["--het", "engines=--nodez 1"], [], "unrecognized arguments: --nodez 1; it takes --nodes, --cpus-per-task"),
        (["--het", "engines=--nodes 0"], [], "--het engines: --nodes 0 must be at least 1"),
        (["--het", "engines=--partition 'a"], [], "--het engines: No closing quotation"),
        (
            ["--het", "engines=--mem 1G --mem-per-cpu 2G"],
            [],
            "--het engines: --mem=1G and --mem-per-cpu=2G exclude",
        ),
        ([*ENGINES, *ENGINES], [], "--het names engines twice"),
        (["--het", "judge=--nodes 1"], [], "--het judge: the run has none: drop it"),
        (["--het", "critic=--nodes 1"], [], "--het critic: the run has none: drop it"),
        (
            ["--het", "engines=--nodes 1 --gpus-per-node 2"],
            [],
            "its 1 nodes have 2 GPUs, and 4 are needed (engines: 4)",
        ),
        (["--het", "engines=--nodes 4"], [], "its 4 nodes have 0 GPUs, and 4 are needed (engines: 4)"),
        (AGENTS, [], "the job's own 1 nodes have 8 GPUs, and 12 are needed (actor: 8, engines: 4)"),
        (
            ["--het", "engines=--nodes 1 --gpus-per-node 8"],
            ["--train.colocate_all", "--vllm.num_engines", "8", "--vllm.enable_sleep", "--ds.enable_sleep"],
            "actor + engines share devices, so engines cannot have nodes of their own: drop --train.colocate_*",
        ),
        ([*ENGINES, "--in-allocation"], [], "--in-allocation: this is for jobs of one kind of node"),
    ],
)
def test_what_a_heterogeneous_job_cannot_do(
    words: list[str],
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    last = [] if "--in-allocation" in words else ["--dry-run"]
    assert main([*JOB, *words, *last, "--", *FLAGS, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "run", [["selfcheck"], ["train_sft", "--model.model_name_or_path", "m", "--data.dataset", "d"]], ids=lambda r: r[0]
)
def test_only_rl_has_more_than_one_kind_of_node(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--het", "engines=--nodes 1", "--dry-run", "--", *run]) == 2
    assert f"--het: {run[0]} has one kind of node; RL training and eval can have more" in capsys.readouterr().err
