"""Vision-language models on both sides: a real engine samples with images, the learner's module scores the same.

Every family has an engine of its own. Nothing of Ray or DeepSpeed is needed for the numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.agents.executor import MultiTurnAgentExecutor, SingleTurnExecutor
from openrlhf.agents.testing.episodes import make_context
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.ranks.batches import build_batch
from openrlhf.launcher.tokenizers import load_vision_tokenizer
from openrlhf.launcher.vision import ImageProcessor, find_vision
from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.weights import checkpoint_buckets, metadata
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import TensorSpec, plan_buckets
from support.plain_backend import PlainEngine
from support.rollout_engine import EngineHost
from support.vision_models import EACH_PROCESSOR, tiny_vision

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1500)]

TEMPERATURE = 0.7
BUCKET = 200_000
# vLLM 0.32 on CPU: "CPU GDN attention requires BF16", so linear attention is compared in half precision.
HALF = {"qwen3_5"}
TOLERANCE = {"qwen3_5": 0.25}


def png(colour: str, size: tuple[int, int]) -> bytes:
    out = BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


RED, BLUE = png("red", (32, 32)), png("blue", (48, 32))


class HostedEngine:
    """An engine of the host process as agents see it."""

    def __init__(self, host: EngineHost, name: str) -> None:
        self.host, self.name = host, name

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, images: Any = None, *, group_id: str = ""
    ) -> Generation:
        request = GenerateRequest(
            request_id=group_id, token_ids=list(token_ids), sampling=sampling, images=images, group_id=group_id
        )
        return await asyncio.wrap_future(self.host.submit(self.name, "generate", request))


class Side:
    """One family: its engine, and its model as the learner holds it."""

    def __init__(self, host: EngineHost, family: str, path: str) -> None:
        self.host, self.family, self.path = host, family, path
        self.reader = ImageProcessor(path)
        self.tokenizer, _ = load_vision_tokenizer(path)
        vision = find_vision(path)
        assert vision is not None
        self.suppressed = vision.suppressed
        self.module = self.load(path)
        self.version = 0

    def load(self, path: str, *, freeze: bool = False) -> LearnerModule:
        ds = DsConfig(param_dtype="bf16" if self.family in HALF else "fp32", attn_implementation="sdpa")
        spec = LearnerSpec(
            role=Role.POLICY,
            model_path=path,
            ds=ds,
            optim=OptimConfig(),
            temperature=TEMPERATURE,
            suppressed_token_ids=self.suppressed,
            freeze_visual_encoder=freeze,
        )
        module = load_module(spec, torch.device("cpu"))
        module.check_head(torch.device("cpu"))
        return module

    def prompt(self, images: int, text: str = "colour?") -> str:
        renderer = ChatRenderer(self.tokenizer, apply_chat_template=True, image_token=self.reader.token)
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        return renderer.render([{"role": "user", "content": content}], images=images)

    def sample(self, *groups: Sequence[bytes], executor: Any = None) -> list[Trajectory]:
        """Two samples per group of images."""
        context = make_context(
            HostedEngine(self.host, self.family),
            tokenizer=self.tokenizer,
            n_samples=2,
            sampling=SamplingParams(temperature=TEMPERATURE),
            max_length=512,
            max_new_tokens=12,
            image_reader=self.reader,
            timeout=600.0,
        )

        async def run() -> list[Trajectory]:
            items = [
                PromptItem(group_id=f"g{i}", prompt=self.prompt(len(images)), images=tuple(images))
                for i, images in enumerate(groups)
            ]
            results = [await (executor or SingleTurnExecutor()).run_group(item, context) for item in items]
            return [t for group in results for t in group]

        return asyncio.run(run())

    def difference(self, samples: Sequence[Trajectory]) -> float:
        """Largest |engine log-prob - trainer log-prob| over all sampled tokens."""
        assert not [t.failure for t in samples if t.failed]
        batch = build_batch(
            samples,
            indices=range(len(samples)),
            rewards=[0.0] * len(samples),
            max_len=512,
            image_processor=self.reader,
        )
        inputs = build_inputs(batch, batch.action_mask, packed=False)
        with torch.no_grad():
            scored = inputs.scatter(self.module(inputs).primary, batch.tokens.shape)
        assert batch.rollout_logprobs is not None
        return float(((scored - batch.rollout_logprobs) * batch.action_mask).abs().max())

    def push(self, sender: WeightSender, *, skip_frozen: bool = False) -> int:
        """Send the module's weights to the engine; returns the bytes."""
        engine = PlainEngine(self.module)
        infos = metadata(engine, skip_frozen=skip_frozen)
        specs = [TensorSpec(i.name, str(i.dtype).removeprefix("torch."), i.shape) for i in infos]
        plan = plan_buckets(specs, BUCKET)
        self.version += 1
        receiving = self.host.submit(self.family, "receive_weights", plan, self.version)
        sender.send(checkpoint_buckets(engine, BUCKET, skip_frozen=skip_frozen), plan, self.version)
        receiving.result(180)
        return plan.nbytes

    def connect(self, generation: int) -> WeightSender:
        sender = WeightSender()
        address = sender.open(2, generation)
        joining = self.host.submit(self.family, "init_weight_transfer", address.for_engine(1))
        sender.connect()
        joining.result(60)
        return sender


@pytest.fixture(scope="module", params=EACH_PROCESSOR)
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    family = request.param
    path = tiny_vision(family, tmp_path_factory.mktemp(family), seed=3)
    vision = find_vision(path)
    assert vision is not None
    spec = EngineSpec(
        model=path,
        name=family,
        dtype="bfloat16" if family in HALF else "float32",
        max_model_len=512,
        max_images_per_prompt=3,
        suppressed_token_ids=vision.suppressed,
        engine_args={"num_gpu_blocks_override": 128},  # 4096 tokens
    )
    host = EngineHost([spec])
    yield Side(host, family, path)
    host.close()


def test_engine_and_trainer_agree_before_and_after_pushes(side: Side, tmp_path: Path) -> None:
    groups = ((RED,), (RED, BLUE), (BLUE,), ())
    samples = side.sample(*groups)
    before = side.difference(samples)
    side.module = side.load(tiny_vision(side.family, tmp_path / "new", seed=9))
    sender = side.connect(1)
    whole = side.push(sender)
    after = side.difference(side.sample(*groups))
    with torch.no_grad():  # as a run with a frozen encoder goes on
        frozen = side.load(str(tmp_path / "new"), freeze=True)
        for parameter in frozen.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.05)
    side.module = frozen
    part = side.push(sender, skip_frozen=True)
    last = side.difference(side.sample(*groups))
    print(
        f"{side.family}: {before:.2e} before, {after:.2e} after a push, {last:.2e} after one of {part} of {whole} bytes"
    )
    assert max(before, after, last) < TOLERANCE.get(side.family, 1e-4)
    assert part < whole


def test_image_tokens_are_never_sampled(side: Side) -> None:
    samples = side.sample(*[(RED,)] * 8)
    sampled = {t for s in samples for t, own in zip(s.token_ids, s.trainable, strict=True) if own}
    assert sampled
    assert not sampled & set(side.suppressed)


class Shows:
    """Two turns, a second picture after the first answer."""

    feedback = ""

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        self.turn += 1
        done = self.turn == 2
        shown = () if done else (Image.new("RGB", (32, 48), "green"),)
        feedback = "" if done else self.feedback
        return {"rewards": 1.0, "environment_feedback": feedback, "environment_images": shown, "done": done}


def test_pictures_of_an_environment_reach_both_sides(side: Side) -> None:
    agent = type("Agent", (Shows,), {"feedback": "\n" + side.prompt(1)})
    samples = side.sample((RED,), (RED, BLUE), executor=MultiTurnAgentExecutor(agent))
    assert [len(t.turns) for t in samples] == [2] * 4
    assert [len(t.images) for t in samples] == [2, 2, 3, 3]
    assert side.difference(samples) < TOLERANCE.get(side.family, 1e-4)
