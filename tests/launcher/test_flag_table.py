"""Every promised flag parses to its type and resolves on 8 GPUs to its default: one row per flag, none skipped."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest

from openrlhf.launcher.commands import COMMANDS
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse
from openrlhf.launcher.resolve import resolve, resolve_serve_rm, resolve_supervised
from support.launcher_flags import COMMANDS as NAMES
from support.launcher_flags import Row, all_rows, rows

COUNTS = {"train_ppo_ray": 164, "train_sft": 77, "train_rm": 79, "train_dpo": 82, "serve_rm": 14, "lora_combiner": 5}
SAMPLES: dict[str, tuple[list[str], Any]] = {
    "int": (["3"], 3),
    "float": (["0.25"], 0.25),
    "float x2": (["0.25", "0.75"], (0.25, 0.75)),
    "str x*": (["q_proj", "v_proj"], ("q_proj", "v_proj")),
    "flag": ([], True),
    "flag(false)": ([], False),
}
REQUIRED = {"lora_combiner": ["--model_path", "a", "--lora_path", "b", "--output_path", "c"]}
NOW = datetime.datetime(2031, 1, 31, 9, 30)
PREFIXES = {"train_ppo_ray": "ppo_", "train_sft": "sft_", "train_rm": "rm_", "train_dpo": "exp_"}


def resolved_defaults(name: str) -> dict[str, Any]:
    config, machine = parse(COMMANDS[name], REQUIRED.get(name, [])).config, Machine(gpus=8)
    if name == "train_ppo_ray":
        config, _ = resolve(config, machine, now=NOW)
    elif name in PREFIXES:
        config, _ = resolve_supervised(config, machine, prefix=PREFIXES[name], now=NOW)
    elif name == "serve_rm":
        config, _ = resolve_serve_rm(config, machine)
    return values_of(config)


DEFAULTS = {name: resolved_defaults(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_complete(name: str) -> None:
    assert len(rows(name)) == COUNTS[name] == len({row.name for row in rows(name)})


@pytest.mark.parametrize("row", all_rows(), ids=str)
def test_flag(row: Row) -> None:
    command = COMMANDS[row.command]
    flag = command.flags[row.name]
    text = flag.shape.choices[-1] if flag.shape.choices else "a text"
    words, expected = SAMPLES.get(row.kind, ([text], text))
    parsed = parse(command, [*REQUIRED.get(row.command, []), f"--{row.name}", *words]).config
    value = values_of(parsed)[flag.path]
    assert (value, type(value)) == (expected, type(expected))
    assert set(row.choices) <= set(flag.shape.choices)
    assert flag.help
    default = DEFAULTS[row.command][flag.path]
    if row.name == "logger.wandb.run_name":
        assert re.fullmatch(row.default.replace("<mmddTHH:MM>", "0131T09:30"), default)
    elif row.name == "ds.lora.target_modules":
        assert default == (row.default,)  # the only one whose default has another shape than its values
    elif flag.required:
        assert row.default is None
    else:
        assert default == row.default
        assert isinstance(default, type(row.default)) or isinstance(row.default, int)


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_outside_the_table_is_a_known_addition(name: str) -> None:
    additions = set(COMMANDS[name].flags) - {row.name for row in rows(name)}
    assert additions == ADDITIONS[name]


SUPERVISED = {
    "data.cache_dir",
    "data.cache_gib",
    "data.dropped_text",
    "ds.backend",
    "ds.lora.dora",
    "ds.lora.rslora",
    "ds.lora.save_merged",
    "logger.comet",
    "logger.mlflow",
    "logger.path",
    "logger.swanlab",
    "logger.trackio",
    "logger.prometheus_host",
    "logger.prometheus_port",
    "train.max_skipped_steps",
    "train.dynamic_batch_enable",
    "train.max_tokens_per_gpu",
    "train.share_prompt",
}
ADDITIONS = {
    "train_ppo_ray": {
        "actor.cispo_max_ratio",
        "actor.clip_cov_range",
        "actor.clip_cov_share",
        "actor.dppo_kl_delta",
        "actor.dppo_tv_delta",
        "actor.drpo_delta",
        "actor.loss_agg_mode",
        "actor.loss_path",
        "actor.sapo_tau",
        "actor.vespo_k",
        "actor.vespo_lambda",
        "algo.advantage.path",
        "algo.turn_gamma",
        "algo.turn_rewards",
        "logger.comet",
        "logger.mlflow",
        "logger.path",
        "logger.swanlab",
        "logger.trackio",
        "logger.prometheus_host",
        "logger.prometheus_port",
        "logger.health",
        "logger.otlp_endpoint",
        "logger.peak_tflops",
        "logger.record_dir",
        "logger.record_max_gib",
        "ref.model_name_or_path",
        "ref.remote_url",
        "ref.api_key",
        "algo.distill.coef",
        "algo.distill.divergence",
        "algo.distill.jsd_beta",
        "algo.distill.reward_coef",
        "algo.distill.top_k",
        "agent.client_sampling",
        "agent.max_concurrency",
        "agent.max_turns",
        "agent.num_workers",
        "agent.reasoning_parser",
        "agent.timeout",
        "agent.tool_parser",
        "critic.gradient_checkpointing_enable",
        "critic.gradient_checkpointing_reentrant",
        "data.dropped_text",
        "data.extra_keys",
        "data.curriculum",
        "data.curriculum_export",
        "data.curriculum_half_life",
        "data.curriculum_pass",
        "data.curriculum_uniform",
        "data.curriculum_window",
        "data.overlong_prompts",
        "eval.at_start",
        "ds.backend",
        "ds.lora.dora",
        "ds.lora.rslora",
        "ds.lora.save_merged",
        "ref.sync_alpha",
        "ref.sync_steps",
        "judge.attempts",
        "judge.max_concurrency",
        "judge.max_len",
        "judge.max_new_tokens",
        "judge.model_name_or_path",
        "judge.num_engines",
        "judge.rubric",
        "judge.temperature",
        "judge.tensor_parallel_size",
        "judge.timeout",
        "judge.unreadable_score",
        "reward.api_key",
        "reward.choose_by",
        "reward.max_memory_gib",
        "reward.processes",
        "reward.timeout",
        "reward.weights",
        "rollout.max_failed_fraction",
        "rollout.min_p",
        "rollout.top_k",
        "train.max_skipped_steps",
        "train.max_staleness",
        "train.max_steps",
        "train.partial_rollout_recompute_kv",
        "train.share_prompt",
        "vllm.dtype",
        "vllm.engine_args",
        "vllm.engine_class",
        "vllm.lora_push",
        "vllm.stats_enable",
        "vllm.sync_bucket_mb",
        "vllm.sync_tolerance",
    },
    "train_sft": SUPERVISED
    | {"ref.model_name_or_path", "ref.offload"}
    | {f"distill.{name}" for name in ("divergence", "coef", "top_k", "jsd_beta", "nll_coef")},
    "train_rm": SUPERVISED,
    "train_dpo": SUPERVISED,
    "serve_rm": {"api_key", "insecure"},
    "lora_combiner": set(),
}
