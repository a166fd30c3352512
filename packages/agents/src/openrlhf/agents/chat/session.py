"""One chat session: its calls, recorded token by token.

A call whose rendered text starts with the text of an earlier reply's tokens goes on from those tokens: only what is new
is tokenised. Where a template rewrites history (drops reasoning, strips text) or a client edits it, a new branch
starts; every branch becomes a sample. Nothing changes before a generation is there, so a failed, cancelled or parallel
call leaves the session as it was; nothing changes after `close`, so a late call does not reach a finished sample.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.chat.call import Call
from openrlhf.agents.chat.constrain import structural_tag
from openrlhf.agents.chat.fields import ApiError, bad_request
from openrlhf.agents.chat.history import Base, Branch, Reply, as_sampled, find_by_keys, find_by_text, recorded_keys
from openrlhf.agents.chat.messages import Conversation, Key
from openrlhf.agents.chat.reasoning import opened
from openrlhf.agents.chat.render import ChatRenderer, Ending
from openrlhf.agents.chat.tools import AnswerParser, LightParser
from openrlhf.agents.context import SampleEngine
from openrlhf.agents.engine import Generation, SamplingParams, Tokenizer
from openrlhf.agents.failures import warn_once
from openrlhf.agents.images import TextOnly
from openrlhf.agents.recorder import Recorder, check_generation
from openrlhf.agents.types import Failure, StopReason

logger = logging.getLogger(__name__)

OF_THE_RUN = frozenset({
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens",
})  # fmt: skip
"""Sampling of a client that the run decides about, unless `agent.client_sampling` is honour."""
NOT_FOLLOWED = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Of these what the trainer computes log-probs with is always the run's."""
DECODE_CONTEXT = 4  # tokens of the prompt that are decoded together with a reply
LOWEST_LOGPROB = -9999.0  # what a JSON answer shows for a log-prob that is not finite


@dataclass(kw_only=True, slots=True)
class Plan:
    """One call before its generation. base: the branch and reply it goes on from, None for a fresh start.

    prefill: the text of the last message where the reply continues it. turn: which call to the engine it became.
    temperature: the client's, where it samples at another than the run's.
    invalid: generations with a log-prob that no sample may have, and what is wrong.
    """

    prompt_ids: list[int]
    new_ids: list[int]
    text: str
    keys: list[Key]
    images: list[Any]
    base: Base | None
    broken: bool = False
    prefill: str | None = None
    role: str = "assistant"
    turn: int = 0
    temperature: float | None = None
    invalid: list[tuple[Generation, str]] = field(default_factory=list)

    @property
    def closing(self) -> str | None:
        """The tag that ends the reasoning in which the reply begins."""
        return opened(self.text, self.prefill or "")


class ChatSession:
    """The calls of one sample. sampling: the trainer's template. max_length: tokens of a branch as a whole."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tokenizer: Tokenizer,
        engine: SampleEngine,
        sampling: SamplingParams,
        max_length: int,
    ) -> None:
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.engine = engine
        self.sampling = sampling
        self.max_length = max_length
        self.branches: list[Branch] = []
        self.turns: list[tuple[str, Branch, int]] = []
        """Of every reply in order: the id of its answer, its branch, and which turn of the branch it is."""
        self.template_breaks = 0
        self.calls = 0
        self.tool_calls = 0
        self.stop_reason = StopReason.DONE
        self.failure: Failure | None = None
        self.closed = asyncio.Event()
        self.parser: AnswerParser = engine.parser or LightParser()
        self.separate = bool(engine.settings.agent.reasoning_parser)
        self.malformed = 0
        self.stored: dict[str, Any] = {}
        """Answers that a client may go on from by their id (Responses)."""
        self._read: dict[Any, Any] = {}

    @property
    def vocabulary(self) -> int | None:
        """The number of token ids, where the tokenizer knows it."""
        return len(self.tokenizer) if isinstance(self.tokenizer, Sized) else None

    def close(self) -> None:
        """Ends the session: what is under way is told so, and nothing more is recorded."""
        self.closed.set()

    def own_sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """The session's sampling with what a client asks for, as far as `agent.client_sampling` lets it decide.

        What it does not decide is logged once. A temperature of 0 has no log-probs to train on: the run's is used.
        """
        decided = frozenset() if self.engine.settings.agent.client_sampling == "honour" else OF_THE_RUN
        own = {name: value for name, value in given.items() if name not in decided}
        if own.get("temperature") == 0:
            del own["temperature"]
        other = [name for name in given if name not in own and given[name] != getattr(self.sampling, name)]
        if other:
            warn_once(
                logger,
                "sampling of a client",
                "a client asks for %s of its own: the run's sampling is used (see `agent.client_sampling`)",
                ", ".join(f"{name} {given[name]}" for name in other),
            )
        unlike = [name for name in NOT_FOLLOWED if name in own and own[name] != getattr(self.sampling, name)]
        if unlike:
            warn_once(
                logger,
                "truncation of a client",
                "a client samples with %s of its own: the trainer's log-probs follow its temperature, but not these",
                ", ".join(unlike),
            )
        return self.sampling.with_(**own)

    def constrained(self, call: Call, plan: Plan) -> SamplingParams:
        """The sampling of a call with what its answer must keep. Raises a 400 where the engine cannot do that."""
        if call.sampling.temperature != self.sampling.temperature:
            plan.temperature = call.sampling.temperature
        template = str(self.renderer.tokenizer.chat_template)
        guided = self.engine.settings.guided
        return call.sampling.with_(structure=structural_tag(call, self.parser, plan.closing, template, guided))

    def plan(
        self,
        conversation: Conversation,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        ending: Ending = Ending.ANSWER,
    ) -> Plan:
        """The prompt tokens of a call. Raises a 400 where template, model, turn limit or context refuse it."""
        self._check_turns()
        plan = self.draft(conversation, tools, options, ending)
        self._check_length(len(plan.prompt_ids))
        return plan

    def draft(
        self,
        conversation: Conversation,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        ending: Ending = Ending.ANSWER,
    ) -> Plan:
        """As `plan`, for a look at the prompt alone: neither its length nor the turns that are left count."""
        self._check_images(conversation)
        self.renderer.check(conversation.messages, tools, options, conversation.places)
        keys: list[Key] = [("tools", json.dumps([tools, options], sort_keys=True, default=str)), *conversation.keys]
        base, text, broken = self._find(conversation, keys, tools, options, ending)
        known = "" if base is None else base[0].text[: base[1].text]
        new_ids = self.tokenizer.encode(text[len(known) :], add_special_tokens=False)
        old_ids = [] if base is None else base[0].recorder.token_ids[: base[1].tokens]
        plan = Plan(
            prompt_ids=old_ids + new_ids,
            new_ids=new_ids,
            text=text,
            keys=keys if base is None else recorded_keys(base[0], keys),
            images=list(conversation.images),
            base=base,
            broken=broken,
        )
        if ending is Ending.CONTINUED:
            plan.keys = plan.keys[:-1]
            plan.prefill, plan.role = _text_of(conversation.messages[-1]), conversation.messages[-1]["role"]
        return plan

    def _find(
        self,
        conversation: Conversation,
        keys: list[Key],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        ending: Ending,
    ) -> tuple[Base | None, str, bool]:
        """What the call goes on from, its whole text, and whether the template broke a history that the client kept.

        The rendered text decides. Where it leaves a history that the messages go on from, the messages are rendered
        once more with the model's own words in the place of the client's spelling of them.
        """
        text = self.renderer.render(conversation.messages, tools, options, ending)
        by_text = find_by_text(self.branches, text, conversation.images)
        by_keys = find_by_keys(self.branches, keys, conversation.images)
        broken = by_keys is not None and (by_text is None or by_text[1].text < by_keys[1].text)
        if by_keys is not None and broken:
            branch, reply = by_keys
            sampled = self._render_sampled(by_keys, keys, conversation, (tools, options, ending))
            if sampled is not None and sampled.startswith(branch.text[: reply.text]):
                return by_keys, sampled, False
        self.renderer.check_calls(conversation.messages)
        return by_text, text, broken

    def _render_sampled(self, base: Base, keys: list[Key], conversation: Conversation, how: Any) -> str | None:
        try:
            return self.renderer.render(as_sampled(base, keys, conversation), *how)
        except ApiError:
            return None

    def _check_turns(self) -> None:
        if self.calls >= self.engine.settings.agent.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            raise bad_request(f"the session has used its {self.calls} turns (`agent.max_turns`)", code="max_turns")

    def _check_images(self, conversation: Conversation) -> None:
        if conversation.images and isinstance(self.engine.image_reader, TextOnly):
            where = conversation.image_places[0]
            raise bad_request(f"{where} is an image, and the policy is a model of texts", where)

    def _check_length(self, tokens: int) -> None:
        if tokens >= self.max_length:
            self.stop_reason = StopReason.LENGTH
            raise bad_request(
                f"the prompt has {tokens} tokens, the maximum context length is {self.max_length} "
                "tokens and at least one is needed for the answer",
                "messages",
                "context_length_exceeded",
            )

    async def generate(self, plan: Plan, sampling: SamplingParams) -> Generation:
        """Samples one reply; max_tokens is what the request, the trainer and the context all allow."""
        images = await self.images(plan)
        length = self.prompt_tokens(plan)
        self._check_length(length)
        limits = (sampling.max_tokens, self.sampling.max_tokens, self.engine.settings.max_new_tokens)
        tokens = min(cap for cap in (*limits, self.max_length - length) if cap is not None)
        if sampling.min_tokens > max(tokens, self.sampling.min_tokens):
            wanted = f"'min_tokens' {sampling.min_tokens} is more than the {tokens} tokens that an answer may have here"
            raise bad_request(wanted, "min_tokens")
        if not plan.turn:
            self._check_turns()
            self.calls += 1
            plan.turn = self.calls
        sampling = sampling.with_(max_tokens=tokens, min_tokens=min(sampling.min_tokens, tokens))
        try:
            generation = await self.engine.generate(plan.prompt_ids, sampling, images or None)
        except ValueError as error:  # images and their places in the text do not belong together
            raise bad_request(str(error), "messages") from error
        if generation.finish_reason == "abort":
            raise ApiError(503, "the engine aborted the request")
        return self._finite(plan, generation)

    def prompt_tokens(self, plan: Plan) -> int:
        """Tokens of a prompt whose `images` were read, which count in full."""
        return self.engine.length(plan.prompt_ids, [self._read[image] for image in plan.images])

    async def images(self, plan: Plan) -> list[Any]:
        """The images of a call, each read once in a session, so that all of its turns see the same."""
        try:
            for image in plan.images:
                if image not in self._read:
                    (self._read[image],) = await self.engine.read_images([image])
        except (ValueError, OSError) as error:
            raise bad_request(f"an image of the messages cannot be read: {error}", "messages") from error
        return [self._read[image] for image in plan.images]

    def _finite(self, plan: Plan, generation: Generation) -> Generation:
        """Log-probs that JSON can hold; a sample with an invalid one is answered, but not trained on."""
        logprobs = [p if p is not None and math.isfinite(p) else LOWEST_LOGPROB for p in generation.logprobs]
        finite = replace(generation, logprobs=logprobs)
        check_generation(finite)
        if logprobs != list(generation.logprobs):
            wrong = next(i for i, p in enumerate(generation.logprobs) if p is None or not math.isfinite(p))
            plan.invalid.append(
                (finite, f"logprob {wrong} of call {plan.turn} is invalid: {generation.logprobs[wrong]!r}")
            )
        return finite

    def decode(self, plan: Plan, token_ids: Sequence[int]) -> str:
        """The text of sampled ids where they stand: some tokenizers drop the first blank of a text of its own."""
        context = plan.prompt_ids[-DECODE_CONTEXT:]
        before = self.tokenizer.decode(context, skip_special_tokens=False)
        text = self.tokenizer.decode([*context, *token_ids], skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def commit(self, plan: Plan, generation: Generation, key: Key, raw: str, answer: str = "") -> bool:
        """Records a reply; False where the session has ended. key: of the message that the client gets, joined to the
        one that it continues. raw: the text of that message without the end token. answer: the id that it has."""
        if self.closed.is_set():
            return False
        self.template_breaks += plan.broken
        plan.broken = False
        branch = self._branch_for(plan)
        branch.recorder.append_sampled(generation, plan.temperature)
        self.turns.append((answer, branch, len(branch.recorder.turns) - 1))
        branch.recorder.images = [self._read.get(image, image) for image in plan.images]
        branch.images = plan.images
        branch.text = plan.text + self.decode(plan, generation.token_ids)
        branch.keys = [*plan.keys, key]
        reply = Reply(
            keys=len(branch.keys),
            tokens=len(branch.recorder),
            text=len(branch.text),
            images=len(plan.images),
            key=key,
            raw=raw,
        )
        branch.replies.append(reply)
        for invalid, message in plan.invalid:
            if invalid is generation:
                self.failure = Failure(border="engine", message=message)
        if self.stop_reason is StopReason.LENGTH:  # the agent has found a way on after a prompt that was too long
            self.stop_reason = StopReason.DONE
        return True

    def _branch_for(self, plan: Plan) -> Branch:
        """The branch that the call goes on with, or a new one where it was a fresh start or somebody was faster."""
        if plan.base is not None:
            branch, reply = plan.base
            if len(branch.recorder) == reply.tokens:
                branch.recorder.append_environment(plan.new_ids)
                return branch
        branch = Branch(recorder=Recorder(plan.prompt_ids))
        if plan.base is not None:
            origin, last = plan.base
            branch.replies = [reply for reply in origin.replies if reply.text <= last.text]
        self.branches.append(branch)
        return branch


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
