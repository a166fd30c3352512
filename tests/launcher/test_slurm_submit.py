"""Options, site defaults, the batch script and the in-allocation step, without Slurm."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.launcher.slurm.node import from_json
from openrlhf.launcher.slurm.options import read_options
from openrlhf.launcher.slurm.requeue import decide, newest_step
from openrlhf.launcher.slurm.runner import NodeSpec
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.submit import _parser, main, make_check, make_spec
from openrlhf.launcher.slurm.sweep import combinations, run_flags

FLAGS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]
NASTY = ["a b", '{"k": "v w", "n": [1,2]}', "$HOME", "it's", "*", ";", "line\nbreak", "", "Grüße 你好", '"', "\\"]


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENRLHF_SLURM_CONFIG", raising=False)


def options(*words: str) -> argparse.Namespace:
    return read_options(_parser(), list(words))


def test_site_defaults_and_command_line(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('partition = "gpu"\ntime = "2-0"\nsetup = ["module load cuda"]\nnodes = 4\n')
    read = options("--site", str(site), "--nodes", "2")
    assert (read.partition, read.time, read.setup, read.nodes) == ("gpu", "2-0", ["module load cuda"], 2)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_r03_site_file_with_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_bytes('partition = "größe"\r\n'.encode(encoding))
    assert options("--site", str(site)).partition == "größe"


@pytest.mark.parametrize(
    ("text", "message"),
    [("nods = 3", "no option 'nods'"), ('nodes = "3"', "must be of type int"), ("x =", "no TOML file")],
)
def test_site_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    site = tmp_path / "site.toml"
    site.write_text(text)
    with pytest.raises(OptionError, match=message):
        options("--site", str(site))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--time", "soon"], "--time: 'soon'"),
        (["--time", "1", "--signal-delay", "60"], "--signal-delay 60"),
        (["--env", "A B"], "--env A..."),
        (["--job-name", "a\nb"], "--job-name 'a.nb' holds a line break"),
        (["--container-mount", "/a:/a"], "--container-mount needs --container-image"),
        (["--nodes", "0"], "--nodes 0"),
        (["--site", "/none.toml"], "there is no file"),
    ],
)
def test_options_are_checked(words: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options(*words)


def test_mistakes_in_the_trainer_s_flags_stop_the_submission(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--", "--rollout.batch_siz", "3", *FLAGS]) == 2
    assert "--rollout.batch_size" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [["--gpus-per-node", "h100:4"], ["--gres", "gpu:h100:4"]])
def test_rules_are_checked_where_the_gpus_are_known(gpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    flags = [*FLAGS, "--vllm.num_engines", "4", "--algo.advantage.estimator", "reinforce", "--algo.kl.init_coef", "0"]
    flags += ["--rollout.n_samples_per_prompt", "1", "--actor.num_gpus_per_node"]
    assert main([*gpus, "--dry-run", "--", *flags, "8"]) == 2
    assert "--actor.num_gpus_per_node 4 or less" in capsys.readouterr().err
    assert main(["--dry-run", "--", *flags, "8"]) == 0
    assert main([*gpus, "--nodes", "2", "--dry-run", "--", *flags, "4"]) == 0


def test_spec_names_no_checkpoint_b103() -> None:
    spec = make_spec(options(), [*FLAGS, "--ckpt.path", "/c"])
    assert spec.command == (sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *FLAGS, "--ckpt.path", "/c")
    assert spec.checkpoints == "/c"
    assert spec.argv(0) == list(spec.command)
    assert spec.argv(1) == [*spec.command, "--ckpt.load_enable"]
    assert make_spec(options(), [*FLAGS, "--ckpt.load_enable"]).resume == ()


def test_arguments_survive_the_way_to_the_node_b105() -> None:
    spec = NodeSpec(command=("trainer", *NASTY))
    assert from_json(spec.node_command()[-1]) == spec
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; print(ascii(sys.argv[1]))", spec.node_command()[-1]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert from_json(eval(shown.stdout)).command == ("trainer", *NASTY)


def test_script_text() -> None:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.script import make_executor

    words = ["--nodes", "2", "--time", "1:00:00", "--gpus-per-node", "h100:2", "--qos", "q", "--mem", "0"]
    words += ["--env", "HF_HOME=/x y", "--setup", "module load cuda", "--sbatch-arg=--licenses=a:1", "--exclusive"]
    script = make_executor(options(*words, "--job-name", "a b", "--log-dir", "/logs")).script()
    lines = script.splitlines()
    wanted = "nodes=2 time=60 gpus-per-node=h100:2 qos=q mem=0 licenses=a:1 exclusive requeue job-name='a_b'"
    for option in wanted.split():
        assert f"#SBATCH --{option.replace('_', ' ')}" in lines
    assert lines.index("module load cuda") < lines.index("export HF_HOME='/x y'")
    assert "#SBATCH --signal=USR2@300" in lines
    assert lines[-1] == 'exit "$code"'
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60, check=False).returncode == 0


def test_containers_are_on_srun() -> None:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.script import make_executor

    words = ["--container-image", "nvcr.io#a/b:1", "--container-mount", "/d:/d", "--container-mount", "/e:/e"]
    script = make_executor(options(*words)).script()
    assert "--container-image=nvcr.io#a/b:1 --container-mounts=/d:/d,/e:/e" in script.replace("'", "")
    assert " python3 -u -m submitit" in script
    script = make_executor(options(*words, "--container-runtime", "apptainer")).script()
    assert "apptainer exec --nv --bind /d:/d --bind /e:/e 'nvcr.io#a/b:1' python3 -u -m submitit" in script


def test_job_pickles_without_its_runner_and_has_a_checkpoint_b100(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    import pickle

    from openrlhf.launcher.slurm.job import Job

    job = Job(NodeSpec(command=("trainer", *NASTY)))
    assert pickle.loads(pickle.dumps(job)) == job
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert job.checkpoint().function == job
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(SystemExit) as end:
        job.checkpoint()
    assert end.value.code == 85


def test_in_allocation_needs_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--in-allocation", "--", *FLAGS]) == 2
    assert "this is no Slurm job" in capsys.readouterr().err


def test_selfcheck_runs_on_every_node_and_is_not_requeued(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.in_allocation import step_command

    read = options("--selfcheck", "--nodes", "2", "--python", "/p y")
    check = make_check(read, ["--only", "versions"])
    assert check.node_command() == ["/p y", "-m", "openrlhf.launcher.main", "selfcheck", "--only", "versions"]
    assert pickle.loads(pickle.dumps(check)) == check
    monkeypatch.setattr("openrlhf.launcher.slurm.in_allocation.shutil.which", lambda _: "/usr/bin/srun")
    step = step_command(read, check.node_command(), {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert step[:4] == ["srun", "--overlap", "--ntasks-per-node=1", "--nodes=2"]
    assert step[-6:] == check.node_command()
    assert main(["--selfcheck", "--nodes", "2", "--dry-run", "--", "--only", "versions"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --nodes=2" in script
    assert main(["--selfcheck", "--", "--only", "version"]) == 2
    assert "--selfcheck: --only 'version': there is no such row" in capsys.readouterr().err


def test_requeue_is_capped_and_needs_progress(tmp_path: Path) -> None:
    assert decide(restarts=0, limit=3, before=-1, after=4).requeue
    assert not decide(restarts=3, limit=3, before=-1, after=4).requeue
    assert "added no checkpoint" in decide(restarts=1, limit=3, before=4, after=4).reason
    assert decide(restarts=1, limit=3, before=4, after=4, preempted=True).requeue
    assert newest_step(None) == newest_step(tmp_path / "none") == -1
    for name in ("global_step3", "global_step12", "global_step20_hf", ".tmp_global_step30"):
        (tmp_path / name).mkdir()
    assert newest_step(tmp_path) == 12


def test_sweep_combinations() -> None:
    assert combinations(["a.b=1,2", "--c=x"]) == [{"a.b": "1", "c": "x"}, {"a.b": "2", "c": "x"}]
    assert combinations(['a=["1,2","3"]']) == [{"a": "1,2"}, {"a": "3"}]
    flags = run_flags(["--x", "1"], {"a.b": "2"}, Path("/s/run000"))
    assert flags[-2:] == ["--a.b", "2"]
    assert flags[2:6] == ["--ckpt.output_dir", "/s/run000", "--ckpt.path", "/s/run000/checkpoints"]
    with pytest.raises(OptionError, match="--set 'a' is no FLAG=VALUE"):
        combinations(["a"])
