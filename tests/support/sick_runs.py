"""Runs of the trainer on fakes: healthy ones, and one for every way to be sick."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import SampleInfo, SampleRef
from openrlhf.launcher.trainer.protocols import Prepared
from support.trainer_fakes import GOOD, FakeLearner, FakeRun, fake_run

PROMPTS, SAMPLES = 4, 4

Change = Callable[[int, random.Random], dict[str, Any]]
"""(step, random numbers) -> metrics."""
OfSample = Callable[[int, random.Random, PromptItem], dict[str, Any]]
"""(step, random numbers, prompt) -> fields of a sample."""


def nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Sickness:
    """How a run differs from a healthy one. within: steps after which the alarm has come. drawn: prompts per step."""

    name: str
    sample: OfSample = nothing
    metrics: Change = nothing
    prompt: Callable[[PromptItem], dict[str, Any]] = lambda item: {}
    flags: dict[str, Any] = field(default_factory=dict)
    within: int = 5
    drawn: int = PROMPTS


@dataclass
class PatientLearner(FakeLearner):
    """Measures what a healthy learner would, changed by the sickness."""

    change: Change = nothing
    rng: random.Random = field(default_factory=random.Random)

    @property
    def step(self) -> int:
        return len(self.prepared)

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        prepared = await super().prepare(mini_batches, kl_coef=kl_coef, step=step)
        return replace(prepared, metrics={"train/kl": 0.01 * self.step * self.rng.random()})

    async def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        found = await super().update(*args, **kwargs) | {
            "train/actor_grad_norm": self.rng.uniform(0.2, 3.0),
            "train/actor_lr": 1e-6 * (self.step - 1),  # a warm-up begins at 0
            "train/entropy_loss": 1.5 * 0.95**self.step,
            "train/logprobs_diff": self.rng.uniform(0.0, 0.02),
            "train/skipped_steps": float(self.rng.random() < 0.05),
        }
        return found | self.change(self.step, self.rng)


def sick_run(sickness: Sickness, *, steps: int = 20, seed: int = 0, **flags: Any) -> FakeRun:
    """A trainer whose samples get better, but for what the sickness changes."""
    rng = random.Random(seed)

    def score(item: PromptItem, sample: int) -> SampleInfo:
        step = item.position // sickness.drawn + 1
        reward = float(rng.random() < 0.3 + 0.02 * step)
        length = rng.randint(10, 20)
        healthy = {
            "reward": reward,
            "score": reward,
            "num_trainable": length,
            "longest_turn": length,
            "total_length": length + 4,
            "truncated": rng.random() < 0.1,
            "answer": rng.getrandbits(32),
        }
        changed = healthy | sickness.sample(step, rng, item)
        return replace(GOOD, **(changed | ({"score": changed["reward"]} if changed["reward"] != reward else {})))

    learner = PatientLearner(change=sickness.metrics, rng=random.Random(seed))
    own: dict[str, Any] = {
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "train.batch_size": 16,
    }
    run = fake_run(steps * sickness.drawn, score=score, learner=learner, **(own | sickness.flags | flags))
    draw = run.prompts.next

    def drawn(n: int) -> list[PromptItem]:
        items = [replace(item, label="a", datasource=f"source{item.position % 2}") for item in draw(n)]
        return [replace(item, **sickness.prompt(item)) for item in items]

    run.prompts.next = drawn
    return run


def by_length(step: int, rng: random.Random, item: PromptItem) -> dict[str, Any]:
    length = rng.randint(10, 15)
    return {"num_trainable": length, "longest_turn": length, "total_length": length + 4, "reward": length / 20}


def longer(step: int, rng: random.Random, item: PromptItem) -> dict[str, Any]:
    length = round((10 + rng.random()) * 1.08**step)
    reward = float(rng.random() < 0.3)
    return {"num_trainable": length, "longest_turn": length, "total_length": length + 4, "reward": reward}


def guess(step: int, rng: random.Random, item: PromptItem) -> dict[str, Any]:
    """No better at the end than at the start."""
    return {"reward": float(rng.random() < 0.3)}


def greedy(step: int, rng: random.Random, item: PromptItem) -> dict[str, Any]:
    """One answer per prompt, right for every third one."""
    return {"answer": item.position, "reward": float(item.position % 3 == 0)}


def hard(step: int, rng: random.Random, item: PromptItem) -> dict[str, Any]:
    """Only one prompt in ten is ever answered."""
    return {} if item.position % 10 == 0 else {"reward": 0.0}


SICK = [
    Sickness(name="no_reward_variance", sample=lambda step, rng, item: {"reward": 0.5}),
    Sickness(name="zero_advantages", sample=hard, flags={"rollout.batch_size": 10, "train.batch_size": 40}, drawn=10),
    Sickness(name="all_truncated", sample=lambda step, rng, item: {"truncated": True}),
    Sickness(name="identical_answers", sample=greedy),
    Sickness(
        name="constant_reward_without_labels",
        sample=lambda step, rng, item: {"reward": 0.0},
        prompt=lambda item: {"label": ""},
    ),
    Sickness(name="length_growth", sample=longer, within=20),
    Sickness(
        name="entropy_collapse",
        sample=guess,
        metrics=lambda step, rng: {"train/entropy_loss": 1.5 * 0.6**step},
        within=20,
    ),
    Sickness(name="kl_runaway", metrics=lambda step, rng: {"train/kl": 0.5 * 2.0**step}),
    Sickness(name="engine_trainer_drift", metrics=lambda step, rng: {"train/logprobs_diff": 0.4}),
    Sickness(name="gradient_zero", metrics=lambda step, rng: {"train/actor_grad_norm": 0.0}),
    Sickness(
        name="gradient_not_finite",
        metrics=lambda step, rng: {"train/actor_grad_norm": float("nan"), "train/skipped_steps": 1.0},
    ),
    Sickness(name="gradient_always_clipped", metrics=lambda step, rng: {"train/actor_grad_norm": 40.0 + rng.random()}),
    Sickness(name="learning_rate_zero", metrics=lambda step, rng: {"train/actor_lr": 0.0}),
    Sickness(
        name="filter_waste",
        sample=hard,
        flags={"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": (0.0, 1.0)},
        drawn=10 * PROMPTS,
    ),
    Sickness(
        name="reward_by_source",
        sample=lambda step, rng, item: {"reward": float(item.position % 2)},
    ),
    Sickness(name="stale_samples", metrics=lambda step, rng: {"rollout/staleness_mean": 7.0}),
    Sickness(name="reward_is_length", sample=by_length),
    Sickness(
        name="environment_fails",
        metrics=lambda step, rng: {"environment/search/failed_share": 1.0, "environment/search/off": 0.0},
    ),
]
