"""Runs as a report reads them: metrics, configuration, alarms, and episodes of all kinds."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from openrlhf.agents.types import PromptItem, StopReason, Turn
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.record.sample_writer import SampleWriter, image_name
from openrlhf.launcher.record.schema import RecordedSample
from openrlhf.launcher.samples import Group, SampleInfo, SampleRef
from openrlhf.launcher.saved import config_toml
from support.launcher_tokenizer import byte_tokenizer
from support.trainer_fakes import FAILED

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31mred\u202eesrever Ω漢🙂 "
TOOL = '<tool_call>{"name": "calculator", "arguments": {"expression": "312 + 1"}}</tool_call>'
WORST = "the worst of all"
PER_STEP = 64
INFO = SampleInfo(
    reward=0.0, score=0.0, total_length=90, num_trainable=40, longest_turn=40, truncated=False, failed=False
)
FAILURE = f"agent: ValueError: {HOSTILE}\nTraceback (most recent call last): ..."


@cache
def _encoded(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(text))


@cache
def _tokenizer() -> Any:
    return byte_tokenizer()


def image() -> bytes:
    """A small PNG."""
    out = io.BytesIO()
    Image.new("RGB", (48, 32), (200, 80, 40)).save(out, format="png")
    return out.getvalue()


def episode(step: int, index: int, parts: list[tuple[str, bool]], *, reward: float, **changes: Any) -> RecordedSample:
    """A sample of texts, of which the trained ones are turns; the first is the prompt."""
    seeded = np.random.default_rng([step, index])
    tokens: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    for text, own in parts:
        piece = _encoded(text)
        if own:
            start, earned = len(tokens), 0.25 * (len(turns) + 1)
            turns.append(Turn(start=start, end=start + len(piece), finish_reason="stop", reward=earned))
        tokens += piece
        mask += [own] * len(piece)
    trained = np.array(mask)
    engine = np.where(trained, -seeded.random(len(tokens)), 0).astype(np.float32)
    noise = (seeded.random(len(tokens)) - 0.5) * 0.02
    if index == 3:
        noise[-3:] = 0.9
    own = {
        "step": step,
        "index": index,
        "mini_batch": 0,
        "group_id": f"e0-p{index // 8}",
        "sample_index": index % 8,
        "place": index % 8,
        "prompt": parts[0][0],
        "label": {"answer": "123", "raw": HOSTILE},
        "tokens": np.array(tokens, dtype=np.int32),
        "trainable": trained,
        "engine_logprobs": engine,
        "trainer_logprobs": np.where(trained, engine - noise, 0).astype(np.float32),
        "versions": np.where(trained, step - 1 - (np.arange(len(tokens)) > 60), -1).astype(np.int32),
        "advantages": np.where(trained, reward - 0.5, 0).astype(np.float32),
        "prompt_length": len(_encoded(parts[0][0])),
        "turns": turns,
        "stop_reason": StopReason.STOP,
        "reward": reward,
        "score": reward,
        "shaped": reward - 0.5,
        "extra_logs": {"format": 0.1},
    }
    return RecordedSample(**(own | changes))


def episodes(step: int, steps: int) -> list[RecordedSample]:
    """64 samples of 8 prompts: plain ones, one with tools and an image, two branches of one episode, hostile text."""
    seeded = np.random.default_rng(step)
    prompt = f"<|im_start|>user\nsort {step % 8}1{step % 7}5 <|im_end|>\n<|im_start|>assistant\n"
    found = []
    for index in range(PER_STEP):
        right = seeded.random() < 0.2 + 0.7 * step / steps
        answer = f"<think>digits of {index}</think>" + ("0135 is sorted" if right else "5310 is what I found here")
        parts = [(prompt, False), (answer, True)]
        changes: dict[str, Any] = {}
        if index == 1:
            parts += [("\n<tool_response>313</tool_response>\n", False), (f"{TOOL} so 313", True)]
            parts[1] = (TOOL, True)
            changes["images"] = [image_name(image())]
        elif index == 2:
            parts[1] = (HOSTILE, True)
        elif index in (4, 5):  # branches: they part in the middle of the answer
            parts[1] = ("first the smallest, then " + ("the rest" if index == 4 else "all others by size"), True)
            changes |= {"sample_index": 4}
        reward = float(right)
        if (step, index) == (2, 7):
            parts[1], reward = (WORST, True), -3.0
        found.append(episode(step, index, parts, reward=reward, **changes))
    return found


def write_run(folder: Path, *, steps: int = 4, **flags: Any) -> Path:
    """A run of `steps` steps, logged and recorded; flags by dotted name with `__` for the dot."""
    record = folder / "record"
    record.mkdir(parents=True)
    given = {"actor.model_name_or_path": "models/tiny", "data.prompt_dataset": "prompts.jsonl", "train.seed": 7}
    config = build(TrainPPOConfig(), given | {name.replace("__", "."): value for name, value in flags.items()})
    toml = config_toml(TRAIN_PPO_RAY, config)
    (folder / "config.toml").write_text(toml, encoding="utf-8")
    run = RunRecord(record, run="ab12", name=folder.name, ranks=1, goes_on=False, config_toml=toml)
    run.tokenizer(_tokenizer().backend_tokenizer.save)
    writer = SampleWriter(RecordPlace(folder=record, max_bytes=2**40), 0)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as rows:
        for step in range(1, steps + 1):
            made = episodes(step, steps)
            groups = _groups()
            run.batch(
                step, groups, _refs(made, groups), before={"state": {}, "kl": {}, "reward_norm": None}, sampling={}
            )
            writer.write(step, made, {image_name(image()): image()})
            metrics = metrics_of(step, steps, made)
            run.metrics(step, metrics)
            rows.write(json.dumps({"step": step, "time": 1e9 + step, **metrics}) + "\n")
            if step == steps:
                rows.write(json.dumps({"step": step, "time": 1e9 + step, "eval/eval_default_pass1": 0.75}) + "\n")
    evidence = {"evidence": f"train/group_reward_std is 0 {HOSTILE}", "fix": "--algo.dynamic_filtering_enable"}
    run.alarm({"step": 2, "time": 0.0, "name": "no_reward_variance", "state": "raised", **evidence})
    return folder


def _groups() -> list[Group]:
    failed = replace(FAILED, failure=FAILURE)
    return [
        Group(
            prompt=PromptItem(group_id=f"e0-p{n}", prompt="sort", position=n),
            samples=[INFO] * 8 + ([failed] if n == 0 else []),
            handle=f"h{n}",
        )
        for n in range(PER_STEP // 8)
    ]


def _refs(samples: list[RecordedSample], groups: list[Group]) -> list[SampleRef]:
    return [
        SampleRef(handle=group.handle, position=s.index % 8, index=s.index, reward=s.shaped, length=len(s.tokens))
        for s in samples
        for group in [groups[s.index // 8]]
    ]


def metrics_of(step: int, steps: int, samples: list[RecordedSample]) -> dict[str, float]:
    """What a step logs."""
    names = ("train/policy_loss", "train/entropy", "train/actor_grad_norm", "train/logprobs_diff", "rollout/sync_error")
    seeded = np.random.default_rng(step)
    return {
        "train/reward": float(np.mean([s.reward for s in samples if s.reward is not None])),
        "train/response_length": float(np.mean([s.trainable.sum() for s in samples])),
        **{name: float(seeded.random()) / step for name in names},
        "timing/generation": 0.5 + 0.1 * float(seeded.random()),
        "timing/make_experience": 0.2,
        "timing/ppo_train": 0.4,
        "timing/broadcast": 0.05,
        "timing/step_total": 1.4,
        "rollout/failed_samples": 1.0,
        "rollout/failed_samples_agent": 1.0,
    }
