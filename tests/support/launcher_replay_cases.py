"""Runs of the trainer over real learner ranks that are recorded, and replayed from their record alone."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

from openrlhf.agents.types import Failure, PromptItem, StopReason, Trajectory, Turn
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.ranks.config import rank_config
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.start import learner_spec
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.replay.batches import NoPrompts, RecordedBatches, RecordedRollout, as_before, steps_of
from openrlhf.launcher.samples import EvalRequest, Group, SampleRef, sample_info
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from openrlhf.launcher.trainer.plan import split_over_ranks
from openrlhf.launcher.trainer.protocols import Prepared
from openrlhf.launcher.vision import ImageProcessor, find_vision
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import Role
from support.launcher_resume_cases import LocalLearner, comparable
from support.learner_models import VOCAB
from support.learner_ranks import Case
from support.local_ranks import prepare_here
from support.trainer_fakes import FakePrompts, FakeSink, fake_run
from support.vision_models import tiny_vision

STEPS, SAMPLES = 3, 3
GIB = 2**30


def picture(number: int) -> bytes:
    """A PNG of one colour."""
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (40 * number % 256, 90, 200)).save(out, "PNG")
    return out.getvalue()


@dataclass
class MadeUp(RecordedRollout):
    """Samples of random tokens after the prompt's name; the last one of every third prompt fails."""

    processor: ImageProcessor | None = None
    turns: bool = False
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self._here)

    async def _here(self, trajectories: Sequence[Trajectory]) -> Any:
        return list(trajectories)

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        rows = [self._row(item, sample) for sample in range(SAMPLES)]
        return Group(prompt=item, samples=[sample_info(row, max_len=64) for row in rows], handle=rows)

    def _row(self, item: PromptItem, sample: int) -> Trajectory:
        rng = random.Random(f"{item.position} {sample}")
        images, prompt = [], [40, 41]
        if self.processor is not None and item.position % 2:
            images = [picture(item.position), picture(item.position + 1)][: 1 + item.position % 4 // 2]
            for content in images:
                prompt += [*self.processor.tokens(content), 42]
        answer = [rng.randrange(40, VOCAB) for _ in range(rng.randint(2, 9))]
        n, failed = len(prompt) + len(answer), sample == SAMPLES - 1 and item.position % 3 == 0
        reward = None if failed else rng.random()
        ranges = [(len(prompt), n - 1), (n - 1, n)] if self.turns else [(len(prompt), n)]
        turns = [
            Turn(start=a, end=b, finish_reason="stop", reward=rng.random() if self.turns else None) for a, b in ranges
        ]
        if self.turns and not failed:
            reward = sum(turn.reward or 0.0 for turn in turns)
        return Trajectory(
            token_ids=prompt + answer,
            trainable=[0] * len(prompt) + [1] * len(answer),
            logprobs=[0.0] * len(prompt) + [-rng.random() for _ in answer],
            versions=[-1] * len(prompt) + [0] * len(answer),
            prompt_length=len(prompt),
            turns=turns,
            stop_reason=StopReason.FAILED if failed else StopReason.STOP,
            group_id=item.group_id,
            sample_index=sample,
            reward=reward,
            score=reward,
            failure=Failure(border="reward", message="boom") if failed else None,
            extra_logs={"noise": rng.random()},
            images=images,
            prompt=item.prompt,
        )


@dataclass
class SharedLearner(LocalLearner):
    """This rank's part of a policy of several ranks."""

    rank: int = 0
    world: int = 1

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        width = self.policy.learner.hidden_size
        shares = [split_over_ranks(batch, self.world, hidden_size=width)[self.rank] for batch in mini_batches]
        return prepare_here(shares, policy=self.policy, kl_coef=kl_coef, step=step)


def configuration(model: str, *, optim: str, images: bool, turns: str = "off") -> TrainPPOConfig:
    flags: dict[str, Any] = {
        "actor.model_name_or_path": model,
        "actor.optim": optim,
        "actor.adam.lr": 1e-3,
        "actor.muon.lr": 1e-2,
        "ds.param_dtype": "fp32",
        "ds.attn_implementation": "sdpa",
        "ds.zero_stage": 2,
        "data.max_len": 64,
        "data.max_images_per_prompt": 2 if images else 0,
        "reward.normalize_enable": True,
        "algo.turn_rewards": turns,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_failed_fraction": 1.0,
        "rollout.micro_batch_size": 2,
        "train.batch_size": 3,
        "train.max_epochs": 2,
        "train.micro_batch_size": 2,
    }
    return fake_run(1, **flags).config


def _learner(config: TrainPPOConfig, rank: int, world: int, record: Path | None) -> SharedLearner:
    model = config.actor.model_name_or_path
    assert model is not None
    vision = find_vision(model) if config.data.max_images_per_prompt else None
    own = rank_config(config, pad_token_id=0, processor_path=None if vision is None else vision.path)
    if record is not None:
        own = replace(own, record=RecordPlace(folder=record, max_bytes=GIB))
    learner = Learner(learner_spec(config, Role.POLICY, 100, vision))
    policy = PolicyRank(learner, own, resolve=lambda what, handles: list(handles))
    return SharedLearner(policy=policy, critic=None, rank=rank, world=world)


def _digest(learner: LocalLearner) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in learner.weights())).hexdigest()


def _wait(world: int) -> None:
    if world > 1:
        dist.barrier()


def recorded_and_replayed(
    rank: int, world: int, folder: Path, *, optim: str, images: bool, turns: str = "off"
) -> dict[str, Any]:
    """Digests of the weights before, after, and after the replay of a run; whether their metrics are the same."""
    model = str(folder / "qwen3")
    if images:
        model = str(folder / f"vision-{world}")
        if rank == 0:
            tiny_vision("qwen3_vl", model)
        _wait(world)
    config = configuration(model, optim=optim, images=images, turns=turns)
    place = folder / f"record-{optim}-{images}-{turns}-{world}"
    record = None
    if rank == 0:
        record = RunRecord(place, run="r", name="r", ranks=world, goes_on=False, config_toml="")
    _wait(world)
    learner = _learner(config, rank, world, place)
    before, sink = _digest(learner), FakeSink()
    processor = ImageProcessor(model) if images else None
    prompts = FakePrompts(2 * STEPS)
    parts = TrainerParts(
        rollout=MadeUp(processor, turns != "off"), learner=learner, prompts=prompts, sink=sink, record=record
    )
    _run(Trainer(config, parts))
    _wait(world)
    again, second = _learner(config, rank, world, None), FakeSink()
    reader, rollout = Record.open(place), MadeUp()
    steps = steps_of(reader, None, None)
    batches = RecordedBatches(config, rollout, NoPrompts(), record=reader, steps=steps)
    parts = TrainerParts(rollout=rollout, learner=again, prompts=NoPrompts(), sink=second, pipeline=batches)
    trainer = Trainer(config, parts)
    as_before(trainer, reader.steps()[1].before)
    torch.rand(7)  # another process would be elsewhere in its random numbers
    _run(trainer)
    return {
        "steps": steps,
        "before": before,
        "after": _digest(learner),
        "replayed": _digest(again),
        "metrics": _stable(sink) == _stable(second),
        "images": len(reader.images(1)),
        "trainer_logprobs": all(s.trainer_logprobs is not None for s in reader.samples(2)),
    }


def _stable(sink: FakeSink) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if name != "noise"} for step in comparable(sink.steps)]


def _run(trainer: Trainer) -> None:
    import asyncio

    asyncio.run(asyncio.wait_for(trainer.run(), 300))


def run_replays(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Both optimisers, one with images, and one with a reward per turn."""
    return {
        "adam": recorded_and_replayed(rank, world, folder, optim="adam", images=False),
        "muon": recorded_and_replayed(rank, world, folder, optim="muon", images=False),
        "images": recorded_and_replayed(rank, world, folder, optim="adam", images=True),
        "turns": recorded_and_replayed(rank, world, folder, optim="adam", images=False, turns="to_go"),
    }


CASES: dict[str, Case] = {"run_replays": run_replays}
