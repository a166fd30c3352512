"""Both seams in a real run on Ray: engines and learners in plain PyTorch, which flags name; no vLLM, no DeepSpeed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.preflight import prepare
from openrlhf.launcher.ray.cluster import Cluster, connect
from openrlhf.launcher.ray.engine_actor import EngineActor, engine_actor
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.start import start_parts
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.trainer.loop import RunSummary, Trainer
from openrlhf.learner.config import ZERO_BACKEND
from openrlhf.rollout.engine import EngineControl, InferenceEngine
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.weights.sender import WeightSender
from openrlhf.rollout.weights.wire import plan_buckets, specs_of
from support.launcher_flags import parse_train_ppo
from support.stack_runs import make_workspace
from support.stub_engine import StubEngine
from support.tiny_models import tiny_qwen3
from support.trainer_fakes import FakeSink

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack"), pytest.mark.timeout(600)]

STUB = "support.stub_engine:StubEngine"
PLAIN = "support.plain_backend:build_plain"
IS_AN_ENGINE: type[InferenceEngine] = StubEngine  # for the type checker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        tests = str(Path(__file__).parents[1])
        patch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
        connected = connect()
        yield connected
        connected.close()


@pytest.mark.parametrize("ds_backend", [ZERO_BACKEND, PLAIN], ids=["deepspeed", "plain"])
def test_the_whole_loop_runs_with_another_engine_and_backend(tmp_path: Path, cluster: Cluster, ds_backend: str) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"))
    flags = [*workspace.flags, "--vllm.engine_class", STUB, "--ds.backend", ds_backend, "--actor.adam.lr", "1e-3"]
    config, _ = resolve(parse_train_ppo(flags), Machine(gpus=0))
    sink = FakeSink()

    async def main() -> RunSummary:
        parts = await start_parts(config, prepare(config), cluster, sink)
        try:
            return await Trainer(config, parts).run()
        finally:
            await parts.rollout.shutdown()
            await parts.learner.shutdown()

    summary = asyncio.run(main())
    assert (summary.steps, summary.optimizer_steps) == (2, 2)
    assert all(step["rollout/sync_error"] < 1e-4 for step in sink.steps)
    assert all(step["train/actor_grad_norm"] > 0 for step in sink.steps)
    assert list(Path(config.ckpt.output_dir).glob("*.safetensors"))


def test_a_push_in_the_middle_of_samples_that_go_on_after_it(tmp_path: Path, cluster: Cluster) -> None:
    old, new = (tiny_qwen3(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    named = list(AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).named_parameters())
    plan = plan_buckets(specs_of(named), 100_000)
    sampling = SamplingParams(max_tokens=200, seed=3, ignore_eos=True)
    requests = [GenerateRequest(request_id=f"r{i}", token_ids=[5, 6 + i], sampling=sampling) for i in range(2)]

    async def main() -> list[Generation]:
        actor = engine_actor().options(num_cpus=0, runtime_env={"env_vars": cluster.worker_environment()}).remote()
        engine: Remote[EngineActor] = Remote("engine 0", actor)
        await engine.ask(EngineActor.start, EngineSpec(model=old, engine=STUB, max_model_len=256), serve=True)
        stream = engine.stream(EngineActor.generate_many, requests)
        while (await engine.ask(EngineControl.health)).running < len(requests):  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)
        await engine.ask(EngineControl.pause)
        sender = WeightSender()
        joining = engine.ask(EngineControl.init_weight_transfer, sender.open(2, 1).for_engine(1))
        await asyncio.to_thread(sender.connect)
        await joining
        receiving = engine.ask(EngineControl.receive_weights, plan, 1)
        await asyncio.to_thread(sender.send, [named], plan, 1)
        await receiving
        await engine.ask(EngineControl.resume)
        results = [result async for ref in stream for _, result in await ref]
        sender.close()
        await engine.ask(EngineActor.shutdown)
        engine.kill()
        return [result for result in results if isinstance(result, Generation)]

    answers = asyncio.run(asyncio.wait_for(main(), 120))
    assert len(answers) == len(requests)
    for answer in answers:
        before = list(answer.versions).count(0)
        assert list(answer.versions) == [0] * before + [1] * (200 - before)
        assert 0 < before < 200
