"""Whole training runs of the quickstart's task in two spawned learner ranks, without Ray and vLLM.

Rank 0 samples with transformers from the weights that the learner streams, and shares the trajectories; from there on
the runs take the trainer's own way: shaping, mini-batches, the roles, `Learner`.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from reward import reward_func
from task import EVAL_SEED, Example, draw_examples
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.agents.types import PromptItem, StopReason, Trajectory, Turn
from openrlhf.core.config import (
    AdvantageConfig,
    AlgoConfig,
    KLConfig,
    PolicyLossConfig,
    RewardShapingConfig,
)
from openrlhf.core.tables import estimator_row
from openrlhf.launcher.health.checks import Expected
from openrlhf.launcher.health.observation import observe
from openrlhf.launcher.health.watch import HealthWatch
from openrlhf.launcher.ranks.config import RankConfig
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank
from openrlhf.launcher.samples import Group, SampleInfo
from openrlhf.launcher.trainer.plan import cut_mini_batches, split_over_ranks
from openrlhf.launcher.trainer.shaping import shape_groups
from openrlhf.learner.config import AdamConfig, DsConfig, LoraConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.setup import init_distributed
from openrlhf.learner.spec import LearnerSpec, Role
from support.local_ranks import prepare_here, update_here

STEPS = 40
PROMPTS = 16
SAMPLES = 8
TRAIN_BATCH = 64
MAX_NEW_TOKENS = 10
EVAL_COUNT = 512
POLICY_LR, CRITIC_LR = 5e-4, 1e-3


@dataclass(frozen=True)
class Case:
    """One training run. lora: rank of adapters, 0 trains all weights; faster: by how much more they learn at a time."""

    estimator: str
    loss: str
    seed: int
    lora: int = 0
    faster: float = 10.0
    kl_coef: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.estimator}-{self.loss}-{self.seed}" + (f"-lora{self.lora}" if self.lora else "")


class Sampler:
    """A transformers model that follows the learner's weights: what an engine is to the trainer."""

    def __init__(self, model_path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.weights = dict(self.model.named_parameters())

    @torch.no_grad()
    def receive(self, learner: Learner) -> None:
        for bucket in learner.named_parameter_buckets(1 << 20):
            for name, tensor in bucket:
                self.weights[name].copy_(tensor)

    @torch.no_grad()
    def sample(self, examples: Sequence[Example], n: int) -> list[list[Trajectory]]:
        """n trajectories per example at temperature 1, scored. All prompts are equally long."""
        chats = [f"<|user|>{e.question}<|end|><|assistant|>" for e in examples]
        ids = torch.tensor(self.tokenizer(chats, add_special_tokens=False)["input_ids"]).repeat_interleave(n, dim=0)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        logits = self.model(input_ids=out).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, out[:, 1:, None]).squeeze(2).tolist()
        rows = [
            self._trajectory(row, [0.0, *own], ids.shape[1], i // n, i % n)
            for i, (row, own) in enumerate(zip(out.tolist(), logprobs, strict=True))
        ]
        return [
            self._scored(rows[i * n : (i + 1) * n], chat, example)
            for i, (chat, example) in enumerate(zip(chats, examples, strict=True))
        ]

    def _trajectory(
        self, row: list[int], logprobs: list[float], prompt_length: int, group: int, position: int
    ) -> Trajectory:
        answer = row[prompt_length:]
        end = self.tokenizer.eos_token_id
        stopped = end in answer
        length = prompt_length + (answer.index(end) + 1 if stopped else len(answer))
        return Trajectory(
            token_ids=row[:length],
            trainable=[0] * prompt_length + [1] * (length - prompt_length),
            logprobs=[0.0] * prompt_length + logprobs[prompt_length:length],
            versions=[-1] * prompt_length + [0] * (length - prompt_length),
            prompt_length=prompt_length,
            turns=[Turn(start=prompt_length, end=length, finish_reason="stop" if stopped else "length")],
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            group_id=str(group),
            sample_index=position,
        )

    def _scored(self, rows: list[Trajectory], chat: str, example: Example) -> list[Trajectory]:
        queries = [self.tokenizer.decode(t.token_ids) for t in rows]
        rewards = reward_func(queries, [chat] * len(rows), [example.answer] * len(rows))["rewards"]
        return [_with_reward(t, r) for t, r in zip(rows, rewards, strict=True)]

    def accuracy(self, examples: Sequence[Example]) -> float:
        groups = self.sample(examples, 1)
        return sum(cast(float, t.reward) for rows in groups for t in rows) / len(groups)


def _with_reward(trajectory: Trajectory, reward: float) -> Trajectory:
    from dataclasses import replace

    return replace(trajectory, reward=reward, score=reward)


def as_group(position: int, example: Example, rows: list[Trajectory]) -> Group:
    """What the controller sees of a rolled-out prompt; the handle is the list of trajectories itself."""
    infos = [
        SampleInfo(
            reward=t.reward,
            score=t.score,
            total_length=len(t.token_ids),
            num_trainable=t.num_trainable,
            longest_turn=t.num_trainable,
            truncated=t.truncated,
            failed=False,
            answer=hash(tuple(t.token_ids)),
        )
        for t in rows
    ]
    prompt = PromptItem(group_id=str(position), prompt=example.question, label=example.answer, position=position)
    return Group(prompt=prompt, samples=infos, handle=rows)


R = TypeVar("R", PolicyRank, CriticRank)


def build_rank(kind: type[R], case: Case, model_path: str) -> R:
    """This rank's policy or critic."""
    role = Role.CRITIC if kind is CriticRank else Role.POLICY
    lr = (CRITIC_LR if role is Role.CRITIC else POLICY_LR) * (case.faster if case.lora else 1.0)
    lora = LoraConfig(rank=case.lora, alpha=2 * case.lora) if case.lora else LoraConfig()
    spec = LearnerSpec(
        role=role,
        model_path=model_path,
        ds=DsConfig(zero_stage=2, param_dtype="fp32", attn_implementation="sdpa", lora=lora),
        optim=OptimConfig(adam=AdamConfig(lr=lr)),
        batch=TrainBatchConfig(micro_batch_size=32, batch_size=TRAIN_BATCH, seed=case.seed),
        max_optimizer_steps=STEPS * PROMPTS * SAMPLES // TRAIN_BATCH,
        score_micro_batch_size=64,
    )
    config = RankConfig(
        algo=AlgoConfig(advantage=AdvantageConfig(estimator=case.estimator), kl=KLConfig(init_coef=case.kl_coef)),
        policy_loss=PolicyLossConfig(policy_loss_type=case.loss),
        value_clip=0.5,
        max_len=64,
        agg_constant=float(MAX_NEW_TOKENS),
        pad_token_id=0,
    )
    return kind(Learner(spec), config, resolve=lambda what, handles: list(handles))


class Run:
    """One case on this rank."""

    def __init__(self, case: Case, model_path: str) -> None:
        self.case = case
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.policy = build_rank(PolicyRank, case, model_path)
        self.critic = build_rank(CriticRank, case, model_path) if estimator_row(case.estimator).critic else None
        self.sampler = Sampler(model_path)
        self.rewards: list[float] = []
        row = estimator_row(case.estimator)
        self.health = HealthWatch(Expected(max_norm=OptimConfig().max_norm, groups=row.groups))
        self.alarms: list[str] = []

    def train(self) -> dict[str, Any]:
        """All steps. Returns (on every rank) the accuracies before and after, and the training rewards."""
        held_out = draw_examples(EVAL_COUNT, seed=EVAL_SEED)
        prompts = draw_examples(STEPS * PROMPTS, seed=self.case.seed, exclude={e.question for e in held_out})
        before = self._accuracy(held_out)
        for step in range(STEPS):
            self._step(step, prompts[step * PROMPTS : (step + 1) * PROMPTS])
        return {
            **asdict(self.case),
            "before": before,
            "after": self._accuracy(held_out),
            "rewards": self.rewards,
            "alarms": self.alarms,
        }

    def _accuracy(self, examples: Sequence[Example]) -> float:
        self.sampler.receive(self.policy.learner)
        return self.sampler.accuracy(examples) if self.rank == 0 else float("nan")

    def _step(self, step: int, examples: Sequence[Example]) -> None:
        self.sampler.receive(self.policy.learner)
        box = [self.sampler.sample(examples, SAMPLES) if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        rows = cast(list[list[Trajectory]], box[0])
        groups = [as_group(i, e, r) for i, (e, r) in enumerate(zip(examples, rows, strict=True))]
        shaped = shape_groups(
            groups,
            estimator=self.case.estimator,
            shaping=RewardShapingConfig(),
            max_response_len=MAX_NEW_TOKENS,
            norm=None,
        )
        self.rewards.append(shaped.metrics["train/reward"])
        cut = cut_mini_batches(shaped.samples, batch_size=TRAIN_BATCH, seed=self.case.seed, step=step)
        shares = [split_over_ranks(batch, self.world_size, hidden_size=64)[self.rank] for batch in cut]
        kl_coef, base = self.case.kl_coef, self.policy if self.case.kl_coef > 0 else None
        prepared = prepare_here(shares, policy=self.policy, critic=self.critic, reference=base, kl_coef=kl_coef)
        order = list(range(len(shares)))
        metrics = update_here(prepared, order, policy=self.policy, critic=self.critic, kl_coef=kl_coef)
        if self.rank == 0:
            seen = observe(step + 1, groups, shaped.metrics | prepared.metrics | metrics)
            self.alarms += [str(news) for news in self.health.see(seen) if news.state == "raised"]


def run_cases(rank: int, world_size: int, port: int, model_path: str, cases: Sequence[Case], results: Path) -> None:
    """The body of a spawned rank: every case in turn; rank 0 appends one JSON line each to `results`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    init_distributed()
    for case in cases:
        outcome = Run(case, model_path).train()
        gc.collect()
        if rank == 0:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")
    dist.destroy_process_group()
