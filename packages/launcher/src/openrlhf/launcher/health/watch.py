"""`HealthWatch`: which alarms come and go. Each is told once, until it has been quiet for `QUIET` steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from statistics import mean
from typing import Any

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.health.checks import ALARMS, REMEMBERED, Expected
from openrlhf.launcher.health.observation import Observation

QUIET = 3
"""Steps without it after which an alarm is over."""
START = 3
"""Steps whose mean is what later ones are compared with."""


@dataclass(frozen=True, kw_only=True)
class News:
    """An alarm that came ("raised") or went ("cleared")."""

    step: int
    name: str
    state: str
    evidence: str
    fix: str

    def row(self) -> dict[str, Any]:
        """As a line of the record's alarms."""
        return {"step": self.step, "time": time.time(), **{k: v for k, v in asdict(self).items() if k != "step"}}

    def __str__(self) -> str:
        if self.state == "cleared":
            return f"step {self.step}: the alarm {self.name} is over"
        return f"step {self.step}: {self.name}: {self.evidence}. What helps: {self.fix}"


class HealthWatch:
    """Remembers the last steps of a run."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._seen: deque[Observation] = deque(maxlen=REMEMBERED)
        self._first: list[tuple[float, float]] = []
        self._in_a_row: dict[str, int] = {}
        self._quiet: dict[str, int] = {}
        self._varied = False
        self._best = -inf
        self._closest = inf

    @property
    def active(self) -> Sequence[str]:
        """The alarms that stand."""
        return sorted(self._quiet)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON values: which alarms stand, and what the run began with and reached.

        The steps that trends are judged by are not in it: those begin anew.
        """
        return {
            "in_a_row": self._in_a_row,
            "quiet": self._quiet,
            "first": self._first,
            "varied": self._varied,
            "best": self._best if isfinite(self._best) else None,
            "closest": self._closest if isfinite(self._closest) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, anew: bool = False) -> None:
        """The inverse of `state_dict`. anew: alarms that stand are told again if they go on, as one that ends a run."""
        if not anew:
            self._in_a_row, self._quiet = dict(state["in_a_row"]), dict(state["quiet"])
        self._first = [(entropy, reward) for entropy, reward in state["first"]]
        self._varied = state["varied"]
        self._best = -inf if state["best"] is None else state["best"]
        self._closest = inf if state["closest"] is None else state["closest"]

    def see(self, now: Observation) -> list[News]:
        """What has changed with this step."""
        self._remember(now)
        news = []
        for name, alarm in ALARMS.items():
            evidence = alarm.check(self._seen, self._expected)
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if evidence else 0
            if evidence and name in self._quiet:
                self._quiet[name] = 0
            elif evidence and self._in_a_row[name] >= alarm.steps:
                self._quiet[name] = 0
                news.append(News(step=now.step, name=name, state="raised", evidence=evidence, fix=alarm.fix))
            elif name in self._quiet:
                self._quiet[name] += 1
                if self._quiet[name] >= QUIET:
                    del self._quiet[name]
                    news.append(News(step=now.step, name=name, state="cleared", evidence="", fix=""))
        return news

    def _remember(self, now: Observation) -> None:
        self._seen.append(now)
        if len(now.rewards):
            self._best = max(self._best, float(now.rewards.max()))
            self._varied = self._varied or now.varies
        if len(self._first) < START and now.entropy is not None and len(now.rewards):
            self._first.append((now.entropy, now.reward))
        start = None
        if len(self._first) == START:
            start = mean(entropy for entropy, _ in self._first), mean(reward for _, reward in self._first)
        kl = now.metrics.get("train/kl")
        if kl is not None and isfinite(kl):
            self._closest = min(self._closest, max(kl, 0.0))
        best, closest = self._best if self._varied else inf, self._closest if isfinite(self._closest) else 0.0
        self._expected = replace(self._expected, best=best, start=start, closest=closest)


def health_watch(config: TrainPPOConfig) -> HealthWatch | None:
    """The watch of a run; None with --logger.health off."""
    if config.logger.health == "off":
        return None
    several = config.rollout.n_samples_per_prompt > 1
    expected = Expected(
        max_norm=config.actor.max_norm,
        rewards=not config.rewards_optional,
        groups=several and config.algo.advantage.row.groups,
    )
    return HealthWatch(expected)
