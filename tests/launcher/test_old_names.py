"""Flat flags of earlier releases, and the later spelling of the off-policy correction."""

from __future__ import annotations

import shlex

import pytest

from openrlhf.launcher.commands import COMMANDS, TRAIN_DPO, TRAIN_PPO_RAY, TRAIN_RM, TRAIN_SFT, Command
from openrlhf.launcher.old_names import REMOVED, new_names, rewritten
from openrlhf.launcher.parsing import UsageError, parse
from openrlhf.launcher.words import split_words
from support.launcher_flags import parse_train_ppo

RL = """
pretrain actor.model_name_or_path
reward_pretrain reward.model_name_or_path
critic_pretrain critic.model_name_or_path
remote_rm_url reward.remote_url
attn_implementation ds.attn_implementation
use_liger_kernel ds.use_liger_kernel
load_in_4bit ds.load_in_4bit
packing_samples ds.packing_samples
value_head_prefix ds.value_head_prefix
gradient_checkpointing actor.gradient_checkpointing_enable
gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant
freeze_visual_encoder actor.freeze_visual_encoder
lora_rank ds.lora.rank
lora_alpha ds.lora.alpha
lora_dropout ds.lora.dropout
target_modules ds.lora.target_modules
actor_num_nodes actor.num_nodes
critic_num_nodes critic.num_nodes
ref_num_nodes ref.num_nodes
reward_num_nodes reward.num_nodes
actor_num_gpus_per_node actor.num_gpus_per_node
critic_num_gpus_per_node critic.num_gpus_per_node
ref_num_gpus_per_node ref.num_gpus_per_node
reward_num_gpus_per_node reward.num_gpus_per_node
colocate_actor_ref train.colocate_actor_ref
colocate_critic_reward train.colocate_critic_reward
colocate_all_models train.colocate_all
vllm_num_engines vllm.num_engines
vllm_tensor_parallel_size vllm.tensor_parallel_size
vllm_sync_backend vllm.sync_backend
vllm_sync_with_ray vllm.sync_with_ray
vllm_gpu_memory_utilization vllm.gpu_memory_utilization
vllm_enable_sleep vllm.enable_sleep
enforce_eager vllm.enforce_eager
enable_prefix_caching vllm.enable_prefix_caching
deepspeed_enable_sleep ds.enable_sleep
zero_stage ds.zero_stage
param_dtype ds.param_dtype
adam_offload ds.adam_offload
zpg ds.zpg
overlap_comm ds.overlap_comm
grad_accum_dtype ds.grad_accum_dtype
deepcompile ds.deepcompile
use_universal_ckpt ds.use_universal_ckpt
ds_tensor_parallel_size ds.tensor_parallel_size
ring_attn_size ds.ring_attn_size
ring_head_stride ds.ring_attn_head_stride
temperature rollout.temperature
top_p rollout.top_p
max_new_tokens rollout.max_new_tokens
rollout_batch_size rollout.batch_size
micro_rollout_batch_size rollout.micro_batch_size
n_samples_per_prompt rollout.n_samples_per_prompt
vllm_generate_batch_size rollout.vllm_generate_batch_size
rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu
prompt_data data.prompt_dataset
prompt_data_probs data.prompt_probs
prompt_split data.prompt_split
input_key data.input_key
label_key data.label_key
image_key data.image_key
input_template data.input_template
apply_chat_template data.apply_chat_template
max_len data.max_len
max_samples data.max_samples
max_images_per_prompt data.max_images_per_prompt
dataloader_num_workers data.dataloader_num_workers
disable_fast_tokenizer data.disable_fast_tokenizer
train_batch_size train.batch_size
micro_train_batch_size train.micro_batch_size
train_max_tokens_per_gpu train.max_tokens_per_gpu
max_epochs train.max_epochs
num_episodes train.num_episodes
seed train.seed
full_determinism train.full_determinism_enable
async_train train.async_enable
async_queue_size train.async_queue_size
partial_rollout train.partial_rollout_enable
use_dynamic_batch train.dynamic_batch_enable
enable_ema train.enable_ema
ema_beta train.ema_beta
agent_func_path train.agent_func_path
eval_dataset eval.dataset
eval_split eval.split
eval_steps eval.steps
eval_temperature eval.temperature
eval_n_samples_per_prompt eval.n_samples_per_prompt
save_path ckpt.output_dir
ckpt_path ckpt.path
save_steps ckpt.save_steps
save_hf_ckpt ckpt.save_hf
disable_ds_ckpt ckpt.disable_ds
max_ckpt_num ckpt.max_num
max_ckpt_mem ckpt.max_mem
load_checkpoint ckpt.load_enable
best_metric_key ckpt.best_metric_key
use_wandb logger.wandb.key
wandb_org logger.wandb.org
wandb_group logger.wandb.group
wandb_project logger.wandb.project
wandb_run_name logger.wandb.run_name
use_tensorboard logger.tensorboard_dir
logging_steps logger.logging_steps
advantage_estimator algo.advantage.estimator
gamma algo.advantage.gamma
lambd algo.advantage.lambd
no_advantage_std_norm algo.advantage.no_std_norm
enable_vllm_is_correction algo.advantage.is_correction_enable
vllm_is_correction_type algo.advantage.is_correction_type
vllm_is_truncated_threshold algo.advantage.is_correction_threshold
init_kl_coef algo.kl.init_coef
kl_target algo.kl.target
kl_horizon algo.kl.horizon
kl_estimator algo.kl.estimator
use_kl_loss algo.kl.use_loss
dynamic_filtering algo.dynamic_filtering_enable
dynamic_filtering_reward_range algo.dynamic_filtering_range
eps_clip actor.eps_clip
eps_clip_low_high actor.eps_clip_low_high
dual_clip actor.dual_clip
policy_loss_type actor.policy_loss_type
aux_loss_coef actor.aux_loss_coef
entropy_loss_coef actor.entropy_coef
freezing_actor_steps critic.freezing_steps
value_clip critic.value_clip
save_value_network critic.save_value_network
ref_offload ref.offload
ref_reward_offload reward.offload
normalize_reward reward.normalize_enable
reward_clip_range reward.clip_range
overlong_buffer_len reward.overlong_buffer_len
overlong_penalty_factor reward.overlong_penalty_factor
stop_properly_penalty_coef reward.stop_properly_penalty_coef
actor_learning_rate actor.adam.lr
critic_learning_rate critic.adam.lr
adam_betas actor.adam.betas critic.adam.betas
adam_eps actor.adam.eps critic.adam.eps
l2 actor.adam.weight_decay critic.adam.weight_decay
muon_lr actor.muon.lr critic.muon.lr
muon_momentum actor.muon.momentum critic.muon.momentum
muon_ns_steps actor.muon.ns_steps critic.muon.ns_steps
muon_nesterov actor.muon.nesterov critic.muon.nesterov
no_muon_nesterov actor.muon.no_nesterov critic.muon.no_nesterov
lr_scheduler actor.lr_scheduler critic.lr_scheduler
lr_warmup_ratio actor.lr_warmup_ratio critic.lr_warmup_ratio
min_lr_ratio actor.min_lr_ratio critic.min_lr_ratio
max_norm actor.max_norm critic.max_norm
ref_pretrain ref.model_name_or_path
actor_init_on_gpu
ptx_coef
muon_adam_lr
"""

SUPERVISED = {
    TRAIN_SFT: """
pretrain model.model_name_or_path
dataset data.dataset
dataset_probs data.dataset_probs
dataset_split data.dataset_split
train_split data.dataset_split
output_key data.output_key
multiturn data.multiturn
tokenizer_chat_template data.tokenizer_chat_template
learning_rate adam.lr
adam_betas adam.betas
adam_eps adam.eps
l2 adam.weight_decay
muon_lr muon.lr
muon_momentum muon.momentum
muon_ns_steps muon.ns_steps
muon_nesterov muon.nesterov
no_muon_nesterov muon.no_nesterov
gradient_checkpointing model.gradient_checkpointing_enable
gradient_checkpointing_use_reentrant model.gradient_checkpointing_reentrant
aux_loss_coef model.aux_loss_coef
pretrain_mode model.pretrain_mode_enable
""",
    TRAIN_RM: """
prompt_key data.prompt_key
chosen_key data.chosen_key
rejected_key data.rejected_key
compute_fp32_loss model.compute_fp32_loss_enable
margin_loss model.margin_loss_enable
loss model.loss_type
""",
    TRAIN_DPO: """
ref_pretrain ref.model_name_or_path
ref_offload ref.offload
beta model.beta
ipo model.ipo_enable
label_smoothing model.label_smoothing
nll_loss_coef model.nll_loss_coef
""",
}


def table(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(line.split()[0], tuple(line.split()[1:])) for line in text.strip().splitlines()]


CASES = [(TRAIN_PPO_RAY, old, new) for old, new in table(RL)]
CASES += [(command, old, new) for command, text in SUPERVISED.items() for old, new in table(text)]


@pytest.mark.parametrize(("command", "old", "new"), CASES, ids=lambda x: getattr(x, "name", None))
def test_every_old_name(command: Command, old: str, new: tuple[str, ...]) -> None:
    assert new_names(command, old) == new
    assert all(name in command.flags for name in new)
    with pytest.raises(UsageError) as caught:
        parse(command, [f"--{old}", "x"])
    (message,) = caught.value.problems
    first = message.splitlines()[0]
    if new:
        assert first == f"--{old} is now " + " and ".join(f"--{name}" for name in new)
    else:
        assert first == f"--{old} was removed: {REMOVED[old]}"


def test_the_whole_command_is_rewritten_and_parses() -> None:
    words, _ = split_words(
        shlex.split(
            "--pretrain 'my model' --remote_rm_url f.py --adam_betas 0.9 0.99 --train.seed 3 --ptx_coef 0.1"
            " --input_template 'Q: {}\\nA: ' --reward_clip_range -1 1 --use_kl_loss"
        )
    )
    argv = shlex.split(rewritten(TRAIN_PPO_RAY, words).replace("\\\n", " "))
    assert argv[:3] == ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
    config = parse_train_ppo(argv[3:])
    assert config.actor.model_name_or_path == "my model"
    assert config.critic.adam.betas == config.actor.adam.betas == (0.9, 0.99)
    assert (config.train.seed, config.reward.clip_range) == (3, (-1.0, 1.0))
    assert config.data.input_template == "Q: {}\\nA: "
    assert config.algo.kl.use_loss


def test_secrets_stay_out_of_the_rewritten_command() -> None:
    with pytest.raises(UsageError) as caught:
        parse(TRAIN_PPO_RAY, ["--use_wandb", "s3cret", "--reward.api_key", "s3cret"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_no_todays_flag_counts_as_old(command: Command) -> None:
    for name in command.flags:
        assert name not in REMOVED
        assert new_names(command, name) in ((), (name,))


PREFIX = "--algo.advantage.is_correction_"


@pytest.mark.parametrize(
    ("argv", "kind", "threshold"),
    [
        (["level", "token", "mode", "clip", "threshold", "5"], "tis", (0.0, 5.0)),
        (["level", "token", "threshold", "0.5", "2"], "icepop", (0.5, 2.0)),
        (["level", "seq", "mode", "mask", "gating", "ratio"], "seq-mask-tis", (0.5, 5.0)),
        (["level", "off"], None, (0.5, 5.0)),
    ],
)
def test_later_spelling_of_the_correction(argv: list[str], kind: str | None, threshold: tuple[float, float]) -> None:
    names = {"level", "mode", "gating", "threshold"}
    advantage = parse_train_ppo([PREFIX + a if a in names else a for a in argv]).algo.advantage
    assert advantage.is_correction_enable == (kind is not None)
    assert advantage.is_correction_type == (kind or "tis")
    assert advantage.is_correction_threshold == threshold


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["level", "seq", "gating", "binary_kl"], "'binary_kl' is not built"),
        (["level", "seq", "mode", "clip"], "has no meaning"),
        (["level", "word"], "takes one of off, token, seq, got 'word'"),
        (["level", "token", "enable"], "two spellings of one choice"),
    ],
)
def test_later_spelling_that_means_something_else(argv: list[str], message: str) -> None:
    names = {"level", "mode", "gating", "enable"}
    with pytest.raises(UsageError, match="is_correction") as caught:
        parse_train_ppo([PREFIX + a if a in names else a for a in argv])
    assert message in str(caught.value)
