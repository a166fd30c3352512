"""One vLLM engine: requests in, samples with log-probs and weight versions out; weights in.

Not here: Ray, routing, restarts. vLLM is imported only when an engine starts: the environment must be set before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from openrlhf.agents.engine import EngineError, Generation
from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import (
    EngineDownError,
    GenerateRequest,
    RequestRejectedError,
    check_finish_reason,
    check_logprobs,
    plain_ids,
)
from openrlhf.rollout.vllm.arguments import (
    adapter_request,
    environment,
    expand_versions,
    sampled_logprobs,
    to_vllm_prompt,
    to_vllm_sampling,
    vllm_args,
)
from openrlhf.rollout.vllm.gate import Gate
from openrlhf.rollout.weights.plugin import RECEIVERS

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from openrlhf.rollout.weights.wire import BucketPlan

logger = logging.getLogger(__name__)

DEATH_POLL_S = 1.0
"""How often a control call that waits looks whether the engine core is still there."""
HEALTH_TIMEOUT_S = 60.0
"""Longest wait for a sign of life of the engine core, which answers between two model steps (seconds on CPU)."""
SHUTDOWN_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0
"""Longest wait for a control call (pause, cache reset, version, group set-up); they take milliseconds."""
PUSH_TIMEOUT_S = 1800.0
"""Longest wait for a whole weight push. Each message in it has the group's own, much shorter, time-out."""
GIVE_UP_TIMEOUT_S = 30.0
"""Longest wait for the end of a part of a push whose other side failed; the group's own time-out is 15 s."""
LEFT_OVER_POLL_S = 0.01
SHOWN_REQUESTS = 5
START, FINISH = "start a weight push", "finish a weight push"
INSTALL, RENEW = "take the adapter of a weight push", "go over to the weights of a push"

T = TypeVar("T")


class VllmEngine:
    """An `AsyncLLM` with the calls that training needs (`InferenceEngine`). All run on one event loop."""

    environment = staticmethod(environment)

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._live: set[str] = set()
        self._paused = False
        self._unfit = ""
        self._updating = False
        self._push_over = asyncio.Event()
        self._push_step_over = asyncio.Event()
        self._push_step_over.set()
        self._push_broke = False
        self._adapter: Any = None
        self.version = 0
        self._llm: AsyncLLM | None = None
        self._totals: dict[str, float] = {}
        self._numbers = itertools.count()
        self._gate = Gate(self._hold, self._let_go)

    async def start(self, *, serve: bool = True) -> None:
        """Load the model; samples carry version 0 until the first push. serve: whether requests may come before it.

        Raises EngineError with vLLM's reason when the engine does not come up.
        """
        for key, value in environment(self.spec).items():
            os.environ.setdefault(key, value)
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from openrlhf.rollout.vllm.forked import forked_core
        from openrlhf.rollout.vllm.stats import stat_loggers

        loggers, self._totals = stat_loggers(self.spec.stats)
        transfer = WeightTransferConfig(backend=RECEIVERS[self.spec.sync_backend])
        try:
            args = AsyncEngineArgs(**vllm_args(self.spec), weight_transfer_config=transfer)
            with forked_core():
                self._llm = AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        except Exception as error:
            raise EngineError(f"{self.name} could not start on model {self.spec.model!r}: {error}") from error
        await self._set_version(0)
        if not serve:
            self._unfit = "it has started and waits for its first weight push"

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per row of tokens the log-probability of each given those before it, at temperature 1; the first is 0.0.

        Rows are sent together: the engine takes them in one step, or in two when the first one is faster.
        """
        return list(await asyncio.gather(*(self._score(row) for row in rows)))

    async def _score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams as VllmSamplingParams

        if len(token_ids) < 2:
            raise ValueError(f"score needs at least 2 tokens, got {list(token_ids)!r}")
        params = VllmSamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request_id = f"score-{next(self._numbers)}"
        await self._ready_for(request_id)
        ids = plain_ids(request_id, self.name, token_ids)
        output = await self._run({"type": "token", "prompt_token_ids": ids}, lambda: params, request_id)
        rows = output.prompt_logprobs[1:]
        values = [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]
        check_logprobs(request_id, self.name, ids[1:], values)
        return [0.0, *values]

    async def _ready_for(self, request_id: str) -> None:
        """Wait until a push that is under way is over. Raises EngineDownError without a whole set of weights."""
        if self._updating:
            await self._control("finish a weight push", self._push_over.wait(), PUSH_TIMEOUT_S)
        if self._unfit:
            raise EngineDownError(f"{self.name} must not serve request {request_id}: {self._unfit}")

    async def generate(self, request: GenerateRequest) -> Generation:
        """One sample. Raises RequestRejectedError (this request's fault) or EngineDownError (the engine's)."""
        await self._ready_for(request.request_id)
        ids = plain_ids(request.request_id, self.name, request.token_ids)
        prompt = to_vllm_prompt(request, ids, self.spec, self.version)
        output = await self._run(
            prompt, lambda: to_vllm_sampling(request.sampling, self.spec.suppressed_token_ids), request.request_id
        )
        completion = output.outputs[0]
        finish_reason = completion.finish_reason or "abort"
        check_finish_reason(request.request_id, self.name, finish_reason)
        tokens = list(completion.token_ids)
        logprobs, tops = sampled_logprobs(completion.logprobs, request.sampling.top_logprobs) if tokens else ([], ())
        check_logprobs(request.request_id, self.name, tokens, logprobs)
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            versions=expand_versions(completion.weight_versions, len(tokens), self.version),
            finish_reason=finish_reason,
            prompt_token_ids=list(output.prompt_token_ids) if request.images else None,
            top_logprobs=tops,
        )

    async def _run(self, prompt: Any, params: Callable[[], Any], request_id: str) -> Any:
        """One vLLM request with FINAL_ONLY output, its errors sorted by whose fault they are."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self.running_llm()
        if self.spec.device == "cpu":
            await self._gate.enter(idle=not self._live and not self._paused)
        unique = f"{request_id}#{next(self._numbers)}"  # a request may come twice, after another engine died
        self._live.add(unique)
        last = None
        try:
            async for output in llm.generate(prompt, params(), unique, lora_request=self._adapter):
                last = output
        except EngineDeadError as error:
            raise EngineDownError(f"{self.name} died during request {request_id}: {error!r}") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestRejectedError(f"{self.name} rejected request {request_id}: {error}") from error
        except Exception as error:  # mostly vLLM's EngineGenerateError: the core may be dead, or as well as before
            raise await self._failure(request_id, error.__cause__ or error) from error
        finally:
            self._live.discard(unique)
        if last is None:
            raise RequestRejectedError(f"{self.name} ended request {request_id} without an answer")
        return last

    async def _failure(self, request_id: str, cause: BaseException) -> EngineError:
        """Whose fault an error is: that of an engine which shows no sign of life, else that of the request alone."""
        try:
            await self.health()
        except Exception as error:
            return EngineDownError(f"{self.name} died during request {request_id}: {cause!r} ({error})")
        return RequestRejectedError(f"{self.name} could not serve request {request_id}: {cause!r}")

    async def _hold(self) -> None:
        """Take requests, but begin with none. Not `pause_generation`, which sleeps for longer than a step takes."""
        await self._control("wait", self.running_llm().engine_core.pause_scheduler_async("keep", clear_cache=False))

    async def _let_go(self) -> None:
        await self._control("begin", self.running_llm().engine_core.resume_scheduler_async())

    async def pause(self, *, clear_cache: bool = False) -> None:
        """Freeze running requests until `resume`; they go on with the weights of then.

        clear_cache: their KV cache is computed again with the new weights.
        """
        self._paused = True  # from now on no request holds the core, whose release would end the pause
        try:
            await self._gate.opened()
            await self._control("pause", self.running_llm().pause_generation(mode="keep", clear_cache=clear_cache))
        except BaseException:
            self._paused = False
            raise

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._control("resume", self.running_llm().resume_generation())
        self._paused = False

    async def sleep(self) -> None:
        """Free the device memory: weights go to host memory, the KV cache is dropped. A no-op on CPU.

        Requests that still run are aborted, as at a push.
        """
        await self._gate.opened()
        if self._live and not self._paused:
            await self._control("end left-over requests", self._end_left_over())
        await self._control("sleep", self.running_llm().sleep(1))

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Undo `sleep` for one part."""
        await self._control("wake up", self.running_llm().wake_up([part]))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End running requests, all of them by default; returns how many. An engine that was shut down has none.

        Their callers get what was sampled, with finish_reason "abort".
        """
        live = [name for name in self._live if request_ids is None or name.rpartition("#")[0] in request_ids]
        if self._llm is None:
            return 0
        if live:
            await self._control("abort", self._llm.abort(live))
        return len(live)

    async def health(self) -> EngineHealth:
        """A sign of life of the engine core itself. Raises EngineDownError when there is none in time.

        While weights are received the core can't answer; the push has time-outs of its own.
        """
        llm = self.running_llm()
        if llm.errored:
            raise EngineDownError(f"{self.name}: the engine core died")
        if not self._updating:
            await self._control("give a sign of life", llm.get_weight_version(), HEALTH_TIMEOUT_S)
        state = {"running": len(self._live), "paused": self._paused, "unfit": self._unfit}
        return EngineHealth(version=self.version, **state, totals=dict(self._totals))

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's weight group (`GroupAddress.for_engine`, or what vLLM's trainer engine says)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._control(
            "join the weight group",
            self.running_llm().init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)),
        )

    async def receive_weights(self, plan: BucketPlan, version: int) -> None:
        """Take part in one whole push over gloo; the trainer must be sending it at the same time.

        Afterwards every sampled token carries `version`. The prefix cache is emptied. The engine must be idle or
        paused. Raises EngineDownError when the push fails; then the engine refuses to serve until one succeeds.
        """
        if self.spec.sync_backend != "gloo":
            raise ValueError(f"an {self.spec.sync_backend} sender calls start_, update_ and finish_ itself")
        await self.start_weight_update()
        await self.update_weights({"plan": plan.to_dict(), "version": version})
        await self.finish_weight_update(version)

    async def start_weight_update(self) -> None:
        """First part of a push; nccl and ipc senders call the three parts themselves, gloo uses `receive_weights`.

        Requests that still run on an engine that is not paused belong to nobody (a sample that is over, a worker that
        died): they are aborted.
        """
        self._unfit = "a weight push has failed; it needs a complete one first"
        self._updating, self._push_broke = True, False
        self._push_over.clear()
        await self._gate.opened()
        if self._live and not self._paused:
            await self._push_step("end left-over requests", self._end_left_over())
        await self._push_step(START, self.running_llm().start_weight_update())

    async def _end_left_over(self) -> None:
        shown = ", ".join(sorted(self._live)[:SHOWN_REQUESTS])
        logger.warning("%s aborts %d requests left over: %s", self.name, len(self._live), shown)
        await self.abort()
        while self._live:  # noqa: ASYNC110 - they end one by one, each in its caller's task
            await asyncio.sleep(LEFT_OVER_POLL_S)

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Second part of a push: receive tensors."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        await self._push_step("receive weights", self.running_llm().update_weights(request))

    async def finish_weight_update(self, version: int) -> None:
        """Last part of a push: the new weights become `version`."""
        await self._push_step(FINISH, self.running_llm().finish_weight_update())
        if self.spec.lora_rank:
            await self._push_step(INSTALL, self.running_llm().collective_rpc("install_adapter"))
        await self._push_step(RENEW, self._renew(version))
        self._unfit = ""
        self._end_push()

    async def _renew(self, version: int) -> None:
        await self._set_version(version)
        await self._control("reset the prefix cache", self.running_llm().reset_prefix_cache())
        if self.spec.lora_rank:
            self._adapter = adapter_request(version)

    async def _leave_push(self) -> None:
        """Let workers finish that are still in a push: the last part never came, or only others failed to receive."""
        if self._unfit:
            try:
                await self.running_llm().finish_weight_update()
            except Exception as error:
                # workers that are in none refuse; whatever else is wrong shows at the next start
                logger.debug("%s leaves a failed weight push: %s", self.name, error)

    def _end_push(self) -> None:
        self._updating = False
        self._push_over.set()

    async def _push_step(self, what: str, call: Awaitable[T]) -> T:
        self._push_step_over.clear()
        try:
            return await self._control(what, call, PUSH_TIMEOUT_S)
        except BaseException as error:
            self._push_broke = what in (START, FINISH, RENEW)
            self._end_push()
            if isinstance(error, Exception):
                raise EngineDownError(f"{self.name} could not {what}: {error}") from error
            raise
        finally:
            self._push_step_over.set()

    async def give_up_push(self) -> EngineHealth:
        """After a push that failed elsewhere: make ready for the next one. `health` of then.

        Raises EngineDownError when this engine is stuck in it, or could not begin or end one: it must be started again.
        """
        while not self._push_step_over.is_set():
            await self._control("give up a failed weight push", self._push_step_over.wait(), GIVE_UP_TIMEOUT_S)
        await self._control("give up a failed weight push", self._leave_push())
        self._end_push()
        if self._push_broke:
            raise EngineDownError(f"{self.name} can take no weights any more: {self._unfit}")
        return await self.health()

    async def shutdown(self) -> None:
        """End the engine core and its workers; safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # else it reports the end of the core as a crash
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler], timeout=CONTROL_TIMEOUT_S)
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)

    def running_llm(self) -> AsyncLLM:
        """vLLM's own engine. Raises `EngineDownError` before the start and after the end."""
        if self._llm is None:
            raise EngineDownError(f"{self.name} is not running")
        return self._llm

    async def _set_version(self, version: int) -> None:
        await self._control("set the weight version", self.running_llm().update_weight_version(str(version)))
        self.version = version

    async def _control(self, what: str, call: Awaitable[T], timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        """A named, bounded wait for the engine core; vLLM leaves calls to a core that dies without an answer."""
        task, left = asyncio.ensure_future(call), timeout_s
        try:
            while not (await asyncio.wait({task}, timeout=min(left, DEATH_POLL_S)))[0]:
                left -= DEATH_POLL_S
                if self.running_llm().errored:
                    raise EngineDownError(f"{self.name}: the engine core died and did not {what}")
                if left <= 0:
                    raise EngineDownError(f"{self.name} did not {what} within {timeout_s:g} s")
            if task.exception() is not None and self.running_llm().errored:
                raise EngineDownError(f"{self.name}: the engine core died and did not {what}") from task.exception()
            return task.result()
        finally:
            task.cancel()
