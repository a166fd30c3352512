"""Options, site defaults, the batch script and the in-allocation step, without Slurm."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.launcher.slurm.options import read_options
from openrlhf.launcher.slurm.requeue import VERDICT, decide, newest_step, requeue
from openrlhf.launcher.slurm.runs import make_part, make_spec, read_run
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.spec import NodeCheck, NodeSpec, from_json
from openrlhf.launcher.slurm.submit import _parser, main
from openrlhf.launcher.slurm.sweep import combinations, run_flags

ROOT = Path(__file__).parents[2]
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
    [
        ("nods = 3", "no option 'nods' to set; did you mean 'nodes'?"),
        ("contianer-runtime = 'pyxis'", "did you mean 'container-runtime'?"),
        ("zzz = 3", "no option 'zzz' to set; it may set account"),
        ("site = 'x'", "no option 'site'"),
        ("nodes = true", "must be of type int"),
        ("module = [1]", "must be a list of texts"),
        ("container_runtime = 'docker'", "must be one of pyxis, apptainer"),
        ('nodes = "3"', "must be of type int"),
        ("x =", "no TOML file"),
    ],
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
        (["--container-mount", "/a:/a"], "--container-mount needs --container IMAGE"),
        (["--nodes", "0"], "--nodes 0"),
        (["--interface", "a b"], "--interface 'a b' is no name of a network interface"),
        (["--gpu-form", "gpus={}"], "--gpu-form 'gpus={}': write gpus-per-node={} or gres=gpu:TYPE:{}"),
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
    spec = make_spec(options(), read_run([*FLAGS, "--ckpt.path", "/c"]))
    assert spec.command == (sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *FLAGS, "--ckpt.path", "/c")
    assert spec.checkpoints == "/c"
    assert spec.argv(0) == list(spec.command)
    assert spec.argv(1) == [*spec.command, "--ckpt.load_enable"]
    assert make_spec(options(), read_run([*FLAGS, "--ckpt.load_enable"])).resume == ()


SUPERVISED = ["--model.model_name_or_path", "m", "--data.dataset", "d", "--ckpt.path", "/c"]


@pytest.mark.parametrize(
    ("words", "module", "part", "saves"),
    [
        (["train_ppo_ray", *FLAGS], "openrlhf.cli.train_ppo_ray", "ray", True),
        (["train_sft", *SUPERVISED, "--data.output_key", "o"], "openrlhf.cli.train_sft", "ranks", True),
        (["train_rm", *SUPERVISED], "openrlhf.cli.train_rm", "ranks", True),
        (["train_dpo", *SUPERVISED], "openrlhf.cli.train_dpo", "ranks", True),
        (["eval", "--json", "--", *FLAGS, "--eval.dataset", "e"], "openrlhf.launcher.main", "ray", False),
        (["serve_rm", "--reward.model_name_or_path", "m"], "openrlhf.cli.serve_rm", "program", False),
    ],
)
def test_what_a_job_runs(words: list[str], module: str, part: str, saves: bool) -> None:
    gpus = () if part == "ray" else ("--gpus-per-node", "1")
    spec = make_spec(options(*gpus), read_run(words))
    own = words if words[0] == "eval" else words[1:]
    assert spec.command == (sys.executable, "-m", module, *own)
    assert spec.part == part
    assert (spec.resume, bool(spec.checkpoints)) == ((("--ckpt.load_enable",), True) if saves else ((), False))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train_stf", *SUPERVISED], "-- train_stf: this is nothing to run; did you mean 'train_sft'?"),
        (["lora_combiner"], "-- lora_combiner: this is nothing to run"),
        (["eval", *FLAGS], "write `-- eval -- <flags>`"),
        (["serve_rm", "--reward.model_name_or_path", "m"], "--nodes 2: serve_rm is one process on one node"),
        (["train_sft", *SUPERVISED, "--train.batch_siz", "3"], "--train.batch_size"),
        (["train_sft", *SUPERVISED, "--ds.ring_attn_size", "3"], "--ds.ring_attn_size"),
    ],
)
def test_mistakes_in_what_a_job_runs(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "2", "--gpus-per-node", "8", "--dry-run", "--", *words]) == 2
    assert message in capsys.readouterr().err


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


def script(*words: str) -> str:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.script import make_executor

    return make_executor(options(*words)).script()


@pytest.mark.parametrize(
    ("words", "runtime"),
    [
        (["--container", "nvcr.io#a/b:1"], "pyxis"),
        (["--container-image", "/images/a.sqsh"], "pyxis"),
        (["--container", "/images/a b.sif"], "apptainer"),
        (["--container", "docker://a/b", "--container-runtime", "singularity"], "singularity"),
        (["--container", "/images/a.sif", "--container-runtime", "pyxis"], "pyxis"),
        (["--container", "/images/a.sif", "--container-runtime", "none"], "none"),
    ],
)
def test_the_runtime_of_a_container(words: list[str], runtime: str, tmp_path: Path) -> None:
    text = script(*words, "--container-mount", "/d:/d", "--container-mount", "/e x:/e")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    said = shlex.split(line)
    image, here = words[1], str(Path.cwd())
    if runtime == "pyxis":
        assert [f"--container-image={image}", f"--container-workdir={here}", "--container-mounts=/d:/d,/e x:/e"] == [
            word for word in said if word.startswith("--container")
        ]
        assert said[said.index("-u") - 1] == "python3"
    elif runtime == "none":
        assert "container" not in text
        assert said[said.index("-u") - 1] == sys.executable
    else:
        start = said.index(runtime)
        binds = ["--bind", "/d:/d", "--bind", "/e x:/e"]
        assert said[start : start + 11] == [runtime, "exec", "--nv", "--pwd", here, *binds, image, "python3"]
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60, check=False).returncode == 0


def test_what_a_centre_needs_stands_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = ROOT / "examples" / "slurm" / "site.toml"
    monkeypatch.setenv("OPENRLHF_SLURM_CONFIG", str(site))
    text = script("--gpus-per-node", "8", "--account", "mine", "--gres", "nic:2", "--env", "HF_HOME=/mine")
    lines = text.splitlines()
    for wanted in ("partition=gpu", "account=mine", "qos=normal", "gres=nic:2,gpu:h100:8"):
        assert f"#SBATCH --{wanted}" in lines
    assert "gpus-per-node" not in text
    order = ["module load cuda/13.0", "module load apptainer", "ulimit -Sl unlimited", "export HF_HOME=/mine"]
    assert sorted(order, key=lines.index) == order
    assert "/shared/images/openrlhf.sif python3 -u -m submitit" in text
    spec = make_spec(options("--gpu-form", "gpus-per-node={}"), read_run(FLAGS))
    assert spec.interface == "ib0"
    assert spec.command[0] == "python3"
    assert "gpus-per-node=a100:4" in script("--gpus-per-node", "a100:4", "--gpu-form", "gpus-per-node={}")


def test_an_image_is_not_needed_where_the_site_has_mounts(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('container_mount = ["/shared:/shared"]\n')
    assert "/shared" not in script("--site", str(site))


RECIPES = sorted((ROOT / "examples" / "slurm").glob("[oD]*"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_container_recipes_install_the_pinned_gpu_set(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    files = re.findall(r"^ {4}(\S+) /opt/openrlhf/", text, re.MULTILINE)
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        files += copied.split()
    assert {"constraints", "packages", "pyproject.toml", "scripts/set_up.py"} <= set(files)
    for name in files:
        assert (ROOT / name).exists(), name
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import set_up
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert "python3 scripts/set_up.py --set gpu" in text
    assert "constraints/gpu.txt" in set_up.uv_install("python3", "gpu")
    read = {word for pattern in set_up.INPUTS for word in [pattern.split("*")[0].rstrip("/")]}
    assert {name for name in read if not any(name.startswith(have) for have in files)} == set()
    assert not re.search(r"https?://|index-url", text)
    cuda = re.search(r"nvidia/cuda:(\d+\.\d+)", text)
    pinned = re.search(r"^cuda-toolkit==(\d+\.\d+)", (ROOT / "constraints" / "gpu.txt").read_text(), re.MULTILINE)
    assert cuda
    assert pinned
    assert cuda[1] == pinned[1]


def test_there_is_a_recipe_for_each_kind_of_runtime() -> None:
    assert [path.name for path in RECIPES] == ["Dockerfile", "openrlhf.def"]


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


def test_nodes_of_a_job_join_a_run_and_go_back_into_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    assert main(["--nodes", "2", "--gpus-per-node", "8", "--dry-run", "--", "join", "/r", "--engines", "4"]) == 0
    script = capsys.readouterr().out
    assert "--requeue" in script
    assert "--nodes=2" in script
    with pytest.raises(SystemExit, match="2"):
        main(["--dry-run", "--", "join", "/r", "--engines", "0"])
    assert "join: error: --engines 0: give 1 at least" in capsys.readouterr().err
    made = make_part(read_options(_parser(), []), read_run(["join", "/r"]))
    assert made.node_command()[1:] == ["-m", "openrlhf.launcher.main", "join", "/r"]


def test_selfcheck_runs_on_every_node_and_is_not_requeued(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.in_allocation import step_command

    read = options("--nodes", "2", "--python", "/p y")
    check = make_part(read, read_run(["selfcheck", "--only", "versions"]))
    assert isinstance(check, NodeCheck)
    assert check.node_command() == ["/p y", "-m", "openrlhf.launcher.main", "selfcheck", "--only", "versions"]
    assert pickle.loads(pickle.dumps(check)) == check
    monkeypatch.setattr("openrlhf.launcher.slurm.in_allocation.shutil.which", lambda _: "/usr/bin/srun")
    step = step_command(read, check.node_command(), {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert step[:4] == ["srun", "--overlap", "--ntasks-per-node=1", "--nodes=2"]
    assert step[-6:] == check.node_command()
    inside = options("--container", "/i.sif", "--nodes", "2")
    step = step_command(inside, ["python3", "x"], {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert step[-8:] == ["apptainer", "exec", "--nv", "--pwd", str(Path.cwd()), "/i.sif", "python3", "x"]
    assert main(["--nodes", "2", "--dry-run", "--", "selfcheck", "--only", "versions"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --nodes=2" in script
    assert main(["--", "selfcheck", "--only", "version"]) == 2
    assert "-- selfcheck: --only 'version': there is no such row" in capsys.readouterr().err


def test_requeue_is_capped_and_needs_progress(tmp_path: Path) -> None:
    assert decide(restarts=0, limit=3, before=-1, after=4).requeue
    assert not decide(restarts=3, limit=3, before=-1, after=4).requeue
    assert "added no checkpoint" in decide(restarts=1, limit=3, before=4, after=4).reason
    assert decide(restarts=1, limit=3, before=4, after=4, preempted=True).requeue
    assert newest_step(None) == newest_step(tmp_path / "none") == -1
    for name in ("global_step3", "global_step12", "global_step20_hf", ".tmp_global_step30"):
        (tmp_path / name).mkdir()
    assert newest_step(tmp_path) == 12


@pytest.mark.parametrize(("code", "wanted", "calls"), [(85, False, 1), (137, True, 1), (137, False, 0), (0, False, 0)])
def test_a_batch_script_requeues_what_the_head_in_a_container_decided(
    code: int, wanted: bool, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    from openrlhf.launcher.slurm.script import REQUEUE

    verdict = tmp_path / "requeue.7"
    monkeypatch.setenv(VERDICT, str(verdict))
    monkeypatch.setenv("PATH", str(tmp_path))
    if wanted:
        requeue(7)  # `scontrol` is not there yet, as in a container
        assert verdict.exists()
    for name in ("scontrol", "sleep"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "rm").symlink_to("/bin/rm")
    text = f"(exit {code})\n{REQUEUE}\n"
    done = subprocess.run(["/bin/bash", "-c", text], env={**os.environ, "SLURM_JOB_ID": "7"}, check=False, timeout=60)
    said = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert said == ["scontrol requeue 7", "sleep 120"] * calls
    assert done.returncode == code
    assert not verdict.exists()


def test_sweep_combinations() -> None:
    assert combinations(["a.b=1,2", "--c=x"]) == [{"a.b": "1", "c": "x"}, {"a.b": "2", "c": "x"}]
    assert combinations(['a=["1,2","3"]']) == [{"a": "1,2"}, {"a": "3"}]
    flags = run_flags(["--x", "1"], {"a.b": "2"}, Path("/s/run000"))
    assert flags[-2:] == ["--a.b", "2"]
    assert flags[2:6] == ["--ckpt.output_dir", "/s/run000", "--ckpt.path", "/s/run000/checkpoints"]
    with pytest.raises(OptionError, match="--set 'a' is no FLAG=VALUE"):
        combinations(["a"])
