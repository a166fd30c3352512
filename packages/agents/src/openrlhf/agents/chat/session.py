"""One chat session: its calls, recorded token by token.

A call whose rendered text starts with the text of an earlier reply's tokens goes on from those tokens: only what is new
is tokenised. Where a template rewrites history (drops reasoning, strips text) or a client edits it, a new branch
starts; every branch becomes a sample. Nothing changes before a generation is there, so a failed, cancelled or parallel
call leaves the session as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.chat.errors import ApiError, bad_request
from openrlhf.agents.chat.messages import Conversation, Key
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.context import SampleEngine
from openrlhf.agents.engine import Generation, SamplingParams, Tokenizer
from openrlhf.agents.recorder import Recorder, check_generation
from openrlhf.agents.types import Failure, StopReason

DECODE_CONTEXT = 4  # tokens of the prompt that are decoded together with a reply
LOWEST_LOGPROB = -9999.0  # what a JSON answer shows for a log-prob that is not finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Where a branch stood after one reply. raw: the reply's text as sampled, without its end token."""

    keys: int
    tokens: int
    text: int
    raw: str


@dataclass(slots=True)
class Branch:
    """A linear conversation: its tokens, their text, the keys of its messages (tools first) and its replies."""

    recorder: Recorder
    text: str = ""
    keys: list[Key] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One call before its generation. base: the branch and reply it goes on from, None for a fresh start."""

    prompt_ids: list[int]
    new_ids: list[int]
    text: str
    keys: list[Key]
    images: list[Any]
    base: tuple[Branch, Reply] | None
    broken: bool = False


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
        self.template_breaks = 0
        self.tokenized = 0
        self.calls = 0
        self.stop_reason = StopReason.DONE
        self.failure: Failure | None = None

    def plan(self, conversation: Conversation, tools: Sequence[Any] | None, options: Mapping[str, Any]) -> Plan:
        """The prompt tokens of a call. Raises a 400 where template, turn limit or context refuse it."""
        if self.calls >= self.engine.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            raise bad_request(f"the session has used its {self.calls} turns (--agent.max_turns)", code="max_turns")
        keys: list[Key] = [("tools", json.dumps([tools, options], sort_keys=True, default=str)), *conversation.keys]
        text = self.renderer.render(conversation.messages, tools, options)
        found = self._find(keys)
        plan = None
        if found is not None:
            plan = self._continue(found, keys, text, conversation)
            plan = plan or self._continue(
                found, keys, self._as_sampled(found, conversation, tools, options), conversation
            )
        if plan is None:
            ids = self._encode(text)
            plan = Plan(
                prompt_ids=ids,
                new_ids=ids,
                text=text,
                keys=keys,
                images=list(conversation.images),
                base=None,
                broken=found is not None,
            )
        self._check_length(plan)
        self.calls += 1
        return plan

    def _find(self, keys: Sequence[Key]) -> tuple[Branch, Reply] | None:
        """The longest recorded history that these messages begin with."""
        best: tuple[Branch, Reply] | None = None
        for branch in self.branches:
            for reply in reversed(branch.replies):
                if best is not None and reply.keys <= best[1].keys:
                    break
                if reply.keys < len(keys) and branch.keys[: reply.keys] == list(keys[: reply.keys]):
                    best = (branch, reply)
                    break
        return best

    def _continue(
        self, base: tuple[Branch, Reply], keys: list[Key], text: str | None, conversation: Conversation
    ) -> Plan | None:
        branch, reply = base
        known = branch.text[: reply.text]
        if text is None or not text.startswith(known):
            return None
        new_ids = self._encode(text[len(known) :])
        return Plan(
            prompt_ids=branch.recorder.token_ids[: reply.tokens] + new_ids,
            new_ids=new_ids,
            text=text,
            keys=keys,
            images=list(conversation.images),
            base=base,
        )

    def _as_sampled(
        self,
        base: tuple[Branch, Reply],
        conversation: Conversation,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> str | None:
        """The conversation with every recorded reply in the model's own words (tool calls as it spelled them)."""
        branch, last = base
        messages = list(conversation.messages)
        for reply in branch.replies:
            if reply.keys <= last.keys:
                messages[reply.keys - 2] = {"role": "assistant", "content": reply.raw}  # keys also count the tools
        try:
            return self.renderer.render(messages, tools, options)
        except ApiError:
            return None

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.tokenized += len(ids)
        return ids

    def _check_length(self, plan: Plan) -> None:
        if len(plan.prompt_ids) >= self.max_length:
            self.stop_reason = StopReason.LENGTH
            raise bad_request(
                f"the prompt has {len(plan.prompt_ids)} tokens, the maximum context length is {self.max_length} "
                "tokens and at least one is needed for the answer",
                "messages",
                "context_length_exceeded",
            )

    async def generate(self, plan: Plan, sampling: SamplingParams) -> Generation:
        """Samples one reply; max_tokens is what the request, the trainer and the context all allow."""
        caps = [sampling.max_tokens, self.sampling.max_tokens, self.max_length - len(plan.prompt_ids)]
        tokens = min(cap for cap in caps if cap is not None)
        generation = await self.engine.generate(plan.prompt_ids, sampling.with_(max_tokens=tokens), plan.images or None)
        if generation.finish_reason == "abort":
            raise ApiError(503, "the engine aborted the request")
        return self._finite(generation)

    def _finite(self, generation: Generation) -> Generation:
        """Log-probs that JSON can hold; a sample with an invalid one is answered, but not trained on."""
        logprobs = [p if p is not None and math.isfinite(p) else LOWEST_LOGPROB for p in generation.logprobs]
        if logprobs != list(generation.logprobs):
            wrong = next(i for i, p in enumerate(generation.logprobs) if p is None or not math.isfinite(p))
            self.failure = Failure(
                border="engine",
                message=f"logprob {wrong} of call {self.calls} is invalid: {generation.logprobs[wrong]!r}",
            )
        finite = replace(generation, logprobs=logprobs)
        check_generation(finite)
        return finite

    def decode(self, plan: Plan, token_ids: Sequence[int]) -> str:
        """The text of sampled ids where they stand: some tokenizers drop the first blank of a text of its own."""
        context = plan.prompt_ids[-DECODE_CONTEXT:]
        before = self.tokenizer.decode(context, skip_special_tokens=False)
        text = self.tokenizer.decode([*context, *token_ids], skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def commit(self, plan: Plan, generation: Generation, key: Key, raw: str) -> None:
        """Records a reply. key: of the message that the client gets. raw: its text without the end token."""
        self.template_breaks += plan.broken
        branch = self._branch_for(plan)
        branch.recorder.append_sampled(generation)
        branch.recorder.images = plan.images
        branch.text = plan.text + self.decode(plan, generation.token_ids)
        branch.keys = [*plan.keys, key]
        branch.replies.append(Reply(keys=len(branch.keys), tokens=len(branch.recorder), text=len(branch.text), raw=raw))

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
            branch.replies = [reply for reply in origin.replies if reply.keys <= last.keys]
        self.branches.append(branch)
        return branch
