"""Ranges of single flags, as tables. A flag that a command does not have, or that is None, is skipped."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from openrlhf.launcher.flags import build, values_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.rules.violation import Violation, broken

C = TypeVar("C")


def _table(bound: float, names: str) -> dict[str, float]:
    return dict.fromkeys(names.split(), bound)


AT_LEAST: Mapping[str, float] = {
    **_table(
        1,
        """
        actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node ref.num_nodes
        ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node rollout.batch_size
        rollout.n_samples_per_prompt rollout.vllm_generate_batch_size rollout.micro_batch_size
        rollout.max_tokens_per_gpu rollout.max_new_tokens train.max_epochs train.micro_batch_size train.batch_size
        train.max_tokens_per_gpu train.num_episodes train.max_steps train.async_queue_size train.max_skipped_steps
        judge.attempts judge.max_concurrency judge.max_len judge.max_new_tokens judge.num_engines
        judge.tensor_parallel_size
        data.max_len data.max_samples eval.n_samples_per_prompt logger.logging_steps vllm.num_engines
        vllm.tensor_parallel_size vllm.sync_bucket_mb ds.tensor_parallel_size ds.ring_attn_size
        ds.ring_attn_head_stride ds.zpg algo.kl.horizon batch_size ckpt.max_num
        """,
    ),
    **_table(
        0,
        """
        actor.adam.lr critic.adam.lr adam.lr actor.muon.lr critic.muon.lr muon.lr actor.adam.weight_decay
        critic.adam.weight_decay adam.weight_decay actor.max_norm critic.max_norm max_norm actor.aux_loss_coef
        model.aux_loss_coef actor.entropy_coef algo.kl.init_coef reward.overlong_buffer_len
        reward.overlong_penalty_factor train.max_staleness data.max_images_per_prompt data.dataloader_num_workers
        train.seed ds.lora.rank model.nll_loss_coef eval.temperature actor.lr_warmup_ratio critic.lr_warmup_ratio
        lr_warmup_ratio actor.min_lr_ratio critic.min_lr_ratio min_lr_ratio algo.advantage.gamma
        algo.advantage.lambd algo.turn_gamma rollout.min_p train.ema_beta rollout.max_failed_fraction ds.zero_stage
        data.curriculum_window
        model.label_smoothing port actor.muon.momentum critic.muon.momentum muon.momentum
        algo.distill.coef algo.distill.top_k distill.coef distill.top_k distill.nll_coef ref.sync_steps
        judge.temperature data.cache_gib
        """,
    ),
    **_table(-1, "critic.freezing_steps rollout.top_k"),
}

MORE_THAN: Mapping[str, float] = {
    **_table(1, "actor.dual_clip"),
    **_table(
        0,
        """
        actor.eps_clip critic.value_clip actor.adam.eps critic.adam.eps adam.eps rollout.temperature
        actor.cispo_max_ratio actor.dppo_tv_delta actor.dppo_kl_delta actor.drpo_delta actor.sapo_tau actor.vespo_k
        actor.vespo_lambda actor.clip_cov_share vllm.sync_tolerance algo.kl.target ckpt.max_mem model.beta rollout.top_p
        vllm.gpu_memory_utilization algo.distill.jsd_beta distill.jsd_beta ref.sync_alpha data.curriculum_uniform
        data.curriculum_half_life judge.timeout
        """,
    ),
}

AT_MOST: Mapping[str, float] = {
    **_table(
        1,
        """
        actor.lr_warmup_ratio critic.lr_warmup_ratio lr_warmup_ratio actor.min_lr_ratio critic.min_lr_ratio
        min_lr_ratio algo.advantage.gamma algo.advantage.lambd algo.turn_gamma rollout.top_p rollout.min_p
        train.ema_beta actor.eps_clip actor.clip_cov_share rollout.max_failed_fraction vllm.gpu_memory_utilization
        reward.stop_properly_penalty_coef data.curriculum_window data.curriculum_uniform
        """,
    ),
    **_table(3, "ds.zero_stage"),
    **_table(0.5, "model.label_smoothing"),
    **_table(65535, "port"),
    **_table(2**32 - 1, "train.seed"),
    **_table(
        2**16,
        """
        actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node ref.num_nodes
        ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size
        ds.tensor_parallel_size ds.zpg
        """,
    ),
}

LESS_THAN: Mapping[str, float] = _table(
    1, "actor.muon.momentum critic.muon.momentum muon.momentum algo.distill.jsd_beta distill.jsd_beta"
)

LARGEST = 2**63 - 1
"""Of whole numbers without a bound of their own: what an int64 holds."""

ENDLESS = frozenset(
    {
        "ckpt.max_mem",
        "reward.clip_range",
        "actor.clip_cov_range",
        "algo.dynamic_filtering_range",
        "algo.advantage.is_correction_threshold",
    }
)
"""Numbers for which infinity has a meaning: no bound."""

MAY_BE_EMPTY = frozenset({"ref.model_name_or_path", "ckpt.best_metric_key"})
"""Texts for which nothing has a meaning."""

BETAS = ("actor.adam.betas", "critic.adam.betas", "adam.betas")

RISING = ("algo.dynamic_filtering_range", "reward.clip_range", "actor.clip_cov_range", "data.curriculum_window")
"""Two values, low < high."""


def ranges(config: object, machine: Machine) -> Iterator[Violation]:
    """Values outside their range."""
    values = values_of(config)
    yield from _outside(config, values, AT_LEAST, "at least", operator.ge)
    yield from _outside(config, values, MORE_THAN, "more than", operator.gt)
    yield from _outside(config, values, AT_MOST, "at most", operator.le)
    yield from _outside(config, values, LESS_THAN, "less than", operator.lt)
    for name, value in values.items():
        yield from _senseless(config, name, value)
    for name in BETAS:
        if not all(0 <= beta < 1 for beta in values.get(name, ())):
            yield broken(config, name, "a decay rate lies in [0, 1)", f"--{name} 0.9 0.95")
    for name in RISING:
        if name in values:
            low, high = values[name]
            if low >= high:
                yield broken(config, name, "the first value must be the smaller one", "two values, low and high")


def within(config: C) -> C:
    """The configuration with numbers moved to the bounds that they break, so that the other rules can be asked at once.

    No number is infinite or too large to compute with.
    """
    changed: dict[str, Any] = {}
    for name, value in values_of(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = AT_LEAST.get(name, -LARGEST), AT_MOST.get(name, LARGEST)
            if name not in ENDLESS and not low <= value <= high:
                changed[name] = type(value)(min(max(value, low), high))
    return build(config, changed)


def _senseless(config: object, name: str, value: Any) -> Iterator[Violation]:
    """Values that no flag of their type takes, but for the exceptions in the tables."""
    parts = value if isinstance(value, tuple) else (value,)
    numbers = [part for part in parts if isinstance(part, int | float)]
    if name not in ENDLESS and any(math.isinf(v) for v in numbers if isinstance(v, float)):
        yield broken(config, name, "it must be finite", f"--{name} with a finite number")
    if name not in AT_MOST and any(abs(v) > LARGEST for v in numbers if isinstance(v, int)):
        yield broken(config, name, "no number is that large", f"--{name} with a value of at most {LARGEST}")
    if name not in MAY_BE_EMPTY and any(isinstance(part, str) and not part.strip() for part in parts):
        yield broken(config, name, "it is empty", f"give a value, or leave --{name} out")


def _outside(
    config: object,
    values: Mapping[str, Any],
    bounds: Mapping[str, float],
    words: str,
    holds: Callable[[float, float], bool],
) -> Iterator[Violation]:
    for name, bound in bounds.items():
        value = values.get(name)
        parts = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(holds(part, bound) for part in parts):
            yield broken(config, name, f"it must be {words} {bound}", f"--{name} with a value of {words} {bound}")
