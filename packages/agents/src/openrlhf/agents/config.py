"""Command-line sections of the agents package: `--agent.*` and the reward-function part of `--reward.*`."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        for name in ("num_workers", "max_turns", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"`agent.{name}` must be at least 1, got {getattr(self, name)!r}")
        if not self.timeout > 0:
            raise ValueError(f"`agent.timeout` must be more than 0 seconds, got {self.timeout!r}")


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """The worker process of a Python reward function (`--reward.*`)."""

    timeout: float = 60.0
    """Seconds that one call of the reward function (one prompt group) may take; then its process is killed and
    restarted and the group's samples fail. They are masked out, never scored 0. Neither the wait for the process nor
    the import of the file counts."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"`reward.timeout` must be more than 0 seconds, got {self.timeout!r}")
