"""The example scripts of RL training in numbers that fit a tiny model on a CPU, for one optimiser step."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
STARTED = ("python3", "torchrun", "openrlhf-launch")
"""The programs that the scripts end with."""
SMALL = {
    "data.max_len": 256,
    "rollout.max_new_tokens": 8,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 4,
    "rollout.vllm_generate_batch_size": 8,
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "train.max_tokens_per_gpu": 1024,
    "reward.overlong_buffer_len": 4,
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "reward.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
}
"""In place of a script's own values, where it has the flag."""

UNEQUAL_REWARDS = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(i % 2) for i in range(len(queries))]}
"""


def one_step(script: Path) -> list[str]:
    """Flags to be given to the script after its own."""
    text = script.read_text(encoding="utf-8")
    ranks = 2 if "--ds.ring_attn_size 2 " in text else 1
    values = {flag: ranks if flag.endswith("num_gpus_per_node") else value for flag, value in SMALL.items()}
    small = [word for flag, value in values.items() if f"--{flag} " in text for word in (f"--{flag}", str(value))]
    if "--algo.dynamic_filtering_enable" in text:  # a random model gets the same score every time
        small += ["--algo.dynamic_filtering_range", "-1", "2"]
    engines = ranks if "--train.colocate_all " in text else 1
    return [*small, "--train.max_steps", "1", "--vllm.num_engines", str(engines)]


def write_inputs(folder: Path) -> dict[str, str]:
    """A reward function, prompts for text models, and a place for the result: the variables of a script."""
    rows = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(8)]
    rows = [row | {"context_messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(UNEQUAL_REWARDS)
    names = {"REWARD": "reward.py", "PROMPTS": "prompts.jsonl", "OUTPUT": "out"}
    return {variable: str(folder / name) for variable, name in names.items()}


def script_calls(folder: Path, extra: Sequence[str] = ()) -> dict[str, list[str]]:
    """What each script calls, by its name: programs in `folder` write down how they were called instead of running."""
    for name in STARTED:
        program = folder / name
        program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    calls = {}
    for script in sorted(SCRIPTS.glob("*.sh")):
        words = ["bash", str(script), *extra]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
        calls[script.stem] = done.stdout.removesuffix("\0").split("\0")
    return calls
