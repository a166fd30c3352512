"""A rollout and a learner in plain Python, so that the whole trainer loop runs in milliseconds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.samples import EvalRequest, Group, SampleInfo, SampleRef
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from openrlhf.launcher.trainer.protocols import Prepared

GOOD = SampleInfo(reward=1.0, score=1.0, total_length=8, num_trainable=4, longest_turn=4, truncated=False, failed=False)
FAILED = replace(GOOD, reward=None, score=None, failed=True, failure="reward: boom-3", num_trainable=0)

Score = Callable[[PromptItem, int], SampleInfo]


def half_right(item: PromptItem, sample: int) -> SampleInfo:
    """Every second sample gets reward 1, the others 0."""
    value = float(sample % 2)
    return replace(GOOD, reward=value, score=value)


def unscored(item: PromptItem, sample: int) -> SampleInfo:
    """What is left to a reward model."""
    return replace(GOOD, reward=None, score=None)


@dataclass
class FakeRollout:
    """Groups by a rule; `delay` says how many loop turns a prompt takes. weights: whose versions the tokens carry."""

    n: int
    weights: FakeLearner
    score: Score = half_right
    delay: Callable[[PromptItem], int] = lambda item: 0
    calls: list[tuple[int, bool]] = field(default_factory=list)
    evaluations: set[EvalRequest] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        self.calls.append((item.position, evaluation is not None))
        self.evaluations |= {evaluation} if evaluation else set()
        self.log.append("evaluate" if evaluation else "generate")
        first = self.weights.pushed[-1]
        self.running += 1
        try:
            for _ in range(self.delay(item)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        n = evaluation.n_samples_per_prompt if evaluation else self.n
        versions = {"min_version": first, "max_version": self.weights.pushed[-1]}
        samples = [replace(self.score(item, i), **versions) for i in range(n)]
        return Group(prompt=item, samples=samples, handle=f"h{item.position}")

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        return [GeneratedSample(text=group.prompt.prompt, reward=s.reward) for s in group.samples[:count]]

    async def fetch(self, group: Group) -> Any:
        return group.handle

    async def store(self, trajectories: Any) -> Any:
        return trajectories

    async def sleep(self) -> None:
        self.log.append("engines sleep")

    async def worker_metrics(self) -> dict[str, float]:
        return {"engine/running_requests": float(self.running)}

    async def wake(self) -> None:
        self.log.append("engines wake")

    async def shutdown(self) -> None:
        self.log.append("shutdown")


@dataclass
class FakeLearner:
    """Remembers what it was asked to do. delay: loop turns that an update takes. busy: groups that run just now."""

    kl: float = 0.5
    rewards: Callable[[SampleRef], float] = lambda sample: 1.0
    stored: tuple[float, float] | None = None
    prepared: list[list[list[SampleRef]]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    pushed: list[int] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    delay: Callable[[], int] = lambda: 0
    busy: Callable[[], int] = lambda: 0
    pushed_while_busy: int = 0
    disk: Callable[[str], Path] = Path
    """Where what the controller calls so lies on the disk of the ranks."""

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        self.log.append("reward")
        return [self.rewards(s) for s in samples]

    async def reward_statistics(self) -> tuple[float, float] | None:
        return self.stored

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        self.log.append("prepare")
        self.prepared.append([list(part) for part in mini_batches])
        metrics = {"train/kl": self.kl, "kl_coef_seen": kl_coef}
        return Prepared(handle=len(self.prepared), metrics=metrics)

    async def update(
        self,
        prepared: Prepared,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze_actor: Sequence[bool],
        members: str | None = None,
    ) -> dict[str, float]:
        assert prepared.handle == len(self.prepared), "only the newest batch can be trained on"
        self.log.append("update")
        for _ in range(self.delay()):
            await asyncio.sleep(0)
        seen = {"order": list(order), "kl_coef": kl_coef, "freeze": list(freeze_actor), "members": members}
        self.updates.append(seen)
        return {"train/policy_loss": float(len(self.updates))}

    async def push_weights(self, version: int) -> dict[str, float]:
        self.log.append("push")
        self.pushed_while_busy += self.busy() > 0
        self.pushed.append(version)
        return {"rollout/sync_error": 0.0}

    async def sync_reference(self) -> None:
        self.log.append("sync_reference")

    async def blind_to(self, path: str) -> list[str]:
        return [] if self.disk(path).exists() else ["node2"]

    async def save(self, folder: str) -> dict[str, int]:
        self.log.append("save")
        place = self.disk(folder) / "actor"
        place.mkdir(parents=True)
        (place / "updates.json").write_text(json.dumps(self.updates))
        return {"actor/updates.json": (place / "updates.json").stat().st_size}

    async def load(self, folder: str) -> None:
        self.log.append("load")
        self.updates = json.loads((Path(folder) / "actor" / "updates.json").read_text())

    async def export(self, path: str, *, trial: bool = False) -> None:
        if not trial:
            self.log.append("export")
            self.exported.append(path)

    async def shutdown(self) -> None:
        self.log.append("shutdown")


@dataclass
class FakePrompts:
    """`size` prompts per episode."""

    size: int
    episode: int = 0
    position: int = 0

    def start_episode(self, episode: int) -> None:
        self.episode, self.position = episode, 0

    def next(self, n: int) -> list[PromptItem]:
        places = range(self.position, min(self.position + n, self.size))
        self.position += len(places)
        return [
            PromptItem(group_id=f"e{self.episode}-p{p}", prompt=f"p{p}", position=p, episode=self.episode)
            for p in places
        ]

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None: ...

    def judged(self, item: PromptItem) -> bool:
        return True

    def failing(self) -> dict[str, float]:
        return {}

    def metrics(self) -> dict[str, float]:
        return {}

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episode, self.position = state["episode"], state["position"]


@dataclass
class FakeSink:
    """Keeps what was logged. first: number of the first step."""

    first: int = 1
    run_id: str = "run"
    resumed: int | None = None
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    samples: list[tuple[int, list[str]]] = field(default_factory=list)

    def resume(self, step: int) -> None:
        self.resumed = step

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        assert step == self.first + len(self.steps)
        self.steps.append(metrics)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluations.append((step, metrics))

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        self.samples.append((step, [s.text for s in samples]))


@dataclass
class FakeRun:
    """A trainer on fakes; `run()` runs it."""

    config: TrainPPOConfig
    rollout: FakeRollout
    learner: FakeLearner
    prompts: Any
    sink: FakeSink
    trainer: Trainer

    def run(self, seconds: float = 30) -> Any:
        return asyncio.run(asyncio.wait_for(self.trainer.run(), seconds))

    def trained(self) -> list[str]:
        """The handles of all samples that were trained on, in no order."""
        return sorted(s.handle for batch in self.learner.prepared for part in batch for s in part)


def fake_run(
    prompts: int,
    *,
    score: Score = half_right,
    delay: Callable[[PromptItem], int] = lambda item: 0,
    eval_prompts: int = 0,
    learner: FakeLearner | None = None,
    sources: dict[str, str] | None = None,
    order: Callable[[TrainPPOConfig], Any] | None = None,
    **flags: Any,
) -> FakeRun:
    """Defaults: 2 prompts x 2 samples per step, one optimiser step of 4, reinforce_baseline; flags by dotted name.

    order: makes the source of prompts, in the place of `prompts` of them in a row.
    """
    defaults = {
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 4,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0.0,
        "reward.remote_url": "reward.py",
        "ckpt.output_dir": "/exported",
    }
    config = build(TrainPPOConfig(), defaults | {name.replace("__", "."): value for name, value in flags.items()})
    learner = learner or FakeLearner()
    rollout = FakeRollout(n=config.rollout.n_samples_per_prompt, weights=learner, score=score, delay=delay)
    rollout.log = learner.log
    learner.busy = lambda: rollout.running
    source, sink = FakePrompts(prompts) if order is None else order(config), FakeSink()
    parts = TrainerParts(
        rollout=rollout,
        learner=learner,
        prompts=source,
        sink=sink,
        eval_prompts=FakePrompts(eval_prompts).next(10**6),
        sources=sources or {},
    )
    return FakeRun(config, rollout, learner, source, sink, Trainer(config, parts))
