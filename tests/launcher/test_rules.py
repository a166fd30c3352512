"""Every rule between flags: the broken case names the flags and the fix, the mended one passes."""

from __future__ import annotations

import shlex

import pytest

from openrlhf.launcher.commands import COMMANDS
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse, parse_train_ppo
from openrlhf.launcher.resolve import resolve, resolve_supervised
from openrlhf.launcher.rules import Violation, check_rules, check_supervised_rules, warnings_of
from openrlhf.launcher.rules.check import RL_RULES, SUPERVISED_RULES
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
    ("--data.prompt_probs x", "data.prompt_probs", "numbers of at least 0", ""),
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
        f"{RLOO} --data.max_images_per_prompt 1 --train.dynamic_batch_enable",
        "train.dynamic_batch_enable",
        "places of their images",
        "",
    ),
    (f"{RLOO} --data.max_images_per_prompt 1 --ds.packing_samples", "ds.packing_samples", "places", ""),
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


PLAIN = "--model.pretrain_mode_enable"
ANSWER = "--data.output_key o"
FOUR_BIT = "--ds.load_in_4bit --ds.lora.rank 8"


@pytest.mark.parametrize(
    ("name", "line", "flag", "words"),
    [
        ("train_sft", f"{PLAIN} --data.multiturn", "data.apply_chat_template", "chat template"),
        (
            "train_sft",
            f"{ANSWER} --data.tokenizer_chat_template t",
            "data.apply_chat_template",
            "not applied",
        ),
        ("train_sft", f"{ANSWER} --data.input_template Q:", "data.input_template", "no place"),
        ("train_sft", f"{ANSWER} --optim muon --ds.adam_offload", "optim", "GPU only"),
        ("train_sft", f"{ANSWER} --muon.no_nesterov --optim muon", "muon.nesterov", "always uses"),
        (
            "train_sft",
            f"{ANSWER} --ds.packing_samples --ds.attn_implementation sdpa",
            "ds.packing_samples",
            "flash",
        ),
        ("train_sft", "--data.input_template {}", "data.output_key", "no field holds the response"),
        ("train_sft", f"{PLAIN} --data.apply_chat_template", "data.apply_chat_template", "as it stands"),
        ("train_sft", f"{PLAIN} --data.input_template Q:{{}}", "data.input_template", "as it stands"),
        ("train_sft", f"{PLAIN} --eval.steps 5", "eval.dataset", "nothing to evaluate on"),
        ("train_sft", f"{PLAIN} --ckpt.save_steps 0", "ckpt.save_steps", "-1 for never"),
        ("train_sft", f"{PLAIN} --ds.lora.alpha 32", "ds.lora.rank", "no adapters"),
        ("train_sft", f"{PLAIN} --ds.lora.rank 8 --ds.lora.dropout 1", "ds.lora.dropout", "[0, 1)"),
        ("train_sft", f"{PLAIN} --ds.lora.rank 8 --ds.lora.alpha 0", "ds.lora.alpha", "at least 1"),
        ("train_rm", "--ds.lora.rank 8 --ds.tensor_parallel_size 2", "ds.tensor_parallel_size", "not cut"),
        ("train_rm", "--ds.load_in_4bit", "ds.lora.rank", "cannot be trained"),
        ("train_rm", f"{FOUR_BIT} --ds.param_dtype fp16", "ds.param_dtype", "bf16"),
        ("train_rm", f"{FOUR_BIT} --ds.zero_stage 3", "ds.zero_stage", "cannot partition"),
        ("train_rm", "--data.input_template Q:{}", "data.prompt_key", "no field holds it"),
        ("train_rm", "--model.margin_loss_enable --model.loss_type logexp", "model.loss_type", "no margin"),
        ("train_rm", "--data.dataset_probs 1,1", "data.dataset_probs", "1 datasets and 2"),
        ("train_dpo", "--model.ipo_enable --model.label_smoothing 0.1", "model.label_smoothing", "no label smoothing"),
        ("train_dpo", "--model.beta 0", "model.beta", "more than 0"),
    ],
)
def test_supervised_rule(name: str, line: str, flag: str, words: str) -> None:
    base = "--model.model_name_or_path A --data.dataset D"
    config = parse(COMMANDS[name], shlex.split(f"{base} {line}")).config
    config, _ = resolve_supervised(config, GPUS, prefix="x")
    (violation,) = check_supervised_rules(config, GPUS)
    assert flag in dict(violation.flags)
    assert words in str(violation)


@pytest.mark.parametrize("rule", [*RL_RULES, *SUPERVISED_RULES, *WARNINGS], ids=lambda rule: rule.__name__)
def test_a_rule_says_what_it_guards(rule: object) -> None:
    assert rule.__doc__
