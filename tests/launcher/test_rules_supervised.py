"""Every rule of the supervised trainers names the flag and says what is wrong."""

from __future__ import annotations

import shlex

import pytest

from openrlhf.launcher.commands import COMMANDS
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.resolve import resolve_supervised
from openrlhf.launcher.rules.check import SUPERVISED_RULES, check_supervised_rules
from openrlhf.launcher.rules.ranges import within
from openrlhf.launcher.supervised_config import SupervisedConfig

GPUS = Machine(gpus=8)
BASE = "--model.model_name_or_path A --data.dataset D"


def resolved(name: str, line: str) -> SupervisedConfig:
    config = parse(COMMANDS[name], shlex.split(f"{BASE} {line}")).config
    return resolve_supervised(config, GPUS, prefix="x")[0]


PLAIN = "--model.pretrain_mode_enable"
ANSWER = "--data.output_key o"
FOUR_BIT = "--ds.load_in_4bit --ds.lora.rank 8"
RING = "--ds.ring_attn_size 2 --ds.packing_samples"


CASES = [
    ("train_sft", f"{PLAIN} --data.multiturn", "data.apply_chat_template", "chat template"),
    ("train_sft", f"{ANSWER} --distill.divergence jsd", "ref.model_name_or_path", "there is none"),
    ("train_sft", f"{ANSWER} --ref.model_name_or_path T", "distill.divergence", "nothing is learned from a teacher"),
    ("train_sft", f"{ANSWER} --distill.nll_coef 1", "distill.divergence", "nothing is learned from a teacher"),
    (
        "train_sft",
        f"{ANSWER} --data.tokenizer_chat_template t",
        "data.apply_chat_template",
        "not applied",
    ),
    ("train_sft", f"{ANSWER} --data.input_template Q:", "data.input_template", "no place"),
    (
        "train_sft",
        f"{ANSWER} --model.gradient_checkpointing_enable --model.gradient_checkpointing_reentrant"
        " --model.aux_loss_coef 0.1",  # N04
        "model.aux_loss_coef",
        "would not be trained",
    ),
    ("train_sft", f"{ANSWER} --optim muon --ds.adam_offload", "optim", "GPU only"),
    ("train_sft", f"{ANSWER} --ds.backend none_such:build", "ds.backend", "no such function"),
    ("train_sft", f"{ANSWER} --muon.no_nesterov --optim muon", "muon.nesterov", "always uses"),
    (
        "train_sft",
        f"{ANSWER} --ds.packing_samples --ds.attn_implementation sdpa",
        "ds.packing_samples",
        "flash",
    ),
    (
        "train_sft",
        f"{ANSWER} --ds.param_dtype fp32 --ds.attn_implementation flash_attention_2",
        "ds.param_dtype",
        "no fp32 kernel",
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
    ("train_dpo", "--ds.tensor_parallel_size 2 --ds.param_dtype fp16", "ds.param_dtype", "runs in bf16"),
    ("train_dpo", "--ds.tensor_parallel_size 2 --ds.zero_stage 3", "ds.zero_stage", "cuts the parameters already"),
    ("train_dpo", "--ds.ring_attn_size 2", "ds.packing_samples", "packed rows are cut"),
    ("train_rm", f"{RING} --ds.tensor_parallel_size 2", "ds.tensor_parallel_size", "shown to work together"),
    ("train_sft", f"{PLAIN} {RING} --train.share_prompt on", "train.share_prompt", "in whole rows"),
    (
        "train_sft",
        f"{PLAIN} {RING} --distill.divergence reverse --ref.model_name_or_path T",
        "distill.divergence",
        "a teacher tells",
    ),
    ("train_dpo", "--model.beta 0", "model.beta", "more than 0"),
    ("train_dpo", "--lr_scheduler x", "lr_scheduler", "no such schedule"),
    ("train_dpo", "--adam.betas 0.9 1.1", "adam.betas", "[0, 1)"),
    ("train_dpo", "--muon.momentum 1", "muon.momentum", "less than 1"),
    ("train_dpo", "--ds.attn_implementation x", "ds.attn_implementation", "no such attention"),
    ("train_dpo", "--ds.grad_accum_dtype x", "ds.grad_accum_dtype", "no such dtype"),
    ("train_dpo", "--data.dataset ,", "data.dataset", "between the commas"),
    ("train_dpo", "--ckpt.output_dir ''", "ckpt.output_dir", "it is empty"),
]


@pytest.mark.parametrize(("name", "line", "flag", "words"), CASES)
def test_supervised_rule(name: str, line: str, flag: str, words: str) -> None:
    (violation,) = check_supervised_rules(resolved(name, line), GPUS)
    assert flag in dict(violation.flags)
    assert words in str(violation)


OWN_TESTS = {"installed", "required", "liger_needs_gpu", "fp16_needs_gpu"}
"""Rules that no line of the table can break: they are about what is missing, or about a CPU."""


def test_every_rule_is_broken_by_a_line_of_the_table() -> None:
    broken_rules: set[str] = set()
    for name, line, *_ in CASES:
        config = within(resolved(name, line))
        broken_rules |= {rule.__name__ for rule in SUPERVISED_RULES if list(rule(config, GPUS))}
    assert {rule.__name__ for rule in SUPERVISED_RULES} - broken_rules == OWN_TESTS


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("", "model.model_name_or_path"),
        ("", "data.dataset"),
        ("--ds.use_liger_kernel", "ds.use_liger_kernel"),
        ("--ds.param_dtype fp16", "ds.param_dtype"),
        ("--ds.load_in_4bit --ds.lora.rank 8", "ds.load_in_4bit"),
    ],
)
def test_rule_of_an_empty_line_and_of_a_cpu(line: str, flag: str) -> None:
    config, _ = resolve_supervised(parse(COMMANDS["train_dpo"], shlex.split(line)).config, Machine(gpus=0), prefix="x")
    assert flag in [name for v in check_supervised_rules(config, Machine(gpus=0)) for name, _ in v.flags]


@pytest.mark.parametrize("rule", SUPERVISED_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_says_what_it_guards(rule: object) -> None:
    assert rule.__doc__
