"""Command-line sections of the agents package: `--agent.*` and the reward-function part of `--reward.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

AUTO = 0
"""Value of a number that follows from the machine; spelled `auto` on the command line."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Worker processes, time-outs and limits of agent episodes (`--agent.*`)."""

    num_workers: int = 1
    """Killable worker processes that run agents; prompt groups are spread over them."""

    timeout: float = 600.0
    """Seconds that one reset() or step() of an agent may take before its sample fails; also how long an event loop
    that an agent blocks is tolerated before the worker is replaced."""

    max_turns: int = 64
    """Generation calls per episode; an episode that is not done by then is cut off and counts as truncated."""

    max_concurrency: int = 1024
    """Episodes that run at the same time in one worker; the others wait."""

    client_sampling: Literal["run", "honour"] = "run"
    """Whose sampling counts where a client of the policy's endpoints asks for some: the run's own, with one line in the
    log, or with honour the client's. The trainer then computes log-probs at the client's temperature; those of a
    truncation (top_p and its like) or penalties of a client stay off-policy."""

    tool_parser: str | None = None
    """vLLM's tool-call parser that reads the answers for clients of the policy's endpoints, by its name in vLLM, or
    auto: by the model's family. Without it answers are read in the formats that are common."""

    reasoning_parser: str | None = None
    """vLLM's reasoning parser, by its name, or auto: by the model's family; Chat Completions then have the reasoning in
    a field of its own. Without it reasoning in <think> and its like is known, and stays in the content there."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "max_turns", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"`agent.{name}` must be at least 1, got {getattr(self, name)!r}")
        if self.client_sampling not in ("run", "honour"):
            raise ValueError(f"`agent.client_sampling` must be run or honour, got {self.client_sampling!r}")
        if not self.timeout > 0:
            raise ValueError(f"`agent.timeout` must be more than 0 seconds, got {self.timeout!r}")


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """The processes of a Python reward function (`--reward.*`)."""

    timeout: float = 60.0
    """Seconds that one call of the reward function (one prompt group) may take; then its process is killed and
    restarted and the group's samples fail. They are masked out, never scored 0. Neither the wait for the process nor
    the import of the file counts."""

    processes: int = field(default=AUTO, metadata={"words": {"auto": AUTO}})
    """Killable processes that call the reward function at the same time, in all; agent workers share them evenly and
    have at least one each. They start when they are needed. auto: one per core that the node can use, at most 8."""

    max_memory_gib: float = field(default=AUTO, metadata={"words": {"auto": float(AUTO)}})
    """Most GiB that one of these processes and what it started may hold; one that takes more is killed, its call made
    once more in a new one, and only then fails its group. auto: a quarter of the node's memory, at least 4."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"`reward.timeout` must be more than 0 seconds, got {self.timeout!r}")
        for name in ("processes", "max_memory_gib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`reward.{name}` must be more than 0, or auto, got {getattr(self, name)!r}")
