"""Flat flags of earlier releases: what each is called now, and the whole command line rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from openrlhf.launcher.commands import REFUSED, TRAIN_PPO_RAY, Command
from openrlhf.launcher.old_forms import FORMS, in_new_form
from openrlhf.launcher.redaction import redact_value
from openrlhf.launcher.words import Word, quoted

LINE = " \\\n   "


def _same(section: str, names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"{section}.{name}",) for name in names.split()}


def _to(pairs: str) -> dict[str, tuple[str, ...]]:
    """`old new` pairs, one per line; several new names share the old one's values."""
    rows = [line.split() for line in pairs.strip().splitlines()]
    return {row[0]: tuple(row[1:]) for row in rows}


_SHARED = {
    **_same(
        "ds",
        "attn_implementation use_liger_kernel load_in_4bit packing_samples value_head_prefix zero_stage param_dtype"
        " adam_offload zpg overlap_comm grad_accum_dtype deepcompile use_universal_ckpt ring_attn_size",
    ),
    **_same(
        "data",
        "input_key output_key label_key image_key prompt_key chosen_key rejected_key input_template"
        " apply_chat_template tokenizer_chat_template max_len max_samples multiturn max_images_per_prompt"
        " dataloader_num_workers disable_fast_tokenizer dataset dataset_probs dataset_split",
    ),
    **_same("train", "max_epochs num_episodes seed enable_ema ema_beta"),
    **_same("ckpt", "save_steps best_metric_key"),
    **_same("logger", "logging_steps"),
    **_to("""
    reward_pretrain reward.model_name_or_path
    ref_pretrain ref.model_name_or_path
    critic_pretrain critic.model_name_or_path
    lora_rank ds.lora.rank
    lora_alpha ds.lora.alpha
    lora_dropout ds.lora.dropout
    target_modules ds.lora.target_modules
    ds_tensor_parallel_size ds.tensor_parallel_size
    ring_head_stride ds.ring_attn_head_stride
    head_prefix ds.value_head_prefix
    train_split data.dataset_split
    train_batch_size train.batch_size
    micro_train_batch_size train.micro_batch_size
    full_determinism train.full_determinism_enable
    eval_dataset eval.dataset
    eval_split eval.split
    eval_steps eval.steps
    save_path ckpt.output_dir
    ckpt_path ckpt.path
    save_hf_ckpt ckpt.save_hf
    disable_ds_ckpt ckpt.disable_ds
    max_ckpt_num ckpt.max_num
    max_ckpt_mem ckpt.max_mem
    load_checkpoint ckpt.load_enable
    use_wandb logger.wandb.key
    wandb_org logger.wandb.org
    wandb_group logger.wandb.group
    wandb_project logger.wandb.project
    wandb_run_name logger.wandb.run_name
    use_tensorboard logger.tensorboard_dir
    normalize_reward reward.normalize_enable
    """),
}

_RL = {
    **_same("critic", "value_clip save_value_network"),
    **_same(
        "actor",
        "freeze_visual_encoder eps_clip eps_clip_low_high dual_clip policy_loss_type aux_loss_coef",
    ),
    **_same("reward", "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef"),
    **_same("rollout", "temperature top_p max_new_tokens n_samples_per_prompt vllm_generate_batch_size"),
    **_same("vllm", "enforce_eager enable_prefix_caching"),
    **_same("train", "colocate_actor_ref colocate_critic_reward async_queue_size agent_func_path"),
    **_same("algo.advantage", "gamma lambd"),
    **{
        f"{role}_{what}": (f"{role}.{what}",)
        for role in ("actor", "critic", "ref", "reward")
        for what in ("num_nodes", "num_gpus_per_node")
    },
    **{
        f"vllm_{name}": (f"vllm.{name}",)
        for name in (
            "num_engines",
            "tensor_parallel_size",
            "sync_backend",
            "sync_with_ray",
            "gpu_memory_utilization",
            "enable_sleep",
        )
    },
    **{
        old: (f"actor.{new}", f"critic.{new}")
        for old, new in (
            ("adam_betas", "adam.betas"),
            ("adam_eps", "adam.eps"),
            ("l2", "adam.weight_decay"),
            ("muon_lr", "muon.lr"),
            ("muon_momentum", "muon.momentum"),
            ("muon_ns_steps", "muon.ns_steps"),
            ("muon_nesterov", "muon.nesterov"),
            ("no_muon_nesterov", "muon.no_nesterov"),
            ("lr_scheduler", "lr_scheduler"),
            ("lr_warmup_ratio", "lr_warmup_ratio"),
            ("min_lr_ratio", "min_lr_ratio"),
            ("max_norm", "max_norm"),
        )
    },
    **_to("""
    pretrain actor.model_name_or_path
    ref_pretrain ref.model_name_or_path
    remote_rm_url reward.remote_url
    gradient_checkpointing actor.gradient_checkpointing_enable
    gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant
    colocate_all_models train.colocate_all
    deepspeed_enable_sleep ds.enable_sleep
    rollout_batch_size rollout.batch_size
    micro_rollout_batch_size rollout.micro_batch_size
    rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu
    train_max_tokens_per_gpu train.max_tokens_per_gpu
    prompt_data data.prompt_dataset
    prompt_data_probs data.prompt_probs
    prompt_split data.prompt_split
    async_train train.async_enable
    partial_rollout train.partial_rollout_enable
    use_dynamic_batch train.dynamic_batch_enable
    eval_temperature eval.temperature
    eval_n_samples_per_prompt eval.n_samples_per_prompt
    advantage_estimator algo.advantage.estimator
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
    entropy_loss_coef actor.entropy_coef
    freezing_actor_steps critic.freezing_steps
    ref_offload ref.offload
    ref_reward_offload reward.offload
    reward_clip_range reward.clip_range
    learning_rate actor.adam.lr
    actor_learning_rate actor.adam.lr
    critic_learning_rate critic.adam.lr
    """),
}

_SUPERVISED = {
    **_same("model", "beta label_smoothing nll_loss_coef aux_loss_coef"),
    **_to("""
    pretrain model.model_name_or_path
    gradient_checkpointing model.gradient_checkpointing_enable
    gradient_checkpointing_use_reentrant model.gradient_checkpointing_reentrant
    ref_offload ref.offload
    learning_rate adam.lr
    adam_betas adam.betas
    adam_eps adam.eps
    l2 adam.weight_decay
    muon_lr muon.lr
    muon_momentum muon.momentum
    muon_ns_steps muon.ns_steps
    muon_nesterov muon.nesterov
    no_muon_nesterov muon.no_nesterov
    ipo model.ipo_enable
    compute_fp32_loss model.compute_fp32_loss_enable
    margin_loss model.margin_loss_enable
    loss model.loss_type
    pretrain_mode model.pretrain_mode_enable
    """),
}

REMOVED = {
    "actor_init_on_gpu": "models are always loaded where they run",
    "ptx_coef": "mixing a pre-training loss into RL is no longer offered",
    "pretrain_data": "mixing a pre-training loss into RL is no longer offered",
    "pretrain_data_probs": "mixing a pre-training loss into RL is no longer offered",
    "pretrain_split": "mixing a pre-training loss into RL is no longer offered",
    "disable_trace_cache": "it has no effect any more",
    "perf": "timings are always logged as timing/*",
    "muon_adam_lr": "the learning rate of Muon's auxiliary Adam group is --actor.adam.lr (supervised: --adam.lr)",
    "bf16": "bf16 is the default on GPUs; --ds.param_dtype chooses",
    "flash_attn": "flash attention is the default on GPUs; --ds.attn_implementation chooses",
}
"""Old flags without a successor, and why (or what to write instead)."""


NO_USE = frozenset({"vllm.sync_with_ray", "data.disable_fast_tokenizer"})
"""Switches that are refused, and that the rewritten command can do without."""


def new_names(command: Command, name: str) -> tuple[str, ...]:
    """What the old flag is called now in this command: several names share its values. Empty: it has no successor."""
    table = _RL if command is TRAIN_PPO_RAY else _SUPERVISED
    found = table.get(name) or _SHARED.get(name, ())
    return tuple(new for new in found if new in command.flags)


def new_form(command: Command, name: str) -> str:
    """What an old flag is now that became more than another name; empty for any other."""
    return FORMS.get(name, "") if command is TRAIN_PPO_RAY and name not in command.flags else ""


def is_old_name(command: Command, name: str) -> bool:
    """Whether an earlier release of this command knew the flag."""
    if name in command.flags:
        return False
    return bool(new_form(command, name) or new_names(command, name)) or name in REMOVED


def became(command: Command, name: str, dashes: str = "--") -> str:
    """`is now ...` or `was removed: ...`, for an old flag."""
    if form := new_form(command, name):
        return f"is now {form}"
    if new := new_names(command, name):
        return "is now " + " and ".join(f"{dashes}{n}" for n in new)
    return f"was removed: {REMOVED[name]}"


def old_name_problems(command: Command, words: Sequence[Word]) -> list[str]:
    """One message per old flag, and after them the whole command line in today's names."""
    old = dict.fromkeys(w.name for w in words if is_old_name(command, w.name))
    problems = [f"--{name} {became(command, name)}" for name in old]
    if problems:
        problems[-1] += "\nThe whole command in today's names:\n" + rewritten(command, words)
        for flag in sorted({new for name in old for new in new_names(command, name)} & NO_USE):
            problems[-1] += f"\nLeft out: --{flag}, {REFUSED[flag][1]}"
    return problems


def rewritten(command: Command, words: Sequence[Word]) -> str:
    """The command line with every old flag under its new name, quoted for a shell; secrets are masked."""
    lines = [command.program]
    for word in in_new_form(words) if command is TRAIN_PPO_RAY else words:
        names = (word.name,)
        if is_old_name(command, word.name):
            names = tuple(new for new in new_names(command, word.name) if new not in NO_USE)
        lines += [_quoted(command, name, word.values) for name in names]
    return LINE.join(lines)


def _quoted(command: Command, name: str, values: Sequence[str]) -> str:
    near = [] if name in command.flags else get_close_matches(name, list(command.flags), n=3, cutoff=0.6)
    meant = next((other for other in near if command.flags[other].secret), name)
    return " ".join([f"--{name}", *(quoted(redact_value(meant, value)) for value in values)])


def all_old_names(command: Command) -> list[str]:
    """Every old name of a command."""
    table = {**_SHARED, **(_RL if command is TRAIN_PPO_RAY else _SUPERVISED), **FORMS, **dict.fromkeys(REMOVED, ())}
    return sorted(name for name in table if is_old_name(command, name))
