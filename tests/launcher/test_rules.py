"""Every rule between flags: the broken case names the flags and the fix, the mended one passes."""

from __future__ import annotations

import shlex

import pytest

from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse_train_ppo
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.rules import Violation, check_rules, warnings_of
from openrlhf.launcher.rules.check import RL_RULES
from openrlhf.launcher.rules.ranges import within
from openrlhf.launcher.rules.warnings import WARNINGS

GPUS = Machine(gpus=8, nodes=None)
CPU = Machine(gpus=0)
BASE = (
    "--actor.model_name_or_path A --data.prompt_dataset D --reward.remote_url f.py --vllm.num_engines 1"
    " --rollout.batch_size 128 --rollout.n_samples_per_prompt 1"
)
RLOO = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --rollout.batch_size 32"


def broken(line: str, machine: Machine = GPUS, base: str = BASE) -> list[Violation]:
    config, _ = resolve(parse_train_ppo(shlex.split(f"{base} {line}")), machine)
    return check_rules(config, machine)


def warned(line: str, machine: Machine = GPUS) -> list[str]:
    config, _ = resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), machine)
    return warnings_of(config, machine)


@pytest.mark.parametrize("line", ["", RLOO, f"{RLOO} --train.colocate_all --vllm.num_engines 8"])
@pytest.mark.parametrize("machine", [GPUS, CPU])
def test_a_plain_run_breaks_no_rule(line: str, machine: Machine) -> None:
    if machine is CPU:
        line = line.replace("engines 8", "engines 1")
    assert [str(v) for v in broken(line, machine)] == []


CASES = [
    # (broken, flags that must be named, words of the message, mended)
    # B012
    ("--algo.advantage.estimator rloo", "rollout.n_samples_per_prompt", "compares the samples", RLOO),
    ("--algo.advantage.estimator group_norm", "algo.advantage.estimator", "compares", RLOO),
    ("--algo.advantage.estimator reinforce_baseline", "algo.advantage.estimator", "compares", RLOO),
    ("--algo.advantage.estimator dr_grpo", "algo.advantage.estimator", "compares the samples", RLOO),
    (f"{RLOO} --critic.model_name_or_path C", "critic.model_name_or_path", "only the estimator gae", RLOO),
    (f"{RLOO} --critic.freezing_steps 3", "critic.freezing_steps", "has a critic", "--critic.freezing_steps 3"),
    (f"{RLOO} --critic.save_value_network", "critic.save_value_network", "", "--critic.save_value_network"),
    (f"{RLOO} --algo.advantage.gamma 0.9", "algo.advantage.gamma", "gae and reinforce", "--algo.advantage.gamma 0.9"),
    (
        "--actor.policy_loss_type gspo --actor.loss_agg_mode seq-mean-token-sum-norm",
        "actor.loss_agg_mode",
        "mean per sequence",
        "--actor.policy_loss_type gspo",
    ),
    (
        "--algo.dynamic_filtering_enable",
        "rollout.n_samples_per_prompt",
        "the mean score over a prompt's samples",
        f"--algo.dynamic_filtering_enable {RLOO}",
    ),
    (
        "--algo.dynamic_filtering_range 1 0",
        "algo.dynamic_filtering_range",
        "smaller",
        "--algo.dynamic_filtering_range 0 1",
    ),
    ("--algo.dynamic_filtering_range 1 1", "algo.dynamic_filtering_range", "", "--algo.dynamic_filtering_range 1 2"),
    (
        "--algo.advantage.is_correction_threshold 5 0.5",
        "algo.advantage.is_correction_threshold",
        "first value must be the smaller",
        "--algo.advantage.is_correction_threshold 1 1",
    ),
    ("--reward.clip_range 1 -1", "reward.clip_range", "smaller", "--reward.clip_range -1 1"),
    (
        "--reward.overlong_buffer_len 65 --rollout.max_new_tokens 64",
        "rollout.max_new_tokens",
        "longer than the longest response",
        "--reward.overlong_buffer_len 64 --rollout.max_new_tokens 64",
    ),
    ("--reward.overlong_buffer_len 2049", "data.max_len", "", "--reward.overlong_buffer_len 2048"),
    ("--reward.stop_properly_penalty_coef 1.5", "reward.stop_properly_penalty_coef", "at most 1", ""),
    ("--actor.eps_clip 1.5", "actor.eps_clip", "at most 1", "--actor.eps_clip 1"),
    ("--actor.eps_clip_low_high 1.1 0.2", "actor.eps_clip_low_high", "1 - low", "--actor.eps_clip_low_high 1 0.2"),
    ("--actor.eps_clip_low_high 0.2 -0.1", "actor.eps_clip_low_high", "1 + high", "--actor.eps_clip_low_high 0 0"),
    (
        "--algo.advantage.is_correction_threshold -1 5",
        "algo.advantage.is_correction_threshold",
        "never negative",
        "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0 5",
    ),
    ("--algo.kl.target 0", "algo.kl.target", "more than 0", "--algo.kl.target 6"),
    ("--actor.dual_clip 1", "actor.dual_clip", "more than 1", "--actor.dual_clip 3"),
    ("--algo.kl.init_coef 0 --algo.kl.use_loss", "algo.kl.use_loss", "removes the reference", "--algo.kl.use_loss"),
    ("--algo.kl.init_coef 0 --algo.kl.target 6", "algo.kl.target", "removes the reference", "--algo.kl.target 6"),
    ("--actor.optim muon --ds.adam_offload", "ds.adam_offload", "GPU only", "--actor.optim muon"),
    (
        "--critic.optim muon --ds.adam_offload",
        "critic.optim",
        "GPU only",
        f"{RLOO} --critic.optim muon --ds.adam_offload",
    ),
    (
        "--actor.optim muon --ds.tensor_parallel_size 2",
        "ds.tensor_parallel_size",
        "whole matrices",
        "--actor.optim muon",
    ),
    ("--actor.optim muon --actor.muon.ns_steps 6", "actor.muon.ns_steps", "5 Newton", "--actor.optim muon"),
    ("--actor.optim muon --actor.muon.no_nesterov", "actor.muon.nesterov", "always uses", "--actor.optim muon"),
    ("--train.agent_func_path a.py", "train.agent_func_path", "several sources", ""),
    ("--reward.model_name_or_path R", "reward.remote_url", "several sources", ""),
    (
        "--reward.api_key k",
        "reward.api_key",
        "sent to a reward server",
        "--reward.api_key k --reward.remote_url http://h",
    ),
    ("--data.input_template Q:", "data.input_template", "no place for the prompt", "--data.input_template Q:{}"),
    (
        "--data.input_template Q:{} --data.apply_chat_template",
        "data.apply_chat_template",
        "rendered by one",
        "--data.apply_chat_template",
    ),
    ("--rollout.max_new_tokens 2048", "data.max_len", "no room is left", "--rollout.max_new_tokens 2047"),  # O02
    ("--rollout.max_new_tokens 4096", "rollout.max_new_tokens", "--data.max_len 4097", ""),  # O02
    ("--data.prompt_probs 0.5,0.5", "data.prompt_probs", "1 datasets and 2", "--data.prompt_probs 1"),
    ("--data.prompt_probs x", "data.prompt_probs", "numbers above 0", ""),
    ("--data.prompt_probs nan", "data.prompt_probs", "numbers above 0", ""),
    ("--data.prompt_dataset D,E --data.prompt_probs 0,1", "data.prompt_probs", "numbers above 0", ""),
    (
        "--data.prompt_dataset D,E --data.prompt_probs 1,2",
        "data.prompt_probs",
        "add up to 1",
        "--data.prompt_dataset D,E --data.prompt_probs 0.4,0.6",
    ),
    ("--data.prompt_dataset D,,E", "data.prompt_dataset", "between the commas", "--data.prompt_dataset D,E"),
    ("--reward.remote_url ,", "reward.remote_url", "between the commas", ""),
    ("--data.input_template {}{}", "data.input_template", "several places", "--data.input_template {}"),
    ("--eval.steps 0", "eval.steps", "-1 for never", "--eval.steps -1"),
    ("--ckpt.save_steps -7", "ckpt.save_steps", "-1 for never", "--ckpt.save_steps -1"),
    ("--ckpt.max_num 0", "ckpt.max_num", "at least 1", "--ckpt.max_num 1"),
    ("--actor.adam.betas 0.9 1", "actor.adam.betas", "[0, 1)", "--actor.adam.betas 0 0.999"),
    ("--critic.adam.betas -0.1 0.9", "critic.adam.betas", "[0, 1)", ""),
    ("--actor.optim muon --actor.muon.momentum 1", "actor.muon.momentum", "less than 1", ""),
    ("--actor.muon.momentum -0.1", "actor.muon.momentum", "at least 0", ""),
    ("--actor.lr_scheduler cosin", "actor.lr_scheduler", "one of linear, cosine", "--actor.lr_scheduler cosine"),
    ("--critic.lr_scheduler x", "critic.lr_scheduler", "no such schedule", f"{RLOO} --critic.lr_scheduler x"),
    (
        "--ds.attn_implementation flash",
        "ds.attn_implementation",
        "no such attention",
        "--ds.attn_implementation kernels-community/flash-attn2",
    ),
    ("--ds.grad_accum_dtype int8", "ds.grad_accum_dtype", "one of fp32, bf16, fp16", "--ds.grad_accum_dtype fp32"),
    (
        "--ds.grad_accum_dtype fp32 --ds.zero_stage 0",
        "ds.zero_stage",
        "accumulates in the dtype of the parameters",
        "--ds.grad_accum_dtype bf16 --ds.zero_stage 0",
    ),
    ("--actor.adam.lr inf", "actor.adam.lr", "finite", ""),
    ("--rollout.temperature 1e400", "rollout.temperature", "finite", ""),
    ("--algo.kl.init_coef -inf", "algo.kl.init_coef", "finite", ""),
    ("--actor.eps_clip_low_high 0.2 inf", "actor.eps_clip_low_high", "finite", "--reward.clip_range -inf inf"),
    ("--train.seed 4294967296", "train.seed", "at most 4294967295", "--train.seed 4294967295"),
    (f"--data.max_samples {2**63}", "data.max_samples", "that large", f"--data.max_samples {2**63 - 1}"),
    ("--actor.num_nodes 99999999999", "actor.num_nodes", "at most 65536", ""),
    ("--ckpt.path ''", "ckpt.path", "it is empty", ""),
    ("--logger.wandb.key ' '", "logger.wandb.key", "it is empty", ""),
    ("--ds.value_head_prefix ''", "ds.value_head_prefix", "it is empty", "--ckpt.best_metric_key ''"),
    ("--eval.steps 5", "eval.dataset", "nothing to evaluate on", "--eval.steps 5 --eval.dataset E"),
    (
        "--ckpt.best_metric_key m",
        "eval.steps",
        "never appears",
        "--ckpt.best_metric_key m --eval.steps 5 --eval.dataset E",
    ),
    (
        "--data.max_images_per_prompt 1",
        "algo.advantage.estimator",
        "no images",
        f"{RLOO} --data.max_images_per_prompt 1",
    ),
    (
        f"{RLOO} --data.max_images_per_prompt 1 --ds.packing_samples",
        "ds.packing_samples",
        "places of their images",
        f"{RLOO} --data.max_images_per_prompt 1 --train.dynamic_batch_enable",
    ),
    (f"{RLOO} --data.max_images_per_prompt 1 --ds.use_liger_kernel", "ds.use_liger_kernel", "no images", ""),
    (
        f"{RLOO} --data.max_images_per_prompt 1 --reward.model_name_or_path R",
        "reward.model_name_or_path",
        "reads no images",
        "",
    ),
    (
        "--train.partial_rollout_enable",
        "train.async_enable",
        "only async",
        "--train.async_enable --train.partial_rollout_enable",
    ),
    (
        "--train.async_queue_size 2",
        "train.async_enable",
        "only async",
        "--train.async_enable --train.async_queue_size 2",
    ),
    ("--train.async_queue_size 0 --train.async_enable", "train.async_queue_size", "at least 1", "--train.async_enable"),
    ("--train.max_staleness 2", "train.async_enable", "only async", "--train.async_enable --train.max_staleness 2"),
    ("--train.partial_rollout_recompute_kv", "train.partial_rollout_enable", "outlives a weight push", ""),
    (
        "--rollout.vllm_generate_batch_size 256",
        "train.async_enable",
        "sampling ahead",
        "--rollout.vllm_generate_batch_size 128",
    ),
    (
        "--vllm.enable_sleep",
        "train.colocate_all",
        "nobody to make room",
        f"{RLOO} --vllm.enable_sleep --train.colocate_all --vllm.num_engines 8",
    ),
    ("--vllm.enable_sleep --train.async_enable", "train.async_enable", "never rest", "--train.async_enable"),
    ("--train.full_determinism_enable --train.async_enable", "train.async_enable", "timing", "--train.async_enable"),
    ("--vllm.sync_backend ipc", "vllm.sync_backend", "own GPUs only", "--vllm.sync_backend nccl"),
    ("--vllm.sync_backend gloo", "vllm.sync_backend", "without a GPU", ""),
    (
        "--ds.packing_samples --ds.attn_implementation eager",
        "ds.attn_implementation",
        "only flash attention",
        "--ds.packing_samples",
    ),
    (
        "--ds.tensor_parallel_size 2 --ds.zero_stage 3",
        "ds.zero_stage",
        "cuts the parameters",
        "--ds.tensor_parallel_size 2",
    ),
    ("--ds.tensor_parallel_size 2 --ds.param_dtype fp16", "ds.param_dtype", "in bf16", "--ds.tensor_parallel_size 2"),
    ("--ds.tensor_parallel_size 3", "ds.tensor_parallel_size", "--ds.tensor_parallel_size 2 or 4", ""),
    ("--ds.zpg 4", "ds.zero_stage", "only ZeRO-3", "--ds.zpg 4 --ds.zero_stage 3"),
    ("--ds.zpg 3 --ds.zero_stage 3", "ds.zpg", "--ds.zpg 2 or 4", ""),
    ("--vllm.engine_args x", "vllm.engine_args", "not JSON", "--vllm.engine_args {}"),
    ("--vllm.engine_args 3", "vllm.engine_args", "JSON object", """--vllm.engine_args '{"max_num_seqs": 8}'"""),
    ("""--vllm.engine_args '{"dtype": "half"}'""", "vllm.dtype", "has a flag of its own", ""),
    ("""--vllm.engine_args '{"logprobs_mode": "raw_logprobs"}'""", "vllm.engine_args", "processed log-probs", ""),
    (f"{RLOO} --train.colocate_all --vllm.num_engines 3", "vllm.num_engines", "--vllm.num_engines 8", ""),
    (
        f"{RLOO} --train.colocate_all --vllm.num_engines 8 --ref.num_gpus_per_node 4",
        "ref.num_gpus_per_node",
        "--ref.num_gpus_per_node 8",
        "",
    ),
    (
        "--train.colocate_actor_ref --ref.num_nodes 2",
        "ref.num_nodes",
        "both need the same",
        "--train.colocate_actor_ref",
    ),
    ("--train.colocate_actor_ref --algo.kl.init_coef 0", "train.colocate_actor_ref", "no ref", ""),
    ("--train.colocate_critic_reward", "train.colocate_critic_reward", "no reward", ""),
    ("--actor.num_gpus_per_node 9", "actor.num_gpus_per_node", "8 GPUs", ""),
    ("--rollout.batch_size 7", "rollout.batch_size", "--rollout.batch_size 8 or more", "--rollout.batch_size 8"),
    ("--rollout.micro_batch_size 32", "rollout.micro_batch_size", "16 or less", "--rollout.micro_batch_size 16"),
    ("--actor.adam.lr -1", "actor.adam.lr", "at least 0", "--actor.adam.lr 0"),
    ("--rollout.temperature 0", "rollout.temperature", "more than 0", ""),
    ("--ds.zero_stage 4", "ds.zero_stage", "at most 3", "--ds.zero_stage 3"),
    ("--vllm.tensor_parallel_size 0", "vllm.tensor_parallel_size", "at least 1", ""),
]


@pytest.mark.parametrize(("line", "flag", "words", "mended"), CASES, ids=[c[0].replace("--", "") for c in CASES])
def test_rule(line: str, flag: str, words: str, mended: str) -> None:
    found = [v for v in broken(line) if flag in dict(v.flags)]
    assert found, [str(v) for v in broken(line)]
    assert any(words in str(v) for v in found), [str(v) for v in found]
    assert all(f"--{flag}" in str(v) and ". Fix: " in str(v) for v in found)
    assert [str(v) for v in broken(mended)] == []


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        ("--ds.use_liger_kernel", "ds.use_liger_kernel", "GPU kernels only"),
        ("--ds.param_dtype fp16", "ds.param_dtype", "fp32 or bf16"),
    ],
)
def test_rule_of_a_cpu(line: str, flag: str, words: str) -> None:
    (violation,) = broken(line, CPU)
    assert flag in dict(violation.flags)
    assert words in str(violation)
    assert broken(line) == []


OWN_TESTS = {"required", "one_reward_model", "liger_needs_gpu", "fp16_needs_gpu"}
"""Rules that no line of the table can break: they are about what is missing, or about a CPU."""


def test_every_rule_is_broken_by_a_line_of_the_table() -> None:
    broken_rules: set[str] = set()
    for line, *_ in CASES:
        config, _ = resolve(parse_train_ppo(shlex.split(f"{BASE} {line}")), GPUS)
        broken_rules |= {rule.__name__ for rule in RL_RULES if list(rule(within(config), GPUS))}
    assert {rule.__name__ for rule in RL_RULES} - broken_rules == OWN_TESTS


def test_what_a_run_cannot_do_without() -> None:
    found = broken("", base="")
    flags = [name for v in found for name, _ in v.flags]
    assert "actor.model_name_or_path" in flags
    assert "data.prompt_dataset" in flags
    assert "vllm.num_engines" in flags
    assert "reward.remote_url" in flags


def test_a_filter_needs_scores() -> None:
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R")
    (violation,) = broken(f"{RLOO} --algo.dynamic_filtering_enable", base=base)
    assert "scores come from" in str(violation)


def test_one_reward_model_at_a_time() -> None:
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R,S")
    (violation,) = broken(RLOO, base=base)
    assert "one reward model" in str(violation)


def test_all_violations_at_once() -> None:
    line = "--algo.advantage.estimator rloo --vllm.enable_sleep --actor.dual_clip 0 --eval.steps 3 --ds.zero_stage 9"
    assert len(broken(line)) == 5


@pytest.mark.timeout(20)
def test_huge_numbers_are_answered_at_once() -> None:
    line = "--rollout.batch_size 99999999999999 --train.batch_size 7777777777777 --actor.num_gpus_per_node 65535"
    assert any("the last optimiser step" in text and "even steps" not in text for text in warned(line))
    assert broken(f"{line} --ds.tensor_parallel_size 4 --rollout.n_samples_per_prompt 99999999999999999999")


def test_gpus_of_all_roles_together() -> None:
    machine = Machine(gpus=8, nodes=1)
    (violation,) = broken(RLOO, machine)  # actor 8, reference 8, engine 1
    assert "takes 17 GPUs (actor: 8, ref: 8, engines: 1) and 8 are there" in str(violation)
    assert broken(f"{RLOO} --train.colocate_all --vllm.num_engines 8", machine) == []


def test_evaluation_works_with_every_reward_source() -> None:
    base = BASE.replace("--reward.remote_url f.py", "--reward.model_name_or_path R")
    assert broken(f"{RLOO} --eval.dataset E --eval.steps 5", base=base) == []


@pytest.mark.parametrize(
    ("line", "words", "silent"),
    [
        ("--algo.kl.use_loss", "use k2 or k3", "--algo.kl.use_loss --algo.kl.estimator k3"),
        ("--algo.kl.estimator k3", "without --algo.kl.use_loss", "--algo.kl.estimator k3 --algo.kl.init_coef 0"),
        ("--rollout.top_p 0.9 --algo.advantage.is_correction_enable", "truncated distribution", "--rollout.top_p 0.9"),
        ("--rollout.top_k 5 --algo.advantage.is_correction_enable", "truncated distribution", "--rollout.top_k 5"),
        (r"--data.input_template 'Q:{}\nA:'", "backslash followed by n", "--data.input_template Q:{}"),
        ("--train.colocate_all --train.async_enable", "engines get their own", "--train.async_enable"),
        ("--train.batch_size 100", "--train.batch_size 128", ""),
        ("--train.batch_size 256", "fewer than --train.batch_size 256", ""),
        ("--train.micro_batch_size 3", "--train.batch_size 120 or 144", "--train.micro_batch_size 4"),
        ("--eval.dataset E", "never evaluated", "--eval.dataset E --eval.steps 5"),
        ("--algo.advantage.is_correction_type icepop", "no effect", ""),
        ("--train.ema_beta 0.9", "no effect without --train.enable_ema", "--train.ema_beta 0.9 --train.enable_ema"),
        (f"{RLOO} --critic.adam.lr 1e-5", "no effect without --algo.advantage.estimator gae", "--critic.adam.lr 1e-5"),
        ("--ds.enable_sleep --ds.adam_offload", "in host memory already", "--ds.enable_sleep"),
    ],
)
def test_warning(line: str, words: str, silent: str) -> None:
    assert any(words in text for text in warned(line)), warned(line)
    assert warned(silent) == []


@pytest.mark.parametrize("rule", [*RL_RULES, *WARNINGS], ids=lambda rule: rule.__name__)
def test_a_rule_says_what_it_guards(rule: object) -> None:
    assert rule.__doc__
