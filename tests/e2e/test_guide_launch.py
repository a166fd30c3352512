"""The guide's Quick Launch as a Ray job on a Ray that claims 8 GPUs where there is none."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.launcher.ray.setup_commands import DONE_VARIABLE, PLUGINS_VARIABLE
from support.stack_runs import make_workspace
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack"), pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent

# All flags of the guide, with one GPU per role, one engine, and numbers that fit.
QUICK_LAUNCH = """
   --actor.model_name_or_path MODEL
   --reward.remote_url REWARD
   --data.prompt_dataset PROMPTS
   --data.input_key prompt
   --data.label_key label
   --data.apply_chat_template
   --ds.packing_samples

   --ref.num_nodes 1
   --ref.num_gpus_per_node 1
   --actor.num_nodes 1
   --actor.num_gpus_per_node 1
   --vllm.num_engines 1
   --vllm.tensor_parallel_size 1
   --train.colocate_all
   --vllm.gpu_memory_utilization 0.7
   --vllm.enable_sleep
   --ds.enable_sleep
   --vllm.sync_backend nccl
   --vllm.enforce_eager

   --algo.advantage.estimator reinforce_baseline
   --algo.kl.use_loss
   --algo.kl.estimator k2
   --algo.kl.init_coef 1e-5
   --actor.entropy_coef 0.0
   --algo.advantage.is_correction_enable
   --algo.advantage.is_correction_type icepop

   --rollout.batch_size 4
   --rollout.n_samples_per_prompt 4
   --train.batch_size 16
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
   --train.dynamic_batch_enable
   --data.max_len 256
   --rollout.max_new_tokens 32

   --ds.zero_stage 3
   --ds.param_dtype fp32
   --actor.gradient_checkpointing_enable
   --actor.adam.lr 5e-7
   --ckpt.output_dir OUT
"""


# Enough for the command line to be accepted; nothing of it exists.
FLAGS = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "p", "--reward.remote_url", "r.py"]
FLAGS += ["--vllm.num_engines", "1"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def running_ray() -> Iterator[dict[str, str]]:
    """A Ray with 8 claimed GPUs in a folder of its own; its environment. Ended by the pids that carry its folder."""
    folder = tempfile.mkdtemp(prefix="rh", dir="/tmp")
    port, dashboard = free_ports(2)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_ADDRESS", "RAY_AUTH"))}
    env |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"}
    env[PLUGINS_VARIABLE] = json.dumps([{"class": "openrlhf.launcher.ray.setup_commands.SetupCommands"}])
    start = f"""{BIN}/ray start --head --num-gpus 8 --num-cpus 16 --port {port} --dashboard-port {dashboard}
      --dashboard-agent-listen-port 0 --temp-dir {folder}/ray --object-store-memory 300000000 --disable-usage-stats"""
    subprocess.run(shlex.split(start), env=env, check=True, capture_output=True, timeout=300)
    yield env | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}", "GCS": f"127.0.0.1:{port}"}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"RAY_TMPDIR={folder}".encode() in _environment(entry):
            os.kill(int(entry.name), 9)
    shutil.rmtree(folder, ignore_errors=True)


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def test_quick_launch_as_a_ray_job(running_ray: dict[str, str], tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"), prompts=8)
    places = {"MODEL": workspace.model, "REWARD": "reward.py"}  # relative to the job's working_dir
    places |= {"PROMPTS": "prompts.jsonl", "OUT": str(tmp_path / "out")}
    flags = [places.get(word, word) for word in QUICK_LAUNCH.split()]
    shutil.copy(Path(__file__).parents[2] / "examples" / "python" / "logger.py", workspace.path)
    flags += ["--logger.path", "logger.py:CsvLogger"]
    flags += ["--eval.at_start", "--eval.dataset", "prompts.jsonl", "--eval.steps", "2"]
    commands = [f"sleep 1; echo $PWD >> {tmp_path}/set_up", "touch made_by_setup_commands"]
    runtime_env = json.dumps({"working_dir": str(workspace.path), "setup_commands": commands})
    submit = [f"{BIN}/ray", "job", "submit", "--runtime-env-json", runtime_env, "--"]
    submit += [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags]
    done = subprocess.run(submit, env=running_ray, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "step 2 " in done.stdout
    assert re.findall(r"^eval at step (\d+)", done.stdout, re.MULTILINE) == ["0", "2"]
    for option in ("vllm.sync_backend", "vllm.enable_sleep", "ds.enable_sleep", "train.colocate_all"):
        assert f"no GPU: --{option} " in done.stdout
    for option in ("vllm.gpu_memory_utilization", "vllm.enforce_eager"):
        assert f"no GPU: --{option} " in done.stdout
    assert "Started a local Ray" not in done.stdout
    (unpacked,) = (tmp_path / "set_up").read_text().split()  # once, for the driver and all workers
    assert (Path(unpacked) / "made_by_setup_commands").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    logged = [line.split(",")[0] for line in (tmp_path / "out" / "rewards.csv").read_text().splitlines()]
    assert logged == ["step", "1", "2"]


def test_setup_commands_that_nobody_ran_are_refused(running_ray: dict[str, str]) -> None:
    submit = [f"{BIN}/ray", "job", "submit", "--runtime-env-json", '{"setup_commands": ["true"]}', "--"]
    without = ["env", "-u", DONE_VARIABLE]  # as in a Ray that was started without the plugin
    submit += [*without, sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *FLAGS]
    done = subprocess.run(submit, env=running_ray, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert '"setup_commands": ...}, which this Ray ignores' in done.stdout
    assert '{"pip": ["PACKAGE"]} or {"uv": ["PACKAGE"]}' in done.stdout


def test_local_joins_the_ray_of_an_address(running_ray: dict[str, str]) -> None:
    local = [f"{BIN}/openrlhf-launch", "local", "--address", running_ray["GCS"], "--", *FLAGS, "--print_config"]
    shown = subprocess.run(local, env=running_ray, capture_output=True, text=True, timeout=200, check=False)
    assert shown.returncode == 0, shown.stderr
    assert 'sync_backend = "gloo"' in shown.stdout  # that Ray's 8 GPUs are claims
