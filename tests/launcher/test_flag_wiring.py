"""Every flag reaches the part that honours it, and names the test that shows what it changes there.

`flags/effects.tsv` has one row per flag of RL training: the test, or `refused` for what
`unsupported.py` refuses. That a value arrives somewhere (the first test here) is no effect.
"""

from __future__ import annotations

import ast
import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.commands import REFUSED as UNSUPPORTED
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import Flag, build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.placement import plan_placement
from openrlhf.launcher.preflight import Prepared
from openrlhf.launcher.ranks.config import rank_config
from openrlhf.launcher.ray.start import agent_spec, engine_specs, learner_spec
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.trainer.pipeline import group_rules
from openrlhf.learner.spec import Role

TESTS = Path(__file__).parents[1]
REFUSED = "refused"

CONTROLLER = re.compile(
    r"train\.(num_episodes|max_steps|agent_func_path|async_queue_size|max_staleness|partial_.*)|critic\.(freezing_steps|save_value_network)|agent\.num_workers"
    r"|data\.(?!max_len|overlong|disable|max_images).*|(eval|ckpt|logger)\..*|vllm\.sync_(tolerance|bucket_mb)"
    r"|ref\.api_key|algo\.kl\.(target|horizon)|reward\.(?!num_|offload|timeout|api_key|processes|max_memory|choose_by).*|judge\..*"
)
"""Flags that the controller itself honours; all others must change what some worker is started with."""

BASE = {
    "actor.model_name_or_path": "A",
    "critic.model_name_or_path": "C",
    "reward.model_name_or_path": "R",
    "data.prompt_dataset": "D",
    "vllm.num_engines": 1,
    "algo.dynamic_filtering_enable": True,
    "ref.sync_steps": 2,
}
OTHER: dict[str, Any] = {
    "vllm.engine_args": '{"max_num_seqs": 8}',
    "vllm.dtype": "bfloat16",
    "ds.param_dtype": "bf16",
    "algo.dynamic_filtering_enable": False,
    "algo.kl.init_coef": 0.0,
    "ref.sync_steps": 0,
    "vllm.sync_backend": "ipc",
}
"""Values that differ from the default and mean something."""

GPU_ONLY = {
    "ref.offload",
    "reward.offload",
    "ds.enable_sleep",
    "vllm.enforce_eager",
    "vllm.gpu_memory_utilization",
    "vllm.sync_backend",
    "vllm.enable_sleep",
    "train.colocate_all",
    "train.colocate_actor_ref",
    "train.colocate_critic_reward",
    "ds.adam_offload",
}


def another(flag: Flag) -> Any:
    if flag.path in OTHER:
        return OTHER[flag.path]
    if flag.shape.base is bool:
        return not flag.default
    if flag.shape.choices:
        return next(choice for choice in flag.shape.choices if choice not in (flag.default, "auto"))
    one = {int: 3, float: 0.375, str: "another"}[flag.shape.base]
    return one if flag.shape.count == 1 else (one,) * 2


def workers(values: dict[str, Any], gpus: int) -> str:
    """Everything that workers are started with, as text."""
    config, _ = resolve(build(TrainPPOConfig(), BASE | values), Machine(gpus=gpus))
    prepared: Any = Prepared(model_path="A", tokenizer=None, vocab_size=8, hidden_size=8, prompts=None, eval_prompts=[])  # pyright: ignore[reportArgumentType]
    parts = [
        plan_placement(config, gpus=gpus),
        engine_specs(config, gpus=gpus),
        [learner_spec(config, role, 10) for role in Role],
        agent_spec(config, prepared),
        rank_config(config, pad_token_id=0),
        group_rules(config),
        config.algo.kl.init_coef > 0,
    ]
    return repr(parts)


def test_t10_every_sample_stops_where_the_chat_template_ends_a_turn() -> None:
    config, _ = resolve(build(TrainPPOConfig(), BASE), Machine(gpus=8))
    prepared: Any = Prepared(
        model_path="A",
        tokenizer=None,
        vocab_size=8,
        hidden_size=8,
        prompts=None,  # pyright: ignore[reportArgumentType]
        eval_prompts=[],
        stop_token_ids=(5, 7),
    )
    assert agent_spec(config, prepared).settings.sampling.stop_token_ids == (5, 7)


NEEDED: dict[str, dict[str, Any]] = {
    "ds.load_in_4bit": {"ds.lora.rank": 3},
    "ds.ring_attn_head_stride": {"ds.ring_attn_size": 2},
    "vllm.lora_push": {"ds.lora.rank": 3},
}
"""What a flag needs beside it."""


@cache
def plain(gpus: int) -> str:
    return workers({}, gpus)


HONOURED = [f for f in TRAIN_PPO_RAY.flags.values() if not f.off and f.path not in UNSUPPORTED]


@pytest.mark.parametrize("flag", [f for f in HONOURED if not CONTROLLER.fullmatch(f.path)], ids=lambda flag: flag.path)
def test_flag_reaches_a_worker(flag: Flag) -> None:
    gpus = 8 if flag.path in GPU_ONLY else 0
    needed = NEEDED.get(flag.path)
    before = workers(needed, gpus) if needed else plain(gpus)
    assert workers({flag.path: another(flag)} | (needed or {}), gpus) != before


OWNERS = {"critic": Role.CRITIC, "ref": Role.REFERENCE, "reward": Role.REWARD}


def specs(values: dict[str, Any], gpus: int) -> dict[Role, str]:
    """What the ranks of each role are started with, as text."""
    config, _ = resolve(build(TrainPPOConfig(), BASE | values), Machine(gpus=gpus))
    return {role: repr(learner_spec(config, role, 10)) for role in Role}


@pytest.mark.parametrize(
    "flag", [f for f in HONOURED if f.path.partition(".")[0] in OWNERS], ids=lambda flag: flag.path
)
def test_a_flag_of_one_role_changes_no_other(flag: Flag) -> None:
    gpus = 8 if flag.path in GPU_ONLY else 0
    before, after = specs({}, gpus), specs({flag.path: another(flag)}, gpus)
    assert {role for role in Role if before[role] != after[role]} <= {OWNERS[flag.path.partition(".")[0]]}


def effects() -> dict[str, str]:
    with (Path(__file__).parent / "flags" / "effects.tsv").open(newline="", encoding="utf-8") as file:
        return {row["flag"]: row["test"] for row in csv.DictReader(file, delimiter="\t")}


def test_every_flag_has_a_row() -> None:
    assert list(effects()) == [flag.path for flag in TRAIN_PPO_RAY.flags.values() if not flag.off]


CALLED = {
    "ref.sync_alpha": "follow_alpha",
    "actor.lr_warmup_ratio": "warmup=",
    "critic.lr_warmup_ratio": "warmup=",
    "critic.save_value_network": "critic_export",
    "algo.dynamic_filtering_range": "score_range",
    "rollout.n_samples_per_prompt": "n_samples",
    "rollout.micro_batch_size": "fixed_micro_batches",
    "rollout.max_tokens_per_gpu": "token_micro_batches",
    "train.micro_batch_size": "accumulation",
    "train.dynamic_batch_enable": "LAYOUTS",
    "train.max_tokens_per_gpu": "token_micro_batches",
    "train.enable_ema": "averages",
    "train.ema_beta": "averages",
    "train.agent_func_path": "load_executor",
    "train.partial_rollout_recompute_kv": "clear_cache",
    "data.prompt_split": "split=split",
    "judge.max_concurrency": "concurrency",
    "reward.choose_by": "chosen",
    "vllm.lora_push": "lora_rank",
    "vllm.stats_enable": "stats=",
    "vllm.sync_bucket_mb": "bucket_bytes",
    "ds.zero_stage": "STAGES",
    "ds.use_liger_kernel": "apply_liger",
    "ds.enable_sleep": "sleep(",
    "ds.tensor_parallel_size": "shard_layouts",
    "ds.ring_attn_size": "sequence_steps",
    "ds.packing_samples": "packed=True",
    "ds.lora.rslora": "rslora-2",
    "ds.lora.dora": "dora-2",
    "ds.lora.save_merged": "-merged",
    "ds.use_universal_ckpt": "load_at_other_world",
}
"""What a flag is called in the test of the part that honours it, where that is not the last part of its name."""


@pytest.mark.parametrize(("path", "test"), effects().items(), ids=lambda x: x)
def test_the_named_test_speaks_of_the_flag(path: str, test: str) -> None:
    if test == REFUSED:
        assert path in UNSUPPORTED
        return
    file, _, name = test.partition("::")
    assert file != "launcher/test_flag_wiring.py"
    assert name.startswith("test_")
    assert CALLED.get(path, path.rpartition(".")[2]) in source_of(file, name)


@cache
def source_of(file: str, name: str) -> str:
    """A test function's text with that of everything that it uses: fixtures, helpers, constants, tables in support."""
    lines = (TESTS / file).read_text(encoding="utf-8").splitlines()
    tree = ast.parse("\n".join(lines))
    parts = top_level(tree)
    assert isinstance(parts.get(name), ast.FunctionDef | ast.AsyncFunctionDef), f"{file} has no {name}"
    tables = {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("support.")
        for alias in node.names
    }
    found, waiting, imported = set[str](), [name], set[str]()
    while waiting:
        part = waiting.pop()
        if part in tables and part.isupper():
            imported.add(tables[part])
        if part in parts and part not in found:
            found.add(part)
            nodes = list(ast.walk(parts[part]))
            waiting += [node.id for node in nodes if isinstance(node, ast.Name)]
            waiting += [node.arg for node in nodes if isinstance(node, ast.arg)]
    own = ["\n".join(lines[_first_line(parts[part]) - 1 : parts[part].end_lineno]) for part in found]
    return "\n".join([*own, *((TESTS / table).read_text(encoding="utf-8") for table in sorted(imported))])


def top_level(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions, classes and constants of a module by name."""
    parts: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                parts[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                parts[name] = node
            case _:
                pass
    return parts


def _first_line(node: ast.stmt) -> int:
    """Line of a statement's first decorator, if it has one."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])
