from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.rollout.requests import GenerateRequest, RequestRejectedError
from openrlhf.rollout.router import MAX_EVICTIONS, MAX_MOVES, Router, RouterTimeouts
from support.rollout_fakes import EchoEngine

FAST = RouterTimeouts(probe_interval=0.05, probe=0.05, no_engine=0.2)


async def ask(router: Router, prompt: int, sample: int) -> tuple[int, int, Generation]:
    answer = await router.generate([prompt, sample], SamplingParams(max_tokens=8), group_id=f"p{prompt}")
    return prompt, sample, answer


async def ask_all(router: Router, prompts: int, samples: int) -> list[tuple[int, int, Generation]]:
    return await asyncio.gather(*(ask(router, p, s) for s in range(samples) for p in range(prompts)))


def check_answers(answers: list[tuple[int, int, Generation]]) -> None:
    for prompt, sample, answer in answers:
        assert list(answer.token_ids) == [prompt, sample]


def test_answers_stay_with_their_prompts() -> None:  # B061
    engines = [EchoEngine(f"engine-{i}", seed=i) for i in range(3)]

    async def main() -> None:
        router = Router(engines)
        check_answers(await ask_all(router, prompts=7, samples=2))
        await router.close()

    asyncio.run(main())
    assert sum(len(e.served) for e in engines) == 14


def test_a_group_stays_on_one_engine_and_groups_spread() -> None:
    engines = [EchoEngine(f"engine-{i}") for i in range(4)]

    async def main() -> None:
        router = Router(engines)
        await ask_all(router, prompts=16, samples=4)
        await router.close()

    asyncio.run(main())
    homes = Counter(engine.name for engine in engines for group in {r.group_id for r in engine.served})
    assert homes == {f"engine-{i}": 4 for i in range(4)}
    assert all(Counter(r.group_id for r in e.served).most_common(1)[0][1] == 4 for e in engines)


def test_new_groups_go_to_the_fewest_outstanding_tokens() -> None:
    engines = [EchoEngine("engine-0", delay=0.1), EchoEngine("engine-1", delay=0.1)]

    async def main() -> None:
        router = Router(engines)
        long = asyncio.create_task(router.generate([1], SamplingParams(max_tokens=1000), group_id="long"))
        await asyncio.sleep(0)
        short = [
            asyncio.create_task(router.generate([2], SamplingParams(max_tokens=10), group_id=f"s{i}")) for i in range(5)
        ]
        await asyncio.gather(long, *short)
        await router.close()

    asyncio.run(main())
    assert [r.group_id for r in engines[0].served] == ["long"]
    assert len(engines[1].served) == 5


def test_routers_of_different_workers_start_at_different_engines() -> None:
    engines = [EchoEngine(f"engine-{i}") for i in range(3)]

    async def main() -> None:
        for first in range(3):
            router = Router(engines, first=first)
            await ask(router, first, 0)
            await router.close()

    asyncio.run(main())
    assert [len(e.served) for e in engines] == [1, 1, 1]


def test_requests_of_a_killed_engine_move(caplog: pytest.LogCaptureFixture) -> None:
    engines = [EchoEngine("engine-0", delay=1e6), EchoEngine("engine-1")]

    async def main() -> None:
        router = Router(engines)
        asking = asyncio.create_task(ask_all(router, prompts=6, samples=2))
        await asyncio.sleep(0.01)
        engines[0].kill()
        check_answers(await asking)
        assert list(router.down()) == ["engine-0"]
        await router.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "engine-0 is marked down" in caplog.text
    assert "moves away from engine-0" in caplog.text


def test_a_silent_engine_is_found_by_its_probe(caplog: pytest.LogCaptureFixture) -> None:
    engines = [EchoEngine("engine-0"), EchoEngine("engine-1")]
    engines[0].silent = True

    async def main() -> None:
        router = Router(engines, timeouts=FAST)
        check_answers(await ask_all(router, prompts=4, samples=2))
        await router.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "engine-0 is silent: no sign of life in 0.05 s" in caplog.text
    assert len(engines[1].served) == 8


def test_a_slow_engine_that_shows_life_keeps_its_requests() -> None:
    engine = EchoEngine("engine-0", delay=0.3)

    async def main() -> None:
        router = Router([engine], timeouts=FAST)
        check_answers(await ask_all(router, prompts=4, samples=2))
        assert not router.down()
        await router.close()

    asyncio.run(main())
    assert engine.probes >= 1


def test_requests_wait_for_an_engine_to_come_back() -> None:
    engine, spare = EchoEngine("engine-0"), EchoEngine("engine-0")
    engine.dead = True

    async def main() -> None:
        router = Router([engine])
        asking = asyncio.create_task(ask_all(router, prompts=2, samples=1))
        await asyncio.sleep(0.01)
        assert not asking.done()
        router.set_clients([spare])
        check_answers(await asking)
        await router.close()

    asyncio.run(main())
    assert len(spare.served) == 2


def test_an_engine_that_is_well_again_serves() -> None:
    engine = EchoEngine("engine-0")
    engine.dead = True

    async def main() -> None:
        router = Router([engine])
        asking = asyncio.create_task(ask(router, 1, 0))
        await asyncio.sleep(0.01)
        assert list(router.down()) == ["engine-0"]
        engine.dead = False
        router.set_clients([engine])
        await asking
        assert not router.down()
        await router.close()

    asyncio.run(main())


def test_requests_of_engines_that_leave_move_at_once_and_are_no_suspects() -> None:
    engines = [EchoEngine(f"engine-{n}", delay=0) for n in range(MAX_MOVES + 2)]
    for engine in engines[:-1]:
        engine.silent = True

    async def main() -> None:
        router = Router(engines[:-1])
        asking = asyncio.create_task(ask_all(router, prompts=8, samples=2))
        for left in range(1, len(engines) - 1):  # more often than a request may lose engines
            await asyncio.sleep(0.01)
            router.set_clients(engines[left:-1])
            assert not router.down()
        await asyncio.sleep(0.01)
        router.set_clients(engines[-1:])
        check_answers(await asyncio.wait_for(asking, 2))
        await router.close()

    asyncio.run(main())
    assert [len(engine._waiting) for engine in engines] == [0] * len(engines)
    assert [len(engine.served) for engine in engines] == [0] * (len(engines) - 1) + [16]


def test_an_engine_that_stays_keeps_its_load_and_is_still_watched() -> None:
    engines = [EchoEngine("engine-0"), EchoEngine("engine-1", delay=0)]
    engines[0].silent = True

    async def main() -> None:
        router = Router(engines, timeouts=FAST)
        asking = asyncio.create_task(ask(router, 0, 0))
        await asyncio.sleep(0.01)
        router.set_clients([engines[0], EchoEngine("engine-1", delay=0)])
        await ask(router, 1, 0)  # engine 0 has still a request to answer
        assert len(engines[0]._waiting) == 1
        check_answers([await asyncio.wait_for(asking, 2)])
        assert list(router.down()) == ["engine-0"]
        await router.close()

    asyncio.run(main())
    assert engines[1].served == []


def test_no_engine_left_is_an_error_in_time_and_says_why() -> None:
    engine = EchoEngine("engine-0")
    engine.dead = True

    async def main() -> None:
        router = Router([engine], timeouts=FAST)
        with pytest.raises(EngineError, match=r"no engine can serve request p1-0; waited 0.2 s .*engine-0 is dead"):
            await ask(router, 1, 0)
        await router.close()

    asyncio.run(main())


def test_a_request_that_takes_engines_down_stops_moving() -> None:
    engines = [EchoEngine(f"engine-{i}") for i in range(MAX_MOVES + 1)]
    for engine in engines:
        engine.dead = True

    async def main() -> None:
        router = Router(engines, timeouts=FAST)
        with pytest.raises(EngineError, match=f"failed on {MAX_MOVES} engines"):
            await ask(router, 1, 0)
        assert len(router.down()) == MAX_MOVES
        await router.close()

    asyncio.run(main())


def test_n10_requests_that_leave_an_engine_that_was_given_up_have_not_failed() -> None:
    """An engine that falls silent again and again takes its requests with it, which is no fault of theirs."""
    engines = [EchoEngine(f"engine-{i}") for i in range(MAX_MOVES + 2)]
    for engine in engines[:-1]:
        engine.silent = True

    async def main() -> None:
        router = Router(engines, timeouts=FAST)
        check_answers([await ask(router, 1, 0)])
        assert len(router.down()) == MAX_MOVES + 1
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_n10_leaving_engines_has_a_bound() -> None:
    engines = [EchoEngine(f"engine-{i}") for i in range(MAX_EVICTIONS + 1)]
    for engine in engines:
        engine.silent = True
    fast = RouterTimeouts(probe_interval=0.005, probe=0.005, no_engine=0.2)

    async def main() -> None:
        router = Router(engines, timeouts=fast)
        with pytest.raises(EngineError, match=f"lost {MAX_EVICTIONS + 1} engines, the last time: engine-"):
            await ask(router, 1, 0)
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 30))


class PoisonedEngine(EchoEngine):
    """Dies of prompt 13, under whatever else it serves."""

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.token_ids[0] == 13:
            await asyncio.sleep(0.002)
            self.kill()
        return await super().generate(request)


def test_n10_of_the_requests_of_an_engine_that_dies_only_the_cause_fails() -> None:
    engines = [PoisonedEngine(f"engine-{i}", delay=0.02, seed=i) for i in range(6)]

    async def main() -> None:
        router = Router(engines, timeouts=RouterTimeouts(no_engine=1.0))
        calls = (router.generate([p], SamplingParams(max_tokens=8), group_id="one engine") for p in range(10, 16))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(answer, EngineError) for answer in answers] == [False, False, False, True, False, False]
        assert len(router.down()) == MAX_MOVES
        await router.close()

    asyncio.run(asyncio.wait_for(main(), 20))


class RefusingEngine(EchoEngine):
    async def generate(self, request: GenerateRequest) -> Generation:
        self.served.append(request)
        raise RequestRejectedError(f"{self.name} rejected request {request.request_id}: too long")


def test_a_rejected_request_is_not_moved() -> None:
    engines = [RefusingEngine("engine-0"), RefusingEngine("engine-1")]

    async def main() -> None:
        router = Router(engines)
        with pytest.raises(RequestRejectedError, match="too long"):
            await ask(router, 1, 0)
        assert not router.down()
        await router.close()

    asyncio.run(main())
    assert [len(e.served) for e in engines] == [1, 0]


def test_cancelling_a_request_reaches_the_engine() -> None:
    engine = EchoEngine("engine-0", delay=60)

    async def main() -> None:
        router = Router([engine])
        asking = asyncio.create_task(ask(router, 1, 0))
        await asyncio.sleep(0.01)
        assert len(engine._waiting) == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)
        assert not engine._waiting
        await router.close()

    asyncio.run(main())
