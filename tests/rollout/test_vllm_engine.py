"""The engine on real vLLM: one host process with a tied and an untied model and a mixture, shared by all tests."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.rollout.requests import GenerateRequest, RequestFailure
from openrlhf.rollout.sync_check import check_sequences, mean_difference
from openrlhf.rollout.weights.wire import plan_buckets, specs_of
from support.rollout_engine import RemoteError
from support.rollout_stage import PROMPT, Stage, request
from support.tiny_models import byte_tokenizer

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1000)]

BOTH = pytest.mark.parametrize("name", ["tied", "untied"])


def segments() -> set[Path]:
    """All shared-memory segments; not semaphores, which other tests' spawned processes have too."""
    return {p for p in Path("/dev/shm").iterdir() if not p.name.startswith("sem.mp-")}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("engines"))
    before = segments()
    yield stage
    cores = stage.host.children()
    images = [Path(f"/proc/{pid}/auxv").read_bytes() for pid in (stage.host.process.pid, *cores)]
    assert images.count(images[0]) == 1 + len(stage.versions), "a fork keeps the place of its program in memory"
    stage.pool.shutdown()
    stage.host.close()
    assert stage.host.process.exitcode == 0
    assert not [pid for pid in cores if Path(f"/proc/{pid}").exists()]
    assert not segments() - before


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_sampling_distribution(stage: Stage, name: str, temperature: float) -> None:  # B026
    answer = stage.generate(name, temperature=temperature, max_tokens=48, seed=3, ignore_eos=True)
    assert len(answer.token_ids) == 48
    assert answer.finish_reason == "length"
    assert stage.check(name, PROMPT, answer, temperature) < 1e-4


def kept_by(probabilities: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The tokens that truncation leaves, by definition: a bool per token of one distribution [V]."""
    order = probabilities.argsort(descending=True)
    before = torch.zeros_like(probabilities)
    before[order] = probabilities[order].cumsum(0) - probabilities[order]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    likely = probabilities >= min_p * probabilities.max()
    return (rank < (top_k or len(order))) & (before < top_p) & likely


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.7}], ids=str)
def test_truncation_leaves_the_likeliest_tokens(stage: Stage, cut: dict[str, Any]) -> None:  # B026
    answer = stage.generate("untied", max_tokens=32, seed=1, ignore_eos=True, **cut)
    with torch.no_grad():
        logits = stage.current["untied"](torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for probabilities, token, logprob in zip(
        logits.double().softmax(-1), answer.token_ids, answer.logprobs, strict=True
    ):
        kept = kept_by(probabilities, **cut)
        assert 1 <= int(kept.sum()) < len(kept) / 2
        assert kept[token]
        assert logprob == pytest.approx(float((probabilities[token] / probabilities[kept].sum()).log()), abs=1e-4)
    core = pytest.importorskip("openrlhf.core.logprobs")  # the trainer's part
    tokens, rollout = torch.tensor(answer.token_ids), torch.tensor(answer.logprobs)
    sets = core.kept_from_logits(logits, tokens, core.Truncation(**cut))[0], None
    own, uncut = ((core.logprobs_from_logits(logits, tokens, 1.0, s) - rollout).expm1().abs().mean() for s in sets)
    assert float(own) < 1e-4 < 0.1 < float(uncut)


def test_an_answer_keeps_its_structure(stage: Stage) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"enum": ["yes", "no"]}}}
    answer = stage.generate("untied", max_tokens=16, seed=5, structure=json.dumps(tag))
    assert byte_tokenizer().decode(list(answer.token_ids), skip_special_tokens=True) in ('"yes"', '"no"')
    assert answer.finish_reason == "stop"
    assert answer.logprobs[0] == pytest.approx(0.0, abs=1e-5)  # among the allowed tokens: a quotation mark alone
    with pytest.raises(RemoteError) as caught:
        stage.generate("untied", structure='{"type": "none_such"}')
    assert caught.value.kind == "RequestRejectedError"
    assert len(stage.generate("untied", max_tokens=4, ignore_eos=True).token_ids) == 4


def test_the_likeliest_tokens_of_every_place(stage: Stage) -> None:
    answer = stage.generate("untied", max_tokens=8, seed=7, ignore_eos=True, top_logprobs=3)
    plain = stage.generate("untied", max_tokens=8, seed=7, ignore_eos=True)
    assert (answer.token_ids, answer.logprobs, plain.top_logprobs) == (plain.token_ids, plain.logprobs, ())
    with torch.no_grad():
        logits = stage.current["untied"](torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    want = logits.log_softmax(-1).topk(3)
    for place, values, ids in zip(answer.top_logprobs, want.values.tolist(), want.indices.tolist(), strict=True):
        assert [token for token, _ in place] == ids
        assert [logprob for _, logprob in place] == pytest.approx(values, abs=1e-4)


def test_greedy_is_the_models_argmax(stage: Stage) -> None:
    answer = stage.generate("untied", temperature=0.0, max_tokens=8, ignore_eos=True)
    ids = list(PROMPT)
    for token in answer.token_ids:
        with torch.no_grad():
            assert int(stage.current["untied"](torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


@BOTH
def test_score_of_given_tokens(stage: Stage, name: str) -> None:
    rows = check_sequences(261)
    scores = stage.host.call(name, "score", rows)
    own = [stage.logprobs(name, row) for row in rows]
    assert mean_difference(own, scores) < 1e-5
    assert [s[0] for s in scores] == [0.0] * 4


def requests(count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{i}", token_ids=[5, 6 + i % 4], sampling=SamplingParams(max_tokens=12, seed=1000 + i)
        )
        for i in range(count)
    ]


def generate_many(stage: Stage, asked: Sequence[GenerateRequest]) -> dict[str, Generation | RequestFailure]:
    chunks = stage.host.call("untied", "generate_many", list(asked))
    assert sorted(i for chunk in chunks for i, _ in chunk) == list(range(len(asked)))
    return {asked[i].request_id: result for chunk in chunks for i, result in chunk}


def test_seeds_decide_samples_whatever_the_order(stage: Stage) -> None:
    asked = requests(32)
    first = generate_many(stage, asked)
    shuffled = random.Random(0).sample(asked, len(asked))
    assert generate_many(stage, shuffled) == first
    for one in asked[:3]:
        assert generate_many(stage, [one]) == {one.request_id: first[one.request_id]}
    assert len({tuple(g.token_ids) for g in first.values() if isinstance(g, Generation)}) == 32


def test_more_seeded_prompt_tokens_than_fit_into_one_step(stage: Stage) -> None:
    """A prompt that is prefilled in parts has its generator rewound, which kills an engine on CPU."""
    asked = [
        GenerateRequest(
            request_id=f"p{i}", token_ids=[5 + i % 200] * (180 + i % 7), sampling=SamplingParams(max_tokens=2, seed=i)
        )
        for i in range(64)
    ]
    results = generate_many(stage, asked)
    assert {type(result) for result in results.values()} == {Generation}
    for one in asked[-2:]:
        assert generate_many(stage, [one]) == {one.request_id: results[one.request_id]}


def test_a_bad_request_is_a_result_and_harms_no_other(stage: Stage) -> None:
    asked = requests(3)
    asked.insert(1, GenerateRequest(request_id="long", token_ids=[5] * 300, sampling=SamplingParams(max_tokens=2)))
    asked.append(GenerateRequest(request_id="hot", token_ids=[5], sampling=SamplingParams(temperature=-1.0)))
    asked.append(GenerateRequest(request_id="half", token_ids=[5.5], sampling=SamplingParams(max_tokens=2)))  # type: ignore[list-item]
    arrays = [replace(r, request_id=f"array-{r.request_id}", token_ids=list(np.array(r.token_ids))) for r in asked[2:4]]
    results = generate_many(stage, [*asked, *arrays])  # N10: integers of NumPy are integers
    assert [type(results[f"r{i}"]) for i in range(3)] == [Generation] * 3
    assert [results[f"array-r{i}"] for i in (1, 2)] == [results[f"r{i}"] for i in (1, 2)]
    for name, reason in (("long", "length 300"), ("hot", "temperature"), ("half", "no integer: 5.5")):
        failure = results[name]
        assert isinstance(failure, RequestFailure)
        assert not failure.engine_fault
        assert f"untied rejected request {name}: " in failure.message
        assert reason in failure.message


@pytest.mark.parametrize(("prompt", "reason"), [([], "empty"), ([999], "vocabulary")])
def test_requests_that_no_engine_can_serve(stage: Stage, prompt: list[int], reason: str) -> None:
    with pytest.raises(RemoteError, match=reason) as caught:
        stage.generate("untied", prompt, max_tokens=2)
    assert caught.value.kind == "RequestRejectedError"


def test_the_sampled_end_token_is_kept_with_its_logprob(stage: Stage) -> None:  # B025
    answers = (stage.generate("untied", temperature=2.0, max_tokens=200, seed=seed) for seed in range(40))
    answer = next(a for a in answers if a.finish_reason == "stop")
    assert answer.token_ids[-1] == 1
    assert 1 not in answer.token_ids[:-1]
    assert stage.check("untied", PROMPT, answer, 2.0) < 1e-4


def test_stop_strings_and_stop_tokens(stage: Stage) -> None:
    free = stage.generate("untied", max_tokens=40, seed=5, ignore_eos=True)
    token = free.token_ids[6]
    stopped = stage.generate("untied", max_tokens=40, seed=5, ignore_eos=True, stop_token_ids=(token,))
    end = list(free.token_ids).index(token) + 1
    assert list(stopped.token_ids) == list(free.token_ids[:end])
    assert stopped.finish_reason == "stop"
    by_string = stage.generate("untied", max_tokens=200, seed=5, ignore_eos=True, stop=("e",))
    assert len(by_string.logprobs) == len(by_string.token_ids)


@pytest.mark.parametrize("name", ["tied", "untied", "mixture"])
def test_after_a_push_the_engine_computes_the_new_weights(stage: Stage, name: str) -> None:  # B128
    prompt = list(range(20, 130))  # several cache blocks, cached under the old weights
    stage.generate(name, prompt, max_tokens=4)
    old = scores = stage.host.call(name, "score", [prompt])
    for _ in range(2):
        report = stage.push(name)
        model = stage.current[name]
        assert report.nbytes == sum(p.numel() * 4 for p in model.parameters())
        assert report.messages < len(list(model.parameters()))
        answer = stage.generate(name, prompt, max_tokens=24, seed=1, ignore_eos=True)
        assert set(answer.versions) == {stage.versions[name]}
        assert stage.check(name, prompt, answer) < 1e-4
        scores = stage.host.call(name, "score", [prompt])
        assert mean_difference([stage.logprobs(name, prompt)], scores) < 1e-5
    assert max(abs(a - b) for a, b in zip(old[0], scores[0], strict=True)) > 0.1


def test_a_failed_push_makes_the_engine_unfit_until_a_whole_one(stage: Stage) -> None:
    stage.push("tied")
    sender = stage.connect("tied")
    named = stage.sent["tied"]
    plan = plan_buckets(specs_of(named), 100_000)
    receiving = stage.host.submit("tied", "receive_weights", plan, 99)
    with pytest.raises(ValueError, match="without 4 planned weights"):
        sender.send([named[:-4]], plan, 99)
    with pytest.raises(RemoteError, match="tied could not receive weights"):
        receiving.result(180)
    with pytest.raises(RemoteError, match="tied must not serve request") as caught:
        stage.generate("tied", max_tokens=2)
    assert caught.value.kind == "EngineDownError"
    assert "failed" in stage.host.call("tied", "health").unfit
    stage.connect("tied")
    stage.push("tied")
    answer = stage.generate("tied", max_tokens=24, seed=1)
    assert stage.check("tied", PROMPT, answer) < 1e-4
    assert stage.host.call("tied", "health").unfit == ""


def test_an_engine_told_another_plan_than_the_sender_refuses_it(stage: Stage) -> None:
    sender = stage.connect("untied")
    named = stage.sent["untied"]
    plan, other = plan_buckets(specs_of(named), 100_000), plan_buckets(specs_of(named), 90_000)
    receiving = stage.host.submit("untied", "receive_weights", other, 50)
    sending = stage.pool.submit(sender.send, [named], plan, 50)
    with pytest.raises(RemoteError, match="the trainer pushes version 50"):
        receiving.result(180)
    with pytest.raises(RuntimeError):
        sending.result(60)
    stage.connect("untied")
    stage.push("untied")


@pytest.mark.parametrize("clear_cache", [True, False])
def test_requests_continue_over_a_push_with_versions_per_token(stage: Stage, clear_cache: bool) -> None:
    name = "untied"
    stage.push(name)
    before, old_version = stage.current[name], stage.versions[name]
    asked = request(PROMPT, max_tokens=240, seed=8, ignore_eos=True)
    generating = stage.host.submit(name, "generate", asked)
    time.sleep(0.15)
    assert not generating.done()
    stage.host.call(name, "pause", clear_cache=clear_cache)
    stage.push(name)
    stage.host.call(name, "resume")
    answer = generating.result(180)
    assert len(answer.token_ids) == 240
    first = list(answer.versions).count(old_version)
    assert list(answer.versions) == [old_version] * first + [stage.versions[name]] * (240 - first)
    assert 0 < first < 240
    ids = [*PROMPT, *answer.token_ids]
    new = stage.logprobs(name, ids)[len(PROMPT) :]
    stage.current[name] = before
    old = stage.logprobs(name, ids)[len(PROMPT) :]
    assert max(abs(a - b) for a, b in zip(old[:first], answer.logprobs[:first], strict=True)) < 1e-4
    wrong = max(abs(a - b) for a, b in zip(new[first:], answer.logprobs[first:], strict=True))
    assert (wrong < 1e-4) is clear_cache  # without a cleared cache the old weights' keys and values stay in use


def test_requests_that_come_during_a_push_wait_for_its_end(stage: Stage) -> None:
    name = "untied"
    stage.push(name)
    stage.host.call(name, "pause")
    stage.new_model(name)
    named = stage.sent[name]
    plan, version = plan_buckets(specs_of(named), 100_000), stage.versions[name] + 1
    receiving = stage.host.submit(name, "receive_weights", plan, version)
    time.sleep(0.1)
    asking = stage.host.submit(name, "generate", request(PROMPT, max_tokens=8, seed=1, ignore_eos=True))
    time.sleep(0.2)
    assert not asking.done()
    stage._senders[name].send([named], plan, version)
    receiving.result(180)
    stage.versions[name] = version
    stage.host.call(name, "resume")
    answer = asking.result(180)
    assert list(answer.versions) == [version] * 8
    assert stage.check(name, PROMPT, answer) < 1e-4


def test_abort_delivers_what_was_sampled(stage: Stage) -> None:
    """How soon there is a token depends on the machine: after one of the waits there are some, and not all."""
    slow = SamplingParams(max_tokens=240, ignore_eos=True)
    asked = [GenerateRequest(request_id=f"slow-{i}", token_ids=PROMPT, sampling=slow) for i in range(2)]
    whole = False
    for wait in (0.1, 0.4, 1.6, 6.4):
        generating = stage.host.submit("untied", "generate_many", asked)
        time.sleep(wait)
        aborted = [stage.host.call("untied", "abort", ["slow-1", "slow"]), stage.host.call("untied", "abort")]
        answers = [answer for chunk in generating.result(180) for _, answer in chunk]
        assert [answer.finish_reason for answer in answers].count("abort") == sum(aborted)
        assert all(len(a.token_ids) == len(a.logprobs) <= 240 for a in answers)
        whole = aborted == [1, 1] and all(0 < len(a.token_ids) < 240 for a in answers)
        if whole:
            break
    assert whole, "no wait met the engine while it sampled"


def test_n12_requests_that_are_left_over_at_a_push_end_and_the_push_is_whole(stage: Stage) -> None:
    slow = SamplingParams(max_tokens=240, ignore_eos=True)
    asked = [GenerateRequest(request_id=f"left-{i}", token_ids=PROMPT, sampling=slow) for i in range(2)]
    generating = stage.host.submit("untied", "generate_many", asked)
    time.sleep(0.1)
    stage.push("untied")
    assert [answer.finish_reason for chunk in generating.result(180) for _, answer in chunk] == ["abort"] * 2
    answer = stage.generate("untied", max_tokens=24, seed=1)
    assert set(answer.versions) == {stage.versions["untied"]}
    assert stage.check("untied", PROMPT, answer) < 1e-4


def test_sleep_and_wake_do_no_harm_on_cpu(stage: Stage) -> None:
    first = stage.generate("tied", max_tokens=8, seed=1)
    stage.host.call("tied", "sleep")
    stage.host.call("tied", "wake", "weights")
    stage.host.call("tied", "wake", "kv_cache")
    assert stage.generate("tied", max_tokens=8, seed=1) == first


@BOTH
def test_a_prompt_that_is_in_the_cache_gives_the_same_samples_bit_for_bit(stage: Stage, name: str) -> None:
    stage.push(name)  # empties the cache
    prompt = [20 + (7 * i) % 200 for i in range(80)]
    requests = [request(prompt, max_tokens=8, seed=seed, ignore_eos=True) for seed in range(4)]
    alone = stage.host.call(name, "generate", requests[0])
    group = {number: answer for chunk in stage.host.call(name, "generate_many", requests) for number, answer in chunk}
    assert (group[0].token_ids, group[0].logprobs) == (alone.token_ids, alone.logprobs)
    assert max(stage.check(name, prompt, answer) for answer in group.values()) < 1e-4
