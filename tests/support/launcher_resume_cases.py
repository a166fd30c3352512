"""The trainer's own loop over real learners in one process, interrupted and resumed; the rollout is a fake.

Samples depend on the prompt alone, so that a difference between two runs comes from the trainer or the learners.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from openrlhf.agents.types import StopReason, Trajectory, Turn
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.ranks.config import RankConfig, rank_config
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, Resolve
from openrlhf.launcher.ray.start import learner_spec
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.protocols import Prepared
from openrlhf.learner.folders.shared import together
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import Role
from support.learner_models import VOCAB
from support.learner_ranks import Case
from support.local_ranks import prepare_here, update_here
from support.trainer_fakes import FakeLearner, FakeRun, fake_run

PROMPTS, EPISODES, SAVE_STEPS = 4, 3, 1
RUN_SECONDS = 300.0
"""Bound of one run: a second of work, on a machine that may be busy."""
UPDATES_PER_STEP = 2
"""Epochs over each rollout batch of two prompts; an episode is two steps, the run six."""


class Interrupted(Exception):  # noqa: N818  stands for a kill
    """The run ends here without warning."""


INTERRUPTIONS = {"after-save": (1, 0), "mid-epoch": (3, 1), "episode-edge": (4, 0)}
"""name -> (step, epoch) whose update never happens, from 0. Steps 1 and 3 are inside an episode, 4 begins one."""


def trajectories(handle: str) -> list[Trajectory]:
    """Two samples of the fake rollout's group; `handle` names the prompt."""
    rng, made = random.Random(handle), []
    for position in range(2):
        prompt, answer = rng.randint(2, 5), rng.randint(2, 9)
        length = prompt + answer
        made.append(
            Trajectory(
                token_ids=[rng.randrange(3, VOCAB) for _ in range(length)],
                trainable=[0] * prompt + [1] * answer,
                logprobs=[0.0] * length,
                versions=[-1] * prompt + [0] * answer,
                prompt_length=prompt,
                turns=[Turn(start=prompt, end=length, finish_reason="stop")],
                stop_reason=StopReason.STOP,
                group_id=handle,
                sample_index=position,
                reward=float(position),
                score=float(position),
            )
        )
    return made


@dataclass
class LocalLearner(FakeLearner):
    """Policy and, if there is one, critic of this process. stop: the (step, epoch) at which the run is interrupted."""

    policy: PolicyRank = field(kw_only=True)
    critic: CriticRank | None = field(kw_only=True)
    reference: PolicyRank | None = None
    stop: tuple[int, int] | None = None
    step: int = -1
    epoch: int = 0

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        self.step, self.epoch = self.step + 1, 0
        return prepare_here(
            mini_batches, policy=self.policy, critic=self.critic, reference=self.reference, kl_coef=kl_coef
        )

    async def update(
        self,
        prepared: Prepared,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze_actor: Sequence[bool],
        members: str | None = None,
    ) -> dict[str, float]:
        if self.stop == (self.step, self.epoch):
            raise Interrupted
        self.epoch += 1
        roles: dict[str, Any] = {"policy": self.policy, "critic": self.critic}
        metrics = update_here(prepared, order, **roles, kl_coef=kl_coef, freeze=freeze_actor, members=members)
        return metrics | {"noise": float(torch.rand(()))}

    async def sync_reference(self) -> None: ...

    async def blind_to(self, path: str) -> list[str]:
        return []

    async def save(self, folder: str) -> dict[str, int]:
        written = together([self.policy.save(f"{folder}/actor")], "actor")
        return written | ({} if self.critic is None else together([self.critic.save(f"{folder}/critic")], "critic"))

    async def load(self, folder: str) -> None:
        self.policy.load_checkpoint(f"{folder}/actor")
        if self.critic is not None:
            self.critic.load_checkpoint(f"{folder}/critic")
        self.step = json.loads((Path(folder) / "state" / "trainer.json").read_text())["state"]["step"] - 1

    def weights(self) -> list[torch.Tensor]:
        """Copies of all parameters."""
        models = [m for m in (self.policy, self.critic) if m is not None]
        return [t.clone() for m in models for bucket in m.learner.named_parameter_buckets(10**6) for _, t in bucket]


def make_run(
    model: str, checkpoints: Path, *, optim: str, stage: int, critic: bool, resume: bool, lora: int = 0
) -> FakeRun:
    """A fresh trainer with fresh learners; with adapters of rank `lora` the base is the reference."""
    flags: dict[str, Any] = {
        "actor.model_name_or_path": model,
        "actor.optim": optim,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "linear",
        "critic.model_name_or_path": model,
        "critic.optim": optim,
        "algo.advantage.estimator": "gae" if critic else "reinforce_baseline",
        "ds.param_dtype": "fp32",
        "ds.attn_implementation": "sdpa",
        "ds.zero_stage": stage,
        "train.max_epochs": UPDATES_PER_STEP,
        "train.micro_batch_size": 2,
        "train.num_episodes": EPISODES,
        "train.enable_ema": True,
        "data.max_len": 64,
        "rollout.micro_batch_size": 4,
        "reward.normalize_enable": True,
        "ckpt.path": str(checkpoints),
        "ckpt.save_steps": SAVE_STEPS,
        "ckpt.load_enable": resume,
        "ds.lora.rank": lora,
        "algo.kl.init_coef": 0.01 if lora else 0.0,
    }
    config = fake_run(PROMPTS, **flags).config
    policy = PolicyRank(*_rank(config, Role.POLICY))
    assert config.base_is_reference is (lora > 0)
    learner = LocalLearner(
        policy=policy,
        reference=policy if config.base_is_reference else None,
        critic=CriticRank(*_rank(config, Role.CRITIC)) if critic else None,
    )
    return fake_run(PROMPTS, learner=learner, **flags)


def _rank(config: TrainPPOConfig, role: Role) -> tuple[Learner, RankConfig, Resolve]:
    horizon = PROMPTS * EPISODES // 2 * UPDATES_PER_STEP

    def resolve(what: str, handles: Sequence[Any]) -> list[Any]:
        return [trajectories(h) for h in handles] if what == "samples" else list(handles)

    return Learner(learner_spec(config, role, horizon)), rank_config(config, pad_token_id=0), resolve


def comparable(steps: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics without the clock's, and without alarms, which look back at what this process saw."""
    return [
        {name: value for name, value in step.items() if not name.startswith(("timing/", "perf/", "health/"))}
        for step in steps
    ]


def interrupted_and_resumed(folder: Path, *, optim: str, stage: int, critic: bool, lora: int = 0) -> dict[str, Any]:
    """Per interruption: whether metrics and weights of the resumed run equal those of the uninterrupted one."""
    shape: dict[str, Any] = {"optim": optim, "stage": stage, "critic": critic, "lora": lora}
    root = folder / f"resume-{optim}-{stage}-{critic}-{lora}"
    whole = make_run(str(folder / "qwen3"), root / "whole", resume=False, **shape)
    whole.run(RUN_SECONDS)
    assert isinstance(whole.learner, LocalLearner)
    want, results = comparable(whole.sink.steps), {}
    for name, stop in INTERRUPTIONS.items():
        first = make_run(str(folder / "qwen3"), root / name, resume=False, **shape)
        assert isinstance(first.learner, LocalLearner)
        first.learner.stop = stop
        try:
            first.run(RUN_SECONDS)
        except Interrupted:
            results[name] = {"saved": sorted(p.name for p in (root / name).glob("global_step*"))}
        torch.rand(7)  # another process would be elsewhere in its random numbers
        second = make_run(str(folder / "qwen3"), root / name, resume=True, **shape)
        assert isinstance(second.learner, LocalLearner)
        second.sink.first = stop[0] + 1
        second.run(RUN_SECONDS)
        got, weights = comparable(second.sink.steps), second.learner.weights()
        results[name] |= {
            "steps": len(got),
            "metrics": got == want[stop[0] :],
            "weights": all(torch.equal(a, b) for a, b in zip(weights, whole.learner.weights(), strict=True)),
        }
    return results


def check_resumed(outcome: dict[str, Any]) -> None:
    """What `interrupted_and_resumed` must have found."""
    assert outcome.keys() == INTERRUPTIONS.keys()
    for name, (step, _) in INTERRUPTIONS.items():
        assert outcome[name]["saved"][-1] == f"global_step{step}"
        assert outcome[name]["steps"] == PROMPTS * EPISODES // 2 - step
        assert outcome[name]["metrics"], name
        assert outcome[name]["weights"], name


def run_resumes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One of each optimiser, one with a critic."""
    return {
        "adam-2-True": interrupted_and_resumed(folder, optim="adam", stage=2, critic=True),
        "muon-3-False": interrupted_and_resumed(folder, optim="muon", stage=3, critic=False),
        "lora-2-True": interrupted_and_resumed(folder, optim="adam", stage=2, critic=True, lora=4),
    }


def run_all_resumes(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Every optimiser and stage, with and without a critic."""
    return {
        f"{optim}-{stage}-{critic}": interrupted_and_resumed(folder, optim=optim, stage=stage, critic=critic)
        for optim in ("adam", "muon")
        for stage in (0, 1, 2, 3)
        for critic in (False, True)
    }


CASES: dict[str, Case] = {"run_resumes": run_resumes, "run_all_resumes": run_all_resumes}
