"""Every command of the user guide parses as it is written there."""

from __future__ import annotations

import shlex

import pytest

from openrlhf.launcher.commands import SERVE_RM, TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rules.check import check_rules
from support.launcher_flags import parse_train_ppo

QUICK_LAUNCH = r"""
   --actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507 \
   --reward.remote_url examples/python/math_reward_func.py \
   --data.prompt_dataset zhuzilin/dapo-math-17k \
   --data.input_key prompt \
   --data.label_key label \
   --data.apply_chat_template \
   --ds.packing_samples \
   \
   --ref.num_nodes 1 \
   --ref.num_gpus_per_node 4 \
   --actor.num_nodes 1 \
   --actor.num_gpus_per_node 4 \
   --vllm.num_engines 2 \
   --vllm.tensor_parallel_size 2 \
   --train.colocate_all \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --vllm.sync_backend nccl \
   --vllm.enforce_eager \
   \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-5 \
   --actor.entropy_coef 0.0 \
   --algo.advantage.is_correction_enable \
   --algo.advantage.is_correction_type icepop \
   \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --train.batch_size 1024 \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0.0 1.0 \
   --train.dynamic_batch_enable \
   --data.max_len 74240 \
   --rollout.max_new_tokens 64000 \
   \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --ckpt.output_dir ./exp/Qwen3-4B-Thinking
"""

AGENT = r"""
   --actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507 \
   --train.agent_func_path /path/to/agent_func.py
"""

VISION = r"""
   --actor.model_name_or_path Qwen/Qwen3.5-2B \
   --reward.remote_url examples/python/math_reward_func.py \
   --data.prompt_dataset hiyouga/geometry3k \
   --data.input_key prompt \
   --data.label_key label \
   --data.image_key images \
   --data.max_images_per_prompt 1 \
   --actor.freeze_visual_encoder \
   --data.max_len 4096 \
   --rollout.max_new_tokens 2048 \
   --algo.advantage.estimator reinforce_baseline \
   --train.colocate_all \
   --vllm.gpu_memory_utilization 0.7 \
   --data.apply_chat_template \
   --ds.attn_implementation eager \
   --ds.param_dtype bf16
"""

FRAGMENTS = {
    "server": "--reward.remote_url http://localhost:5000/get_reward",
    "openai agent": "--train.agent_func_path examples/python/agent_func_openai_server_executor.py",
    "muon": "--actor.optim muon --actor.muon.lr 0.02 --actor.muon.momentum 0.95 --actor.adam.lr 5e-7"
    " --critic.optim adam --critic.adam.lr 9e-6",
    "async": "--train.async_enable --train.partial_rollout_enable",
    "clip": "--actor.eps_clip 0.2 --actor.eps_clip_low_high 0.2 0.27 --actor.dual_clip 3 --actor.policy_loss_type gspo",
    "reward shaping": "--reward.normalize_enable --reward.clip_range -10 10 --reward.overlong_buffer_len 1024"
    " --reward.overlong_penalty_factor 1.0 --reward.stop_properly_penalty_coef -0.5",
    "correction": "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis"
    " --algo.advantage.is_correction_threshold 0.5 5.0",
    "kl": "--algo.kl.init_coef 0.01 --algo.kl.target 6 --algo.kl.horizon 10000 --algo.kl.estimator k3"
    " --algo.kl.use_loss",
    "logging": "--logger.wandb.key token --logger.wandb.project p --logger.wandb.group g --logger.wandb.run_name r"
    " --logger.tensorboard_dir logs --logger.logging_steps 5 --eval.steps 10 --eval.dataset d --train.num_episodes 2",
}

SERVER = r"""
   --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k \
   --port 5000 \
   --ds.param_dtype bf16 \
   --ds.attn_implementation flash_attention_2 \
   --reward.normalize_enable \
   --data.max_len 8192 \
   --batch_size 16
"""


def argv(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


def quick_launch() -> TrainPPOConfig:
    return parse_train_ppo(argv(QUICK_LAUNCH))


@pytest.mark.parametrize("text", [QUICK_LAUNCH, AGENT, VISION, *FRAGMENTS.values()])
def test_training_command_parses(text: str) -> None:
    given = parse(TRAIN_PPO_RAY, argv(text)).given
    assert given == {word[2:] for word in argv(text) if word.startswith("--")}


def test_server_command_parses() -> None:
    config = parse(SERVE_RM, argv(SERVER)).config
    assert (config.port, config.batch_size, config.reward.normalize_enable) == (5000, 16, True)


@pytest.mark.parametrize("gpus", [8, 0])
def test_quick_launch_breaks_no_rule(gpus: int) -> None:
    machine = Machine(gpus=gpus)
    config, _ = resolve(quick_launch(), machine)
    assert check_rules(config, machine) == []


def test_quick_launch_says_what_gpu_options_do_on_a_cpu() -> None:
    config, notes = resolve(quick_launch(), Machine(gpus=0))
    flags = ["enable_sleep", "vllm.enforce_eager", "vllm.enable_sleep", "gpu_memory_utilization", "sync_backend nccl"]
    assert all(any(flag in note for note in notes) for flag in flags)
    assert len(notes) == len(set(notes)) == 6
    assert (config.vllm.sync_backend, config.vllm.enable_sleep, config.ds.enable_sleep) == ("gloo", False, False)
    assert (config.ds.param_dtype, config.vllm.dtype, config.ds.attn_implementation) == ("bf16", "bfloat16", "sdpa")


def test_vision_command_resolves_without_packing() -> None:
    config, _ = resolve(parse_train_ppo(argv(VISION)), Machine(gpus=8))
    assert not config.ds.packing_samples
    assert config.ds.attn_implementation == "eager"
    assert [str(v) for v in check_rules(config, Machine(gpus=8)) if "images" in str(v)] == []
