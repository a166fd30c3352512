"""Options of Slurm passed on, contradictions among them, and what of the environment reaches a new job."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path

import pytest

from openrlhf.launcher.ray.node import run_environment
from openrlhf.launcher.secret_flags import VARIABLE
from openrlhf.launcher.slurm.environment import submission, without_job
from openrlhf.launcher.slurm.options import read_options
from openrlhf.launcher.slurm.runs import make_spec, read_run
from openrlhf.launcher.slurm.sbatch_arguments import SHORT, OptionError, sbatch_arguments
from openrlhf.launcher.slurm.submit import _parser, main
from openrlhf.launcher.slurm.sweep import main as sweep

FLAGS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]
SECRET = "s3cr3t-Wert"
URL = f"http://user:{SECRET}@host/get_reward"
SECRET_FLAGS = ["--logger.wandb.key", SECRET, "--reward.remote_url", URL, "--vllm.engine_args"]
SECRET_FLAGS.append(json.dumps({"hf_token": SECRET}))


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENRLHF_SLURM_CONFIG", raising=False)


def options(*words: str) -> argparse.Namespace:
    return read_options(_parser(), list(words))


def script(*words: str) -> list[str]:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.script import make_executor

    return make_executor(options(*words)).script().splitlines()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("-A proj", "--account=proj"),
        ("-Aproj", "--account=proj"),
        ("-A=proj", "--account=proj"),
        ("-L a:1", "--licenses=a:1"),
        ("-p gpu", "--partition=gpu"),
        ("-D /work", "--chdir=/work"),
        ("-H", "--hold"),
        ("-k", "--no-kill"),
        ("--licenses=a:1", "--licenses=a:1"),
        ("--licenses a:1", "--licenses=a:1"),
        ("--comment=a b", "--comment='a b'"),
        ("--reboot", "--reboot"),
        ("--mem-per-gpu=40G", "--mem-per-gpu=40G"),
    ],
)
def test_e02_options_are_written_as_sbatch_reads_them(word: str, line: str) -> None:
    lines = script(f"--sbatch-arg={word}")
    assert f"#SBATCH {line}" in lines
    assert [text for text in lines if text.startswith("#SBATCH --") and len(text.split("=")[0]) < 12] == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("-L", "--licenses needs a value"),
        ("-A", "--account needs a value"),
        ("--licenses=", "--licenses needs a value"),
        ("-Z x", "'-Z' is no option of sbatch: give its long name"),
        ("licenses=a:1", "is no option: write it with its dashes"),
        ("-H now", "--hold is a switch and takes no value"),
    ],
)
def test_e02_what_is_no_option_is_refused_by_name(word: str, message: str) -> None:
    with pytest.raises(OptionError, match="--sbatch-arg") as caught:
        options(f"--sbatch-arg={word}")
    assert message in str(caught.value)


def test_e02_every_short_option_has_one_long_name() -> None:
    assert len(set(SHORT.values())) == len(SHORT)
    assert sbatch_arguments(["-c 3", "--x=1"]) == {"cpus-per-task": "3", "x": "1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mem", "1G", "--sbatch-arg=--mem-per-gpu=2G"], "--mem=1G and --mem-per-gpu=2G exclude each other"),
        (["--mem", "1G", "--mem-per-gpu", "2G"], "--mem=1G and --mem-per-gpu=2G exclude each other"),
        (["--mem-per-cpu", "1G", "--sbatch-arg=--mem=2G"], "--mem=2G and --mem-per-cpu=1G exclude each other"),
        (["--sbatch-arg=--array=1-3"], "openrlhf-launch sweep"),
        (["--sbatch-arg=-a 1-3"], "one training in one folder is no array"),
        (["--sbatch-arg=--nodes=3"], "--sbatch-arg --nodes=3: use --nodes"),
        (["--sbatch-arg=-N 3"], "--sbatch-arg --nodes=3: use --nodes"),
        (["--sbatch-arg=-n 3"], "one task runs on each node"),
        (["--sbatch-arg=--time=5"], "use --time"),
        (["--sbatch-arg=-o out"], "use --log-dir"),
        (["--sbatch-arg=--signal=B:USR1@9"], "use --signal-delay"),
        (["--sbatch-arg=--no-requeue"], "use --max-restarts 0"),
        (["--sbatch-arg=-W"], "use --wait"),
        (["--partition", "a", "--sbatch-arg=-p b"], "--partition 'a' and --sbatch-arg --partition=b contradict"),
        (["--gpus-per-node", "8", "--gres", "gpu:4"], "--gpus-per-node=8 and --gres=gpu:4 exclude each other"),
        (["--gpus-per-node", "8", "--sbatch-arg=--gpus-per-task=8"], "exclude each other"),
        (["--gpus-per-node", "8", "--nodes", "2", "--sbatch-arg=-G 8"], "--gpus=8 and --gpus-per-node=8 contradict"),
        (["--cpus-per-task", "8", "--sbatch-arg=--cpus-per-gpu=2"], "exclude each other"),
        (["--exclusive", "--sbatch-arg=-s"], "nodes are shared or they are not"),
        (["--nodelist", "n[1-3]", "--exclude", "n2"], "--nodelist and --exclude both name n2"),
        (["--srun-arg=--nodes=1"], "--srun-arg --nodes=1: use --nodes"),
        (["--srun-arg=-N1"], "--srun-arg --nodes=1: use --nodes"),
        (["--srun-arg=-K"], "the nodes end each other in order"),
    ],
)
def test_e06_contradictions_are_refused_by_name(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(OptionError) as caught:
        options(*words)
    assert message in str(caught.value)
    assert main([*words, "--dry-run", "--", *FLAGS]) == 2  # before anything is submitted
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--mem", "1G", "--sbatch-arg=--mem=1G"],
        ["--gpus-per-node", "8", "--gres", "nic:2"],
        ["--gpus-per-node", "8", "--nodes", "2", "--sbatch-arg=--gpus=16"],
        ["--nodelist", "n[1-3]", "--exclude", "n4"],
        ["--srun-arg=--mpi=none", "--srun-arg=-l"],
    ],
)
def test_e06_what_agrees_is_taken(words: list[str]) -> None:
    assert options(*words)


def test_e06_the_command_line_replaces_its_kind_in_the_site_s_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('mem = "200G"\ngpus_per_node = "8"\n', encoding="utf-8")
    read = options("--site", str(tmp_path / "site.toml"), "--mem-per-gpu", "40G", "--gres", "gpu:4")
    assert (read.mem, read.mem_per_gpu, read.gpus_per_node, read.gres) == (None, "40G", None, "gpu:4")


OUTER = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "100", "SLURM_CPU_BIND": "mask", "SLURM_NTASKS": "3"}
OUTER |= {"SBATCH_MEM_BIND": "x", "SRUN_CPUS_PER_TASK": "2", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}


def test_e03_nothing_of_a_surrounding_job_is_handed_on() -> None:
    assert without_job(OUTER) == {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}
    outside = {"SBATCH_ACCOUNT": "proj", "SLURM_TIME_FORMAT": "%s"}  # a user's own defaults
    assert without_job(outside) == outside


@pytest.mark.parametrize("how", ["submit", "test-only", "sweep"])
def test_e03_sbatch_sees_none_of_it(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in sbatch's place writes down its environment and its script."""
    pytest.importorskip("submitit")
    program = tmp_path / "sbatch"
    copy = f'for word in "$@"; do script="$word"; done; cp "$script" {tmp_path}/script'
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/env\n{copy}\necho Submitted batch job 12\n", encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "srun").symlink_to("/bin/true")  # submitit looks for it
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}:/usr/bin:/bin")
    own = ["--log-dir", str(tmp_path / "logs"), "--env", f"WANDB_API_KEY={SECRET}", "--env", "HF_HOME=/x"]
    flags = ["--", *FLAGS, *SECRET_FLAGS]
    if how == "sweep":
        root = str(tmp_path / "sweep")
        assert sweep(["--set", "actor.adam.lr=1e-6,2e-6", "--sweep-dir", root, *own, *flags]) == 0
    else:
        assert main([*own, *(["--test-only"] if how == "test-only" else []), *flags]) == 0
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert [name for name in seen if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))] == ["SLURM_CONF"]
    # L04: secrets are in the environment alone, in no file and no script
    assert seen["WANDB_API_KEY"] == SECRET
    assert json.loads(seen[VARIABLE])[2:4] == ["--logger.wandb.key", SECRET]
    text = (tmp_path / "script").read_text(encoding="utf-8")
    assert "export HF_HOME=/x" in text
    files = [path for folder in ("logs", "sweep") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in text
    assert bool(files) == (how != "test-only")
    assert os.environ["SLURM_MEM_PER_NODE"] == "100"  # this process keeps its own


def test_l04_the_spec_of_a_job_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec(options(), read_run([*FLAGS, *SECRET_FLAGS]))
    assert SECRET not in " ".join(spec.node_command())
    assert SECRET.encode() not in pickle.dumps(spec)
    pytest.importorskip("submitit")
    assert main(["--dry-run", "--env", f"HF_TOKEN={SECRET}", "--", *FLAGS, *SECRET_FLAGS]) == 0
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert f"note: HF_TOKEN, {VARIABLE} reach the job by the environment of the submission" in printed.err


@pytest.mark.parametrize(
    "words",
    [
        ["--setup", f"export WANDB_API_KEY={SECRET}"],
        ["--comment", f"see https://me:{SECRET}@host"],
        [f"--sbatch-arg=--export=ALL,HF_TOKEN={SECRET}"],
        ["--container-image", f"docker://me:{SECRET}@host#image"],
        ["--env", f"HF_TOKEN={SECRET}", "--sbatch-arg=--export=NONE"],
        ["--env", f"1TOKEN={SECRET}"],
        ["--nodes", f"HF_TOKEN={SECRET}"],
        ["--hf_token", SECRET],
        ["--gpus_per_nod", f"http://u:{SECRET}@host"],
    ],
)
def test_l04_no_message_of_the_options_shows_a_secret(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main([*words, "--dry-run", "--", *FLAGS])
    except SystemExit as stop:  # argparse's own way out
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert SECRET not in printed.out + printed.err
    assert "openrlhf-launch slurm: " in printed.err


def test_l04_a_secret_is_not_swept(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    assert sweep(["--set", f"reward.api_key={SECRET},b", "--dry-run", "--", *FLAGS]) == 2
    text = capsys.readouterr().err
    assert "--set reward.api_key: secrets are not swept" in text
    assert SECRET not in text


def test_l04_only_the_trainer_of_a_job_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    environ = {VARIABLE: "[]", "HOME": "/h", "RAY_ADDRESS": "x"}
    assert VARIABLE not in run_environment(environ, token="t", mark="m")
    handed: dict[str, str] = {}

    class Step:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            handed.update(env)
            assert SECRET not in " ".join(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("openrlhf.launcher.slurm.in_allocation.subprocess.Popen", Step)
    monkeypatch.setattr("openrlhf.launcher.slurm.in_allocation.signal.signal", lambda *words: None)
    monkeypatch.setattr("openrlhf.launcher.slurm.in_allocation.shutil.which", lambda name: name)
    for name, value in {**OUTER, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--in-allocation", "--env", f"HF_TOKEN={SECRET}", "--", *FLAGS, *SECRET_FLAGS]) == 0
    assert (handed["HF_TOKEN"], handed["SLURM_JOB_ID"], handed["SLURM_EXPORT_ENV"]) == (SECRET, "7", "ALL")
    assert SECRET in json.loads(handed[VARIABLE])
    assert "SLURM_CPU_BIND" not in handed


def test_e03_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = dict(os.environ)
    with submission({"HF_TOKEN": "x"}):
        assert "SLURM_JOB_ID" not in os.environ
        assert os.environ["HF_TOKEN"] == "x"
    assert dict(os.environ) == before
