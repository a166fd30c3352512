"""The real stack in one process tree: 2 learner ranks, 2 engines, ZeRO-3, tied and untied embeddings, adapters.

Tied, the engines serve the adapter that is trained; untied, they get it merged.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.agents.types import Trajectory
from openrlhf.launcher import threads
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.preflight import Prepared, prepare
from openrlhf.launcher.ranks.batches import gather_trainable
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.cluster import Cluster, connect
from openrlhf.launcher.ray.engine_actor import GENERATION, SLOTS, EngineActor, engine_actor
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.start import engine_specs, start_parts
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.run_record import open_record
from openrlhf.launcher.resolve import resolve
from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.vllm.arguments import environment
from support.adapter_engines import FOLDER
from support.stack_runs import make_workspace
from support.tiny_models import tiny_qwen3
from support.trainer_fakes import FakeSink

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack"), pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    connected = connect()
    yield connected
    connected.close()


def configure(path: Path, *, tied: bool) -> tuple[TrainPPOConfig, Prepared]:
    workspace = make_workspace(path, tiny_qwen3(path / "tiny", tied=tied), prompts=8)
    flags: dict[str, Any] = {
        "actor.model_name_or_path": workspace.model,
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "reward.remote_url": str(workspace.path / "reward.py"),
        "data.prompt_dataset": str(workspace.path / "prompts.jsonl"),
        "data.input_key": "prompt",
        "data.max_len": 64,
        "vllm.num_engines": 2,
        "vllm.enable_prefix_caching": True,
        "ds.zero_stage": 3,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.0,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 8,
        "rollout.top_p": 1.0 if tied else 0.9,
        "rollout.micro_batch_size": 16,
        "train.batch_size": 8,
        "train.micro_batch_size": 8,
        "ckpt.output_dir": str(path / "exported"),
        "ckpt.path": str(path / "checkpoints"),
        "logger.record_dir": str(path / "records"),
        "vllm.stats_enable": tied,
        "ds.lora.rank": 8,
        "ds.lora.alpha": 64,
        "vllm.lora_push": "adapter" if tied else "merged",
    }
    if tied:  # a loss and an estimator by file travel to the ranks
        flags["actor.loss_path"] = str(EXAMPLES / "policy_loss.py")
        flags["algo.advantage.path"] = str(EXAMPLES / "advantages.py")
    else:  # a larger teacher with ranks of its own, and no rewards
        teacher = tiny_qwen3(path / "teacher", tied=False, seed=1, hidden_size=96, intermediate_size=128)
        flags |= {
            "algo.advantage.estimator": "on_policy_distill",
            "algo.distill.divergence": "reverse",
            "ref.model_name_or_path": teacher,
            "ref.num_gpus_per_node": 1,
            "reward.remote_url": None,
        }
    config, _ = resolve(build(TrainPPOConfig(), flags), Machine(gpus=0))
    return config, prepare(config)


async def sampled_ratios(parts: TrainerParts, prepared: Prepared) -> tuple[list[float], list[float]]:
    """|exp(trainer - rollout) - 1| of every token of one freshly sampled group: of what sampling kept, and of all."""
    group = await parts.rollout.run_group(prepared.prompts.item(0, episode=9))
    refs = [
        SampleRef(handle=group.handle, position=i, index=i, reward=0.0, length=s.total_length)
        for i, s in enumerate(group.samples)
    ]
    policy = parts.learner.policy  # type: ignore[attr-defined]
    scored: dict[int, Any] = {}

    def own(actor: Any, share: Any) -> Any:
        """Not `PolicyRank.logprobs`, which leaves the adapters out: those are the reference's."""
        batch = actor.role.load(share).batch
        return gather_trainable(batch, actor.role.learner.score(batch).logprobs)

    shares = zip(policy.ranks, policy.shares([refs]), strict=True)
    for part in await policy.wait([rank.actor.__ray_call__.remote(own, share) for rank, share in shares], "test"):
        scored.update(part)
    trajectories: list[Trajectory] = ray.get(group.handle)
    rows = [list(t.token_ids) for t in trajectories]
    full = (await policy.wait(policy.ask(PolicyRank.check_logprobs, rows), "test"))[0]
    ratios, uncut = [], []
    for index, trajectory in enumerate(trajectories):
        at = [i for i, t in enumerate(trajectory.trainable) if t]
        rollout = [trajectory.logprobs[i] for i in at]
        ratios += [abs(math.exp(new - old) - 1) for new, old in zip(scored[index].tolist(), rollout, strict=True)]
        uncut += [abs(math.exp(full[index][i] - old) - 1) for i, old in zip(at, rollout, strict=True)]
    return ratios, uncut


async def ask(engine: Remote[EngineActor], prompts: list[list[int]]) -> list[Any]:
    """Greedy answers, or why there are none."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [GenerateRequest(request_id=f"g{i}", token_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
    results: dict[int, Any] = {}
    async for ref in engine.stream(EngineActor.generate_many, requests):
        results.update(dict(await ref))
    return [results[i] for i in range(len(prompts))]


async def greedy(engine: Remote[EngineActor], prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy answers with their log-probs."""
    return [(list(answer.token_ids), list(answer.logprobs)) for answer in await ask(engine, prompts)]


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def image(pid: int) -> bytes:
    """Where the program in this process was loaded to: a fork keeps it, a program that is started gets it anew."""
    return Path(f"/proc/{pid}/auxv").read_bytes()


def sockets(pid: int) -> set[str]:
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


def forked_workers(cluster: Cluster) -> set[str]:
    """Kinds of the workers that are forks of the process with the imports. Engines have a core, which is one too."""
    assert cluster.warm is not None
    origin, kinds = cluster.warm._process.pid, set()
    for pid in children(origin):
        assert image(pid) == image(origin)
        kinds.add(kind := Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ").partition(".")[0])
        if kind == "ray::EngineActor":
            (core,) = [child for child in children(pid) if image(child) == image(origin)]
            assert not sockets(core) & sockets(pid), "Ray would take the actor for alive as long as its core is"
    return kinds


def threads_of(parts: TrainerParts) -> dict[str, list[int]]:
    """What ranks compute with, and what engines are told: MKL takes no more threads than the machine has cores."""
    learner: Any = parts.learner
    engines = learner._push._fleet.engines
    ranks = [r.actor.__ray_call__.remote(lambda _: __import__("torch").get_num_threads()) for r in learner.policy.ranks]
    told = [e.actor.__ray_call__.remote(lambda _: int(os.environ["OMP_NUM_THREADS"])) for e in engines]
    return {"ranks": ray.get(ranks), "engines": ray.get(told)}


async def train_and_compare(config: TrainPPOConfig, prepared: Prepared, cluster: Cluster) -> dict[str, Any]:
    """Two steps; then the engines' answers beside those of an engine that loads the exported adapter by itself."""
    sink = FakeSink()
    record = open_record(config, prepared.tokenizer, run="r", toml="", prompts=len(prepared.prompts))
    parts = replace(await start_parts(config, prepared, cluster, sink), record=record)
    prompts = [prepared.tokenizer.encode(f"sort {i}4321") for i in range(4)]
    try:
        fleet = parts.learner._push._fleet  # type: ignore[attr-defined]
        forks = forked_workers(cluster)
        early = await ask(fleet.engines[0], prompts[:1])
        summary = await Trainer(config, parts).run()
        ratios, uncut = await sampled_ratios(parts, prepared)
        counts = threads_of(parts)
        live = [await greedy(engine, prompts) for engine in fleet.engines]
    finally:
        await parts.rollout.shutdown()
        await parts.learner.shutdown()
    (spec,) = engine_specs(build(config, {"vllm.num_engines": 1}), gpus=0)
    spec = replace(spec, lora_rank=config.ds.lora.rank, engine="support.adapter_engines:AdapterFromFolder")
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), FOLDER: config.ckpt.output_dir}
    variables = cluster.worker_environment() | environment(spec) | own
    actor = engine_actor().options(num_cpus=0, runtime_env={"env_vars": variables}).remote()
    fresh: Remote[EngineActor] = Remote("fresh engine", actor)
    await fresh.ask(EngineActor.start, spec, serve=True)
    reference = await greedy(fresh, prompts)
    await fresh.ask(EngineActor.shutdown)
    return {
        "early": early,
        "forks": forks,
        "summary": summary,
        "steps": sink.steps,
        "ratios": ratios,
        "uncut": uncut,
        "threads": counts,
        "live": live,
        "fresh": reference,
    }


def test_an_engine_answers_while_a_thousand_streams_wait_for_a_push(cluster: Cluster) -> None:
    """With no slot left for another one it gives signs of life, scores, and takes the push that they wait for."""
    slots = SLOTS[GENERATION]
    count = slots + 5

    async def main() -> list[int]:
        env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
        actor = engine_actor().options(num_cpus=0, runtime_env=env).remote()
        engine: Remote[EngineActor] = Remote("engine 0", actor)
        await engine.ask(EngineActor.start, EngineSpec(model="none", engine="support.busy_engine:PausedEngine"))
        requests = [GenerateRequest(request_id=f"r{i}", token_ids=[i], sampling=SamplingParams()) for i in range(count)]
        streams = [engine.stream(EngineActor.generate_many, [request]) for request in requests]
        while (await engine.ask(EngineControl.health)).running < slots:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.1)
        # it is answered while every slot of the streams is taken and others wait for one
        answer = await engine.ask(EngineControl.health)
        assert (answer.version, answer.running, answer.paused) == (0, slots, True)
        assert await engine.ask(EngineControl.score, [[1, 2, 3]]) == [[0.0, 0.0, 0.0]]
        await engine.ask(EngineControl.finish_weight_update, 7)
        chunks = [await ref for stream in streams async for ref in stream]
        await engine.ask(EngineActor.shutdown)
        engine.kill()
        answers = [result for chunk in chunks for _, result in chunk]
        assert {tuple(answer.versions) for answer in answers if isinstance(answer, Generation)} == {(7,)}
        return [token for answer in answers if isinstance(answer, Generation) for token in answer.token_ids]

    assert asyncio.run(asyncio.wait_for(main(), 120)) == list(range(count))


def check_record(record: Record) -> None:
    """Both steps of both ranks are recorded, with what engine and trainer said of the same tokens."""
    assert record.complete_steps() == [1, 2]
    for step in (1, 2):
        samples = [s for group in record.groups(step) for s in group.samples.values()]
        assert [s.index for s in samples] == list(range(16))
        for sample in samples:
            assert sample.trainer_logprobs is not None
            assert abs(sample.trainer_logprobs - sample.engine_logprobs).max() < 1e-3
            assert set(sample.versions[sample.trainable].tolist()) == {step - 1}
            assert record.decode(sample.tokens[: sample.prompt_length]) == sample.prompt


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied-distilled"])
def test_engines_hold_what_was_trained(  # B026, B128, B130
    tmp_path: Path, cluster: Cluster, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied with the one thread that OMP_NUM_THREADS says, untied with what a large model gets of 6 cores."""
    if not tied:
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(threads, "SMALL_MODEL", 0)
        monkeypatch.setattr(cluster, "cores", 6)
    config, prepared = configure(tmp_path, tied=tied)
    result = asyncio.run(train_and_compare(config, prepared, cluster))
    rank, engine = (1, 1) if tied else (2, 3)  # three ranks score together, two engines sample
    assert result["threads"]["ranks"] == [rank, rank]
    assert result["threads"]["engines"] == [engine, engine]
    assert "waits for its first weight push" in result["early"][0].message
    assert cluster.temp_dir is not None
    said = (cluster.temp_dir / "warm.log").read_text()
    assert result["forks"] >= {"ray::EngineActor", "ray::PolicyActor", "ray::AgentActor"}, said
    assert result["summary"].optimizer_steps == 4
    start = {"driver", "ray", "engines", "engine_load", "policy", "agents", "total"}
    times = [{k: v for k, v in step.items() if k.startswith("timing/start_")} for step in result["steps"]]
    assert times[0].keys() >= {f"timing/start_{part}" for part in start}
    assert min(times[0].values()) > 0
    assert times[0]["timing/start_engine_load"] <= times[0]["timing/start_engines"] <= times[0]["timing/start_total"]
    assert times[1] == {}
    assert [step["rollout/sync_error"] < 1e-4 for step in result["steps"]] == [True, True]
    assert max(result["ratios"]) < 1e-3
    uncut = sum(result["uncut"]) / len(result["uncut"])
    print(f"mean |ratio - 1| {sum(result['ratios']) / len(result['ratios']):.1e}, over all tokens {uncut:.1e}")
    assert (uncut < 1e-3) is tied  # the other run samples with top-p 0.9
    assert [step.get("train/outside_kept") for step in result["steps"]] == [None if tied else 0.0] * 2
    assert result["steps"][0]["train/actor_grad_norm"] > 0
    check_record(Record.open(tmp_path / "records"))
    assert ("engine/running_requests" in result["steps"][0]) is tied
    assert not tied or 0 < result["steps"][0]["engine/kv_cache_usage"] <= 1
    assert ("train/distill_loss" in result["steps"][0]) is not tied
    assert tied or 0 < result["steps"][-1]["train/distill_loss"] < result["steps"][0]["train/distill_loss"]
    for answers in result["live"]:
        for (tokens, logprobs), (want, want_logprobs) in zip(answers, result["fresh"], strict=True):
            assert tokens == want
            assert logprobs == pytest.approx(want_logprobs, abs=1e-4)
    whole, adapter = (
        sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        for folder in (config.actor.model_name_or_path or "", config.ckpt.output_dir)
    )
    pushed = result["steps"][-1]["rollout/push_bytes"]
    assert pushed <= adapter if tied else adapter < pushed <= whole
