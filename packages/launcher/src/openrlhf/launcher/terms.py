"""What the packages below call their parameters, and the flags that users set them by.

A message of core, learner, rollout or agents names a parameter in that package's own terms, between backquotes; the
launcher shows the flag in its place wherever such a message reaches the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_SAME = """
agent.client_sampling agent.max_concurrency agent.max_turns agent.num_workers agent.reasoning_parser agent.timeout
agent.tool_parser ds.attn_implementation
ds.backend ds.deepcompile ds.lora.dropout
ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha ds.lora.dora ds.lora.rank ds.lora.rslora
ds.lora.save_merged ds.lora.target_modules ds.packing_samples ds.param_dtype
ds.ring_attn_head_stride ds.ring_attn_size ds.tensor_parallel_size ds.use_liger_kernel
ds.use_universal_ckpt ds.value_head_prefix ds.zero_stage ds.zpg
reward.max_memory_gib reward.processes reward.timeout
"""
"""Parameters that are called as their flags are."""

_OTHERS = """
advantage.estimator algo.advantage.estimator
advantage.gamma algo.advantage.gamma
advantage.is_correction_enable algo.advantage.is_correction_enable
advantage.is_correction_threshold algo.advantage.is_correction_threshold
advantage.is_correction_type algo.advantage.is_correction_type
distill.divergence algo.distill.divergence
distill.jsd_beta algo.distill.jsd_beta
distill.top_k algo.distill.top_k
kl.estimator algo.kl.estimator
kl.init_coef algo.kl.init_coef
kl.target algo.kl.target
kl.horizon algo.kl.horizon
policy_loss_type actor.policy_loss_type
loss_agg_mode actor.loss_agg_mode
eps_clip actor.eps_clip
eps_clip_low_high actor.eps_clip_low_high
dual_clip actor.dual_clip
cispo_max_ratio actor.cispo_max_ratio
sapo_tau actor.sapo_tau
dppo_tv_delta actor.dppo_tv_delta
dppo_kl_delta actor.dppo_kl_delta
drpo_delta actor.drpo_delta
vespo_k actor.vespo_k
vespo_lambda actor.vespo_lambda
normalize_enable reward.normalize_enable
clip_range reward.clip_range
overlong_buffer_len reward.overlong_buffer_len
stop_properly_penalty_coef reward.stop_properly_penalty_coef
value_clip critic.value_clip
temperature rollout.temperature
top_p rollout.top_p
min_p rollout.min_p
beta model.beta
label_smoothing model.label_smoothing
ipo model.ipo_enable
margin model.margin_loss_enable
loss_type model.loss_type
optim.optim *.optim
optim.muon.ns_steps *.muon.ns_steps
optim.muon.nesterov *.muon.no_nesterov
optim.lr_scheduler *.lr_scheduler
model.gradient_checkpointing_reentrant *.gradient_checkpointing_reentrant
aux_loss_coef *.aux_loss_coef
model_path *.model_name_or_path
follow_alpha ref.sync_alpha
freeze_visual_encoder actor.freeze_visual_encoder
batch.dynamic_batch_enable train.dynamic_batch_enable
batch.enable_ema train.enable_ema
batch.ema_beta train.ema_beta
batch.max_skipped_steps train.max_skipped_steps
batch.share_prompt train.share_prompt
store.max_num ckpt.max_num
store.path ckpt.path
store.resume ckpt.load_enable
store.export ckpt.save_hf
bucket_bytes vllm.sync_bucket_mb
engine.model actor.model_name_or_path
engine.dtype vllm.dtype
engine.tensor_parallel_size vllm.tensor_parallel_size
engine.enforce_eager vllm.enforce_eager
engine.gpu_memory_utilization vllm.gpu_memory_utilization
engine.enable_prefix_caching vllm.enable_prefix_caching
engine.enable_sleep vllm.enable_sleep
engine.max_model_len data.max_len
engine.seed train.seed
engine.sync_backend vllm.sync_backend
engine.engine_args vllm.engine_args
sync_tolerance vllm.sync_tolerance
lora_push vllm.lora_push
max_failed_fraction rollout.max_failed_fraction
agent_file train.agent_func_path
reward_file reward.remote_url
reward_model reward.model_name_or_path
extra_keys data.extra_keys
max_length data.max_len
max_new_tokens rollout.max_new_tokens
overlong data.overlong_prompts
"""
"""A parameter and its flag, a line each. `*` stands for the section of a role or trainer."""

FLAGS: dict[str, str] = {name: name for name in _SAME.split()}
for _line in _OTHERS.strip().splitlines():
    _name, FLAGS[_name] = _line.split()
"""Parameter of a package -> flag, without its dashes."""

_TERM = re.compile(r"`([a-z_0-9.]+)`")


def with_flags(message: str, sections: Mapping[str, str] = MappingProxyType({})) -> str:
    """The message with flags in the place of the packages' own terms.

    sections: how a parameter begins (`optim.`) -> the section of its flag (`actor.`), where that is known.
    """

    def flag(match: re.Match[str]) -> str:
        term = match[1]
        if term not in FLAGS:
            return match[0]
        section = next((place for own, place in sections.items() if term.startswith(own)), "*.")
        return "--" + FLAGS[term].replace("*.", section)

    return _TERM.sub(flag, message)
