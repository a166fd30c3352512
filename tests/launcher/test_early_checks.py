"""First mistakes are told before torch is loaded, engine arguments before any engine is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.data.early import check_at_sight
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.main import main
from openrlhf.launcher.parsing import UsageError
from openrlhf.rollout.vllm import arguments as vllm_arguments
from support.broken_rl_commands import BASE

HEAVY = ("torch", "transformers", "datasets", "vllm", "deepspeed")
PROGRAM = f"""
import contextlib, importlib, io, json, sys
answers = []
for command, words in json.load(sys.stdin):
    main = importlib.import_module(f"openrlhf.cli.{{command}}").main
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    answers.append((status, said.getvalue(), [name for name in {HEAVY} if name in sys.modules]))
print(json.dumps(answers))
"""
"""Runs one command after the other, and says what each answered and what was loaded by then."""
RL = "--vllm.num_engines 1 --rollout.batch_size 8 --rollout.n_samples_per_prompt 1 --algo.advantage.estimator reinforce"
RL += " --actor.model_name_or_path model --reward.remote_url reward.py --data.prompt_dataset rows.jsonl"
SFT = "--model.model_name_or_path model --data.dataset rows.jsonl --data.output_key answer"
PAIRS = "--model.model_name_or_path model --data.dataset rows.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels): ...\n", encoding="utf-8")
    (folder / "table.toml").write_text("[a]\nratio = -1\n", encoding="utf-8")
    (folder / "syntax.py").write_text("def reward_func(queries:\n", encoding="utf-8")
    (folder / "rows.jsonl").write_text(json.dumps({"input": "a", "answer": "b"}) + "\n", encoding="utf-8")
    (folder / "bad.jsonl").write_text("{'input': 'a'}\n", encoding="utf-8")
    (folder / "rows.csv").write_text("question,answer\na,b\n", encoding="utf-8")
    return folder


CASES = [
    ("train_ppo_ray", f"{RL} --actor.model_name_or_path ./none", "--actor.model_name_or_path './none': not found"),
    ("train_ppo_ray", f"{RL} --actor.model_name_or_path adapter", "'adapter' is an adapter, not a model; merge it"),
    ("train_ppo_ray", f"{RL} --data.prompt_dataset none.jsonl", "--data.prompt_dataset: not found: none.jsonl"),
    ("train_ppo_ray", f"{RL} --data.prompt_dataset rows.jsonl,./none", "--data.prompt_dataset: not found: none"),
    ("train_ppo_ray", f"{RL} --data.input_key text", "--data.input_key 'text': rows.jsonl has no such field"),
    ("train_ppo_ray", f"{RL} --data.label_key label", "--data.label_key 'label': rows.jsonl has no such field"),
    ("train_ppo_ray", f"{RL} --data.extra_keys level", "--data.extra_keys 'level': rows.jsonl has no such field"),
    ("train_ppo_ray", f"{RL} --data.prompt_dataset rows.csv", "--data.input_key 'input': rows.csv has no such field"),
    ("train_ppo_ray", f"{RL} --data.prompt_dataset bad.jsonl", "bad.jsonl, line 1: not valid JSON"),
    ("train_ppo_ray", f"{RL} --eval.dataset none.jsonl --eval.steps 1", "--eval.dataset: not found: none.jsonl"),
    ("train_ppo_ray", f"{RL} --reward.remote_url none.py", "none.py"),
    (
        "train_ppo_ray",
        f"{RL} --train.agent_func_path none.toml",
        "--train.agent_func_path: file not found: 'none",
    ),
    ("train_ppo_ray", f"{RL} --train.agent_func_path table.toml", "--train.agent_func_path 'table.toml', [a]: ratio"),
    ("train_ppo_ray", f"{RL} --reward.remote_url syntax.py", "syntax error"),
    ("train_ppo_ray", f"{RL} --ds.packing_samples --reward.remote_url none.py", "none.py"),
    ("train_sft", f"{SFT} --model.model_name_or_path ./none", "--model.model_name_or_path './none': not found"),
    ("train_sft", f"{SFT} --data.dataset none.jsonl", "--data.dataset: not found: none.jsonl"),
    ("train_sft", f"{SFT} --data.output_key response", "--data.output_key 'response': rows.jsonl has no such field"),
    ("train_sft", f"{SFT} --eval.dataset none.jsonl", "--eval.dataset: not found: none.jsonl"),
    ("train_rm", f"{PAIRS} --data.chosen_key good", "--data.chosen_key 'good': rows.jsonl has no such field"),
    ("train_dpo", f"{PAIRS} --data.rejected_key answer", "--data.chosen_key 'chosen': rows.jsonl has no such field"),
    ("train_dpo", f"{PAIRS} --ref.model_name_or_path ./none", "--ref.model_name_or_path './none': not found"),
    ("serve_rm", "--reward.model_name_or_path ./none --port 0", "--reward.model_name_or_path './none': not found"),
    ("lora_combiner", "--model_path ./none --lora_path model --output_path out", "--model_path './none': not found"),
    ("lora_combiner", "--model_path model --lora_path none --output_path out", "--lora_path 'none'"),
]


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[Any]]:
    """(status, stderr, heavy modules loaded by then) of each case, all in one process."""
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "RAY_ADDRESS")}
    asked = json.dumps([(command, line.split()) for command, line, _ in CASES])
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=folder, env=environ, input=asked, stdout=-1, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c}-{m[:40]}" for c, _, m in CASES])
def test_l11_a_first_mistake_is_told_before_torch_is_loaded(number: int, answers: list[list[Any]]) -> None:
    status, said, loaded = answers[number]
    assert CASES[number][2] in said
    assert "Traceback" not in said
    assert "repo" not in said.lower()  # of a registry
    assert (status, loaded) == (1, [])


def test_l11_what_is_right_passes_and_large_files_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    fields = [("--data.input_key", "input"), ("--data.label_key", "answer")]
    check_at_sight("rows.jsonl", fields, split="train", flag="--data.prompt_dataset")
    check_at_sight("org/name,org/name@folder", fields, split="train", flag="--data.prompt_dataset")
    monkeypatch.setattr("openrlhf.launcher.data.early.LARGEST", 1)
    check_at_sight("bad.jsonl", fields, split="train", flag="--data.prompt_dataset")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"max_num_seq": 8}', "vLLM has no engine argument 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ('{"max-num-seqs": 8}', "vLLM has no engine argument 'max-num-seqs'; did you mean 'max_num_seqs'?"),
        ('{"max_num_seqs": "8"}', "'max_num_seqs' takes int, got '8'"),
    ],
)
def test_l07_engine_arguments_are_checked_before_the_start(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"max_num_seqs": frozenset({"int"}), "hf_token": frozenset[str]()}
    monkeypatch.setattr(vllm_arguments, "engine_arguments", lambda: known)
    argv = [*BASE.split(), "--vllm.engine_args", arguments]
    with pytest.raises(UsageError) as caught:
        prepare(TRAIN_PPO_RAY, argv, Machine(gpus=8, nodes=None))
    (problem,) = caught.value.problems
    assert problem.startswith(f"--vllm.engine_args '{arguments}': {words}")
    assert main(["plan", "--gpus", "8", "--", *argv]) == 2
    assert words in capsys.readouterr().err
    prepare(TRAIN_PPO_RAY, [*argv[:-1], '{"max_num_seqs": 8, "hf_token": "x"}'], Machine(gpus=8, nodes=None))
