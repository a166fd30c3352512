"""Trainer and engine compute the same after every push of an adapter, merged or alone; what goes wrong stops the run.

Engines, ranks and pushes are those of a run, on a real Ray; only the samples and the steps come from here.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.cluster import Cluster, connect
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.learner_actor import free_port
from openrlhf.launcher.ray.weight_push import Pause, WeightPush
from openrlhf.rollout.sync_check import SyncError, noise_bits
from support.adapter_runs import CHECK, LONG, LORA, asked, end, make_fleet, make_policy, new_push, on_ranks, train
from support.tiny_models import tiny_qwen3, tiny_qwen3_moe

pytestmark = [pytest.mark.proof, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1800)]

PUSHES = 5
KILLED_BEFORE = 3
MODES: dict[str, Pause | None] = {"sync": None, "async": None, "partial": Pause(clear_cache=True)}
"""sync: engines are idle. async: requests that came during the push wait for its end. partial: requests go on."""
PAIRS = [(form, tied) for tied in (True, False) for form in ("merged", "adapter")]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    connected = connect()
    yield connected
    connected.close()


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0]}-{'tied' if pair[1] else 'untied'}")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, loop: asyncio.Runner
) -> Iterator[tuple[EngineFleet, str]]:
    """A fleet of one engine, and its model."""
    form, tied = request.param
    model = tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", tied=tied, seed=1)
    fleet = make_fleet(cluster, model, serves=form == "adapter")
    loop.run(fleet.wait_started())
    yield fleet, model
    loop.run(fleet.shutdown())


async def push_once(push: WeightPush, fleet: EngineFleet, policy: Any, version: int, mode: str) -> float:
    """A push with requests around it, as the mode has them; the error of the check."""
    running = []
    if mode == "partial" and fleet.fit:
        running = [asyncio.ensure_future(asked(fleet, CHECK.prompts[:2], LONG))]
        await asyncio.sleep(0.2)
    elif mode == "async" and fleet.fit:
        running = [asyncio.ensure_future(_during(push, fleet))]
    metrics = await push.push(policy, version)
    for task in running:
        answers = await asyncio.wait_for(task, 120)
        versions = {number for answer in answers for number in answer.versions}
        assert versions == ({version - 1, version} if mode == "partial" else {version}), (mode, versions)
    return metrics["rollout/sync_error"]


async def _during(push: WeightPush, fleet: EngineFleet) -> list[Any]:
    while not push.lock.locked():  # noqa: ASYNC110 - a test
        await asyncio.sleep(0.001)
    engine: Any = fleet.engines[0].actor
    while push.lock.locked() and not await engine.__ray_call__.remote(_takes_weights):
        pass
    return await asked(fleet, CHECK.prompts[:2], LONG.with_(max_tokens=8))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engine_and_trainer_agree_after_every_push(
    engines: tuple[EngineFleet, str], cluster: Cluster, loop: asyncio.Runner, stage: int
) -> None:
    fleet, model = engines

    async def main() -> dict[str, list[float]]:
        policy = await make_policy(cluster, model, stage=stage)
        found: dict[str, list[float]] = {}
        version = 0
        try:
            for mode, pause in MODES.items():
                for lost in (False, True):
                    push = new_push(fleet, pause)
                    fleet.fit = False  # what an earlier policy left is no version of this one
                    errors = found[f"{mode}{', engine lost' if lost else ''}"] = []
                    whole = 0
                    for number in range(PUSHES):
                        version += 1
                        await train(policy, version)
                        if lost and number == KILLED_BEFORE:
                            fleet.engines[0].kill()
                            while not await fleet.gone():  # noqa: ASYNC110 - in another process
                                await asyncio.sleep(0.05)
                            await push.recover(policy)
                            whole = push.last_bytes
                        errors.append(await push_once(push, fleet, policy, version, mode))
                    if lost:
                        assert push.last_bytes < whole, "all of the model went to the new engine, not to it again"
        finally:
            await end(policy)
        return found

    found = loop.run(main())
    print()
    for cell, errors in found.items():
        print(f"{cell:>22}: " + " ".join(f"{error:.1e}" for error in errors))
    assert len(found) == 2 * len(MODES)
    assert all(len(errors) == PUSHES and max(errors) < 1e-4 for errors in found.values())


def test_a_mixture_of_experts_takes_merged_adapters(tmp_path: Path, cluster: Cluster, loop: asyncio.Runner) -> None:
    # the experts, which no later push brings, are packed in a way of their own on CPUs
    model = tiny_qwen3_moe(str(tmp_path / "tiny"), 1)
    fleet = make_fleet(cluster, model, serves=False)

    async def main() -> list[float]:
        await fleet.wait_started()
        policy = await make_policy(cluster, model, stage=3, lora=replace(LORA, target_modules=("q_proj", "o_proj")))
        push, errors = new_push(fleet), []
        try:
            for version in range(1, PUSHES + 1):
                await train(policy, version)
                errors.append(await push_once(push, fleet, policy, version, "sync"))
        finally:
            await end(policy)
            await fleet.shutdown()
        return errors

    errors = loop.run(main())
    print("\nmixture: " + " ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-4


@pytest.mark.parametrize("serves", [False, True], ids=["merged", "adapter"])
def test_sound_pushes_in_half_precision_stop_no_run(
    tmp_path: Path, cluster: Cluster, loop: asyncio.Runner, serves: bool
) -> None:
    model = tiny_qwen3(tmp_path / "tiny", seed=1)
    fleet = make_fleet(cluster, model, serves=serves, dtype="bfloat16")
    check = replace(CHECK, tolerance=None, bits=noise_bits("bfloat16"))

    async def main() -> list[float]:
        await fleet.wait_started()
        policy = await make_policy(cluster, model, stage=2, dtype="bf16")
        push, shares = new_push(fleet, check=check), []
        try:
            for version in range(1, 2 * PUSHES + 1):
                await train(policy, version)
                metrics = await push.push(policy, version)
                shares.append(metrics["rollout/sync_error"] / metrics["rollout/sync_tolerance"])
        finally:
            await end(policy)
            await fleet.shutdown()
        return shares

    shares = loop.run(main())
    print("\nerrors in units of the tolerance: " + " ".join(f"{share:.2f}" for share in shares))
    assert len(shares) == 2 * PUSHES


def _takes_weights(actor: Any) -> bool:
    return actor.engine._updating


# -- faults


def _unscaled(actor: Any) -> None:
    """The scale alpha / rank is forgotten."""
    own = actor.role.learner
    scale = own.spec.ds.lora.alpha / own.spec.ds.lora.rank
    stream = type(own).named_parameter_buckets

    def spoiled(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for bucket in stream(own, *args, **kwargs):
            yield [(name, tensor / scale if ".lora_B." in name else tensor) for name, tensor in bucket]

    own.named_parameter_buckets = spoiled


def _scaled_twice(actor: Any) -> None:
    """The scale is in the product already and applied again."""
    own = actor.role.learner
    scale = own.spec.ds.lora.alpha / own.spec.ds.lora.rank
    stream = type(own).named_parameter_buckets

    def spoiled(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for bucket in stream(own, *args, **kwargs):
            yield [(name, tensor * scale if ".lora_B." in name else tensor) for name, tensor in bucket]

    own.named_parameter_buckets = spoiled


def _keeps_sending_the_old(actor: Any) -> None:
    """What the engine gets from now on is what it has: pushes are lost."""
    own = actor.role.learner
    stream = type(own).named_parameter_buckets
    options: dict[str, Any] = {"skip_frozen": True, "form": "apart"}
    old = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in stream(own, 1 << 30, **options)]

    def spoiled(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for _ in stream(own, *args, **kwargs):
            pass  # the ranks stay in step
        yield from old

    own.named_parameter_buckets = spoiled


def _sound(actor: Any) -> None:
    vars(actor.role.learner).pop("named_parameter_buckets", None)


IN_ENGINE = ("sampled without", "scored without", "stale cache")
IN_TRAINER: dict[str, Callable[[Any], None]] = {
    "alpha / r forgotten": _unscaled,
    "alpha / r twice": _scaled_twice,
    "lost push": _keeps_sending_the_old,
}


@pytest.fixture(scope="module")
def faulty(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, loop: asyncio.Runner
) -> Iterator[tuple[EngineFleet, Any]]:
    """An engine that can be told to go wrong, and a policy."""
    model = tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", seed=1)
    fleet = make_fleet(cluster, model, serves=True, engine="support.adapter_engines:FaultyAdapters")
    loop.run(fleet.wait_started())
    policy = loop.run(make_policy(cluster, model, stage=2))
    yield fleet, policy
    loop.run(end(policy))
    loop.run(fleet.shutdown())


def _set_fault(actor: Any, fault: str) -> None:
    actor.engine.fault = fault


@pytest.mark.parametrize("fault", [*IN_ENGINE, *IN_TRAINER])
def test_a_fault_stops_the_run(
    faulty: tuple[EngineFleet, Any], loop: asyncio.Runner, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    # K08: the adapter left out of a way, another scale, keys of an older adapter, a push that never came
    fleet, policy = faulty

    async def main() -> str:
        push = new_push(fleet)
        await push.push(policy, 1)
        await train(policy, 1)
        await push.push(policy, 2)
        engine: Any = fleet.engines[0].actor
        if fault in IN_ENGINE:
            await engine.__ray_call__.remote(_set_fault, fault)
        else:
            await on_ranks(policy, IN_TRAINER[fault])
        try:
            for version in (3, 4):  # a cache is stale from the second push on
                await train(policy, version)
                await push.push(policy, version)
        except SyncError as error:
            return str(error)
        finally:
            await engine.__ray_call__.remote(_set_fault, "")
            await on_ranks(policy, _sound)
        return ""

    said = loop.run(main())
    print(f"\n{fault}: {said[:160]}")
    assert "does not compute what the trainer computes" in said
    assert ("which samples" in said) is (fault in ("sampled without", "stale cache"))


def test_the_row_of_the_self_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.launcher.selfcheck.push_adapter import adapter_round
    from openrlhf.learner.setup import leave_distributed

    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    try:
        outcome = adapter_round(tmp_path, "gloo")
    finally:
        leave_distributed()
    print(f"\n{outcome.detail}")
    assert outcome.numbers["difference"] < 1e-4
    assert outcome.numbers["share_of_bytes"] < 0.5  # of a tiny model


# -- what is exported

BARE = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    model, adapter, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, enable_lora=True, max_lora_rank=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": p} for p in prompts]
    found = {}
    for name, request in (("with", LoRARequest("exported", 1, adapter)), ("without", None)):
        answers = [o.outputs[0] for o in llm.generate(asked, sampling, lora_request=request, use_tqdm=False)]
        found[name] = [
            [list(a.token_ids), [step[t].logprob for step, t in zip(a.logprobs, a.token_ids)]] for a in answers
        ]
    print("FOUND " + json.dumps(found))
"""


def _export(actor: Any, path: str) -> None:
    actor.role.learner.export_hf(path)


def test_a_bare_vllm_loads_the_exported_adapter(tmp_path: Path, cluster: Cluster, loop: asyncio.Runner) -> None:
    model = tiny_qwen3(tmp_path / "tiny", seed=1)
    prompts = [list(p) for p in CHECK.prompts[:3]]

    async def trained() -> Any:
        policy = await make_policy(cluster, model, stage=3)
        try:
            for seed in range(3):
                await train(policy, seed)
            await on_ranks(policy, _export, str(tmp_path / "adapter"))
            found = await asyncio.to_thread(_bare, tmp_path, model, prompts)
            texts = {key: [[*p, *ids] for p, (ids, _) in zip(prompts, found[key], strict=True)] for key in found}
            own = {
                key: (await policy.wait(policy.ask(PolicyRank.check_logprobs, texts[key]), "test"))[0] for key in found
            }
        finally:
            await end(policy)
        return found, own

    found, own = loop.run(trained())
    errors = {
        key: max(
            abs(a - b)
            for row, (_, said) in zip(own[key], found[key], strict=True)
            for a, b in zip(row[len(prompts[0]) :], said, strict=True)
        )
        for key in found
    }
    print(f"\nlargest |log-prob difference| with the adapter {errors['with']:.1e}, without {errors['without']:.1e}")
    assert errors["with"] < 1e-4 < 1e-2 < errors["without"]


def _bare(folder: Path, model: str, prompts: list[list[int]]) -> Any:
    script = folder / "bare.py"
    script.write_text(BARE)
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(script), model, str(folder / "adapter"), json.dumps(prompts)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | env,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))
