"""Command lines of earlier releases, in the shapes in which they were written: the answer is a command that parses."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import TRAIN_DPO, TRAIN_PPO_RAY, TRAIN_RM, TRAIN_SFT, Command
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError, parse

MODELS = "--pretrain org/sft --remote_rm_url http://localhost:5000/get_reward --prompt_data org/prompts"
LENGTHS = "--prompt_max_len 1024 --generate_max_len 2048"
SIZES = "--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024"
NODES = "--ref_num_nodes 1 --ref_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8"
CRITIC = "--critic_num_nodes 1 --critic_num_gpus_per_node 8"
ENGINES = "--vllm_num_engines 4 --vllm_tensor_parallel_size 2"
SHARED = f"{NODES} {ENGINES} --colocate_all_models --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep"
RATES = "--actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01"
OLD_STYLE = "--zero_stage 3 --bf16 --flash_attn --adam_offload --gradient_checkpointing --normalize_reward"
DATA = "--input_key context_messages --apply_chat_template --max_samples 100000 --max_epochs 1 --num_episodes 1"
RLVR = "--n_samples_per_prompt 8 --advantage_estimator reinforce_baseline --label_key answer"
SERVER = "--remote_rm_url http://localhost:5000/get_reward"
START = f"{MODELS} {LENGTHS} {SIZES} {DATA} {RATES} {OLD_STYLE}"

RL = {
    "ppo, own GPUs": f"{START} {NODES} {CRITIC} {ENGINES}",
    "ppo, all on the same": f"{START} {SHARED} {CRITIC} --deepspeed_enable_sleep --enforce_eager",
    "ppo, pairs": f"{START} {NODES} {CRITIC} {ENGINES} --colocate_actor_ref --save_value_network",
    "ppo, reward model": f"{START.replace(SERVER, '--reward_pretrain org/rm')}"
    f" {SHARED} {CRITIC} --reward_num_nodes 1 --reward_num_gpus_per_node 8 --ref_reward_offload",
    "ppo, critic's model": f"{START} {SHARED} {CRITIC} --critic_pretrain org/rm --value_head_prefix value_head",
    "ppo, clip": f"{START} {SHARED} {CRITIC} --eps_clip 0.2 --value_clip 0.2 --gamma 1.0 --lambd 0.95 --l2 0.0",
    "ppo, warm-up": f"{START} {SHARED} {CRITIC} --freezing_actor_steps 10 --lr_warmup_ratio 0.03 --max_norm 1.0",
    "reinforce++": f"{START} {SHARED} --advantage_estimator reinforce",
    "reinforce++ baseline": f"{START} {SHARED} {RLVR} --use_kl_loss --kl_estimator k2",
    "rloo": f"{START} {SHARED} --advantage_estimator rloo --n_samples_per_prompt 4",
    "grpo": f"{START} {SHARED} --advantage_estimator group_norm --n_samples_per_prompt 8 --use_kl_loss"
    " --use_kl_estimator_k3",
    "grpo, estimator by name": f"{START} {SHARED} --advantage_estimator group_norm --n_samples_per_prompt 8"
    " --use_kl_loss --kl_estimator k3",
    "dr. grpo": f"{START} {SHARED} --advantage_estimator dr_grpo --n_samples_per_prompt 8 --no_advantage_std_norm",
    "dapo": f"{START} {SHARED} {RLVR} --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0"
    " --eps_clip_low_high 0.2 0.3 --overlong_buffer_len 512 --overlong_penalty_factor 1.0".replace("0.01", "0"),
    "correction": f"{START} {SHARED} {RLVR} --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0",
    "correction, one bound": f"{START} {SHARED} {RLVR} --enable_vllm_is_correction --vllm_is_truncated_threshold 2",
    "correction, other name": f"{START} {SHARED} {RLVR} --vllm_enable_is_correction",
    "icepop": f"{START} {SHARED} {RLVR} --enable_vllm_is_correction --use_icepop",
    "icepop alone": f"{START} {SHARED} {RLVR} --use_icepop",
    "seq-mask-tis": f"{START} {SHARED} {RLVR} --enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
    "gspo": f"{START} {SHARED} {RLVR} --policy_loss_type gspo",
    "reward function": f"{START} {SHARED} {RLVR} --input_template 'Q: {{}}\nA:'".replace(
        "http://localhost:5000/get_reward", "examples/python/reward_func.py"
    ).replace("--apply_chat_template", ""),
    "agent": f"{START.replace(SERVER, '')} {NODES} {ENGINES} {RLVR} --async_train --agent_func_path agent_func.py"
    " --colocate_actor_ref",
    "async": f"{START} {NODES} {ENGINES} {RLVR} --async_train --async_queue_size 2 --partial_rollout",
    "budgets": f"{START} {SHARED} {RLVR} --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu 16192"
    " --rollout_max_tokens_per_gpu 32768",
    "ring": f"{START} {NODES} {CRITIC} {ENGINES} --colocate_actor_ref --packing_samples --ring_attn_size 2"
    " --ring_head_stride 2",
    "weight transfer": f"{START} {NODES} {CRITIC} {ENGINES} --vllm_sync_backend nccl --vllm_sync_with_ray",
    "evaluation": f"{START} {SHARED} {CRITIC} --eval_dataset org/test --eval_split test --eval_steps 10"
    " --eval_temperature 0.6 --eval_n_samples_per_prompt 8",
    "checkpoints": f"{START} {SHARED} {CRITIC} --save_path ./out --ckpt_path ./ckpt --save_steps 20 --load_checkpoint"
    " --save_hf_ckpt --max_ckpt_num 3",
    "logs": f"{START} {SHARED} {CRITIC} --use_wandb TOKEN --wandb_project p --use_tensorboard ./logs --logging_steps 1",
    "pre-training loss": f"{START} {SHARED} {CRITIC} --pretrain_data org/text --pretrain_split train --ptx_coef 0.05",
    "removed": f"{START} {SHARED} {CRITIC} --actor_init_on_gpu --perf --disable_fast_tokenizer --disable_trace_cache",
    "one length": f"{START.replace(LENGTHS, '--generate_max_len 512')} {SHARED} {CRITIC}",
    "the other length": f"{START.replace(LENGTHS, '--prompt_max_len 512')} {SHARED} {CRITIC}",
    "both ways": f"{START} {SHARED} {CRITIC} --max_len 4096",
    "adapters left at zero": f"{START} {SHARED} {CRITIC} --lora_rank 0",
}
SUPERVISED = {
    "sft": (
        TRAIN_SFT,
        "--pretrain m --dataset d --input_key question --output_key response --train_batch_size 256 --max_len 2048"
        " --micro_train_batch_size 2 --max_samples 500000 --save_path ./out --save_steps -1 --logging_steps 1"
        " --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --bf16 --learning_rate 5e-6 --load_checkpoint"
        " --gradient_checkpointing --flash_attn --use_wandb TOKEN",
    ),
    "sft, turns": (TRAIN_SFT, "--pretrain m --dataset d --input_key c --apply_chat_template --multiturn --l2 0.1"),
    "rm": (
        TRAIN_RM,
        "--pretrain m --dataset d --chosen_key chosen --rejected_key rejected --apply_chat_template --max_len 8192"
        " --learning_rate 9e-6 --train_batch_size 256 --zero_stage 3 --margin_loss --value_head_prefix score --bf16",
    ),
    "dpo": (
        TRAIN_DPO,
        "--pretrain m --ref_pretrain r --dataset d --chosen_key chosen --rejected_key rejected --beta 0.1 --ipo"
        " --label_smoothing 0 --nll_loss_coef 0.1 --adam_betas 0.9 0.95 --ref_offload --use_liger_kernel --flash_attn",
    ),
    "dpo, ring": (
        TRAIN_DPO,
        "--pretrain m --dataset d --chosen_key chosen --rejected_key rejected --apply_chat_template --beta 0.1 --bf16"
        " --train_batch_size 256 --micro_train_batch_size 1 --max_len 8192 --zero_stage 3 --learning_rate 5e-7"
        " --ring_attn_size 2 --ring_head_stride 2 --packing_samples --flash_attn --load_checkpoint"
        " --gradient_checkpointing",
    ),
}
CASES = [(name, TRAIN_PPO_RAY, line) for name, line in RL.items()]
CASES += [(name, command, line) for name, (command, line) in SUPERVISED.items()]


def answer(command: Command, words: list[str]) -> str:
    """The command that the message ends with."""
    with pytest.raises(UsageError) as caught:
        parse(command, words)
    _, _, text = str(caught.value).partition("in today's names:\n")
    return text.partition("\nLeft out:")[0].replace("\\\n", " ")


@pytest.mark.parametrize(("name", "command", "line"), CASES, ids=[case[0] for case in CASES])
def test_l09_an_old_command_is_answered_by_one_that_runs(name: str, command: Command, line: str) -> None:
    argv = shlex.split(answer(command, shlex.split(line)))
    assert argv[:3] == ["python3", "-m", f"openrlhf.cli.{command.name}"]
    prepare(command, argv[3:], Machine(gpus=8, nodes=None))


def test_l09_enough_shapes() -> None:
    assert len(CASES) >= 30


def rewritten(line: str) -> str:
    return answer(TRAIN_PPO_RAY, shlex.split(line, posix=True))


@pytest.mark.parametrize(
    ("old", "max_len", "new_tokens"),
    [
        (LENGTHS, 3072, 2048),
        ("--generate_max_len 512", 1536, 512),
        ("--prompt_max_len 512", 1536, 1024),
        (f"{LENGTHS} --max_len 4096", 4096, 2048),
    ],
)
def test_l09_lengths_are_one_sum(old: str, max_len: int, new_tokens: int) -> None:
    config = parse(TRAIN_PPO_RAY, shlex.split(rewritten(old))[3:]).config
    assert (config.data.max_len, config.rollout.max_new_tokens) == (max_len, new_tokens)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--use_kl_estimator_k3", {"estimator": "k3"}),
        ("--kl_estimator k3", {"estimator": "k3"}),
        ("--use_icepop", {"enable": True, "type": "icepop"}),
        ("--enable_vllm_is_correction --use_icepop", {"enable": True, "type": "icepop"}),
        ("--vllm_enable_is_correction", {"enable": True, "type": "tis"}),
        ("--vllm_enable_is_correction --vllm_is_truncated_threshold 2", {"enable": True, "threshold": (0.0, 2.0)}),
        ("--vllm_is_truncated_threshold 0.5 2", {"threshold": (0.5, 2.0)}),
    ],
)
def test_l09_switches_that_became_a_value(old: str, new: dict[str, object]) -> None:
    algo = parse(TRAIN_PPO_RAY, shlex.split(rewritten(old))[3:]).config.algo
    correction = {key: getattr(algo.advantage, f"is_correction_{key}") for key in ("enable", "type", "threshold")}
    assert {**correction, "estimator": algo.kl.estimator}.items() >= new.items()


def test_l09_the_message_names_the_sum() -> None:
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, shlex.split(LENGTHS))
    first, second = caught.value.problems
    assert first == (
        "--prompt_max_len is now --data.max_len, which holds prompt and response together: --prompt_max_len plus "
        "--generate_max_len"
    )
    assert second.startswith("--generate_max_len is now --rollout.max_new_tokens, and a part of --data.max_len")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--train.seed", "$((N))"], "$((N))"),
        (["--train.seed", "1", "${ARGS[@]}"], "${ARGS[@]}"),
        (["${ARGS[@]}"], "${ARGS[@]}"),
        (["--ds.packing_samples", "$EXTRA"], "$EXTRA"),
        (["--ckpt.output_dir", "$SAVE/model"], "$SAVE/model"),
        (["--ckpt.output_dir", "./exp/${NAME}"], "./exp/${NAME}"),
        (["--data.prompt_dataset", "$(ls data)"], "$(ls data)"),
        (["--actor.model_name_or_path=$MODEL"], "$MODEL"),
    ],
)
def test_l09_what_the_shell_left_is_named(words: list[str], left: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, words)
    (problem,) = caught.value.problems
    assert f"{left!r} is an expression that the shell did not expand" in problem


@pytest.mark.parametrize("text", ["Cost: $5 {}", "{} ${x}", "costs 3$", "a$b"])
def test_l09_dollars_in_a_template_are_text(text: str) -> None:
    assert parse(TRAIN_PPO_RAY, ["--data.input_template", text]).config.data.input_template == text


def test_l09_expressions_of_the_shell_stay_ones_in_the_answer() -> None:
    line = [
        "--prompt_max_len",
        "$((P * 2))",
        "--generate_max_len",
        "$G",
        "--save_path",
        "$HOME/x y",
        "--pretrain",
        "a b",
    ]
    text = answer(TRAIN_PPO_RAY, line).replace("python3 -m openrlhf.cli.train_ppo_ray", "printf '%s|'")
    done = subprocess.run(
        ["bash", "-c", f"P=100; G=50; {text}"], capture_output=True, text=True, timeout=60, check=True
    )
    words = done.stdout.split("|")
    assert words[words.index("--data.max_len") + 1] == "250"
    assert words[words.index("--rollout.max_new_tokens") + 1] == "50"
    assert words[words.index("--actor.model_name_or_path") + 1] == "a b"
    assert words[words.index("--ckpt.output_dir") + 1].endswith("/x y")
