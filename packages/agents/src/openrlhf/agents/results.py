"""What `execute` returns, as trajectories: ours, several of ours, or the dict of token lists.

The dict has observation_tokens (the whole sequence), action_ranges (start, end) of what the policy sampled, reward,
and optionally rollout_log_probs, scores, extra_logs, truncated (else: whether a call of the engine was cut), images,
and turn_rewards: one number per action range, whose sum is the reward, which may then be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from openrlhf.agents.context import SampleEngine
from openrlhf.agents.engine import Generation
from openrlhf.agents.recorder import Outcome, Recorder, check_generation, ended_by
from openrlhf.agents.types import PromptItem, StopReason, Trajectory, Turn
from openrlhf.agents.values import finite_logs, to_finite, to_plain, turn_rewards, whole_reward


def as_trajectories(result: Any, item: PromptItem, engine: SampleEngine, max_length: int) -> list[Trajectory]:
    """The samples of one `execute` call. Raises ValueError where the result keeps no contract."""
    if isinstance(result, Mapping):
        return [_from_dict(result, item, engine, max_length)]
    several = list(result) if isinstance(result, (list, tuple)) else [result]
    if not several or not all(isinstance(t, Trajectory) for t in several):
        raise ValueError(
            "execute() must return a Trajectory, a list of them, or a dict with observation_tokens, action_ranges and "
            f"reward; got {type(result).__name__}: {result!r}"
        )
    for trajectory in several:
        _check_turns(trajectory.turns)
    return [_own(trajectory, item, engine.sample_index, max_length) for trajectory in several]


def _check_turns(turns: Sequence[Turn]) -> None:
    """Rewards of turns are finite, and their turns follow one another. Raises ValueError."""
    rewards = [turn.reward for turn in turns if turn.reward is not None]
    if rewards and any(a.end > b.start for a, b in pairwise(turns)):
        raise ValueError(f"execute(): turns with rewards must follow one another, got {list(turns)!r}")
    turn_rewards(rewards, len(rewards), "execute()")


def _own(trajectory: Trajectory, item: PromptItem, sample_index: int, max_length: int) -> Trajectory:
    if len(trajectory.token_ids) > max_length:
        raise ValueError(f"execute() returned {len(trajectory.token_ids)} tokens, more than `max_length` {max_length}")
    return replace(
        trajectory,
        token_ids=list(trajectory.token_ids),  # its author may keep the lists, and a late call append to them
        trainable=list(trajectory.trainable),
        logprobs=list(trajectory.logprobs),
        versions=list(trajectory.versions),
        group_id=item.group_id,
        sample_index=sample_index,
        prompt=item.prompt,
        label=item.label,
        stop_reason=ended_by(trajectory.stop_reason, trajectory.turns),
    )


def _from_dict(result: Mapping[str, Any], item: PromptItem, engine: SampleEngine, max_length: int) -> Trajectory:
    missing = [key for key in ("observation_tokens", "action_ranges") if result.get(key) is None]
    if missing:
        raise ValueError(f"execute() returned a dict without {missing}; it has {sorted(result)}")
    ids = [int(i) for i in to_plain(result["observation_tokens"])]
    ranges = _read_ranges(result["action_ranges"], len(ids))
    given = result.get("rollout_log_probs")
    logprobs = None if given is None else _read_logprobs(given, len(ids))
    recorder = Recorder(ids[: ranges[0][0]] if ranges else ids, tuple(result.get("images") or item.images))
    for start, end, generation in _attribute(ids, ranges, logprobs, engine.calls):
        recorder.append_environment(ids[len(recorder) : start])
        recorder.append_sampled(generation)
        assert len(recorder) == end
    recorder.append_environment(ids[len(recorder) :])
    turns = None
    if result.get("turn_rewards") is not None:
        turns = turn_rewards(result["turn_rewards"], len(ranges), "execute()")
        for number, reward in enumerate(turns):
            recorder.reward_turn(reward, number)
    truncated = len(ids) > max_length
    return _finish(_cut(recorder, max_length), result, item, engine.sample_index, turns, truncated=truncated)


def _finish(
    recorder: Recorder,
    result: Mapping[str, Any],
    item: PromptItem,
    sample_index: int,
    turns: Sequence[float] | None,
    *,
    truncated: bool,
) -> Trajectory:
    given = {name: result[name] for name in ("reward", "scores") if result.get(name) is not None}
    numbers = {name: to_finite(value, "execute()", name) for name, value in given.items()}
    reward = numbers.get("reward")
    if turns is not None:
        reward = whole_reward(reward, turns, "execute()")
    said = result.get("truncated")
    truncated = truncated or bool(to_plain(said or False))
    outcome = Outcome(
        stop_reason=StopReason.LENGTH if truncated else StopReason.DONE,
        reward=reward,
        score=numbers.get("scores", reward),
        extra_logs=finite_logs(result.get("extra_logs")),
    )
    trajectory = recorder.finish(item, sample_index, outcome)
    # Where the author says that the answer was not cut, a cut call was none of it.
    return trajectory if truncated or said is None else replace(trajectory, stop_reason=StopReason.DONE)


def _read_ranges(value: Any, length: int) -> list[tuple[int, int]]:
    ranges = [(int(start), int(end)) for start, end in to_plain(value)]
    last = 0
    for start, end in ranges:
        if not last <= start <= end <= length:
            raise ValueError(
                f"execute(): action_ranges must be ascending (start, end) pairs within {length} tokens, got {ranges!r}"
            )
        last = end
    return ranges


def _read_logprobs(value: Any, length: int) -> list[float]:
    logprobs = list(to_plain(value))
    if len(logprobs) != length:
        raise ValueError(
            f"execute(): rollout_log_probs must have one value per observation token ({length}, 0.0 where nothing was "
            f"sampled), got {len(logprobs)}"
        )
    return [float(v) for v in logprobs]


def _attribute(
    ids: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    logprobs: Sequence[float] | None,
    calls: Sequence[Generation],
) -> list[tuple[int, int, Generation]]:
    """Finds for every action range the generation call that sampled it, in order, for its log-probs and versions."""
    found = []
    unused = list(calls)
    for start, end in ranges:
        tokens = list(ids[start:end])
        match = next((i for i, call in enumerate(unused) if _sampled(call, tokens)), None)
        call = None
        if match is not None:
            call = unused[match]
            del unused[: match + 1]
        found.append((start, end, _generation(tokens, None if logprobs is None else logprobs[start:end], call, calls)))
    return found


def _sampled(call: Generation, tokens: list[int]) -> bool:
    """The call gave these tokens, or began with them; an empty range takes an empty answer, never the next call's."""
    return list(call.token_ids[: len(tokens)] if tokens else call.token_ids) == tokens


def _generation(
    tokens: list[int], logprobs: Sequence[float] | None, call: Generation | None, calls: Sequence[Generation]
) -> Generation:
    n = len(tokens)
    if logprobs is None and not n:
        logprobs = []
    elif logprobs is None:
        if call is None:
            raise ValueError(
                f"execute(): the action tokens {tokens[:8]!r}... were not sampled by llm_engine and have no "
                "rollout_log_probs; return sampled ids unchanged"
            )
        logprobs = call.logprobs[:n]
    # Tokens of an unknown call are as stale as the oldest call of the episode.
    oldest = min((v for c in calls for v in c.versions), default=-1)
    versions = [oldest] * n if call is None else list(call.versions[:n])
    generation = Generation(
        token_ids=tokens,
        logprobs=list(logprobs),
        versions=versions,
        finish_reason="stop" if call is None else call.finish_reason,
    )
    check_generation(generation)
    return generation


def _cut(recorder: Recorder, max_length: int) -> Recorder:
    if len(recorder) <= max_length:
        return recorder
    for values in (recorder.token_ids, recorder.trainable, recorder.logprobs, recorder.versions):
        del values[max_length:]
    recorder.turns = [
        replace(turn, end=min(turn.end, max_length)) for turn in recorder.turns if turn.start < max_length
    ]
    recorder.prompt_length = min(recorder.prompt_length, max_length)
    return recorder
