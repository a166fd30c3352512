"""Several environments on the controller's side: in which order their prompts come, and which of them is switched off.

What an environment is and who runs it: `openrlhf.agents.environments`.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.environments import EnvironmentTable
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.data.curriculum import CurriculumSampler
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.data.prompts import PromptDataset
from openrlhf.launcher.data.sampler import PromptSampler
from openrlhf.launcher.samples import SampleInfo
from openrlhf.rollout import episodes

log = logging.getLogger(__name__)

JUDGED = 8
"""An environment is judged by its last so many groups, when there are so many."""


def sampler(
    prompts: PromptDataset, seed: int, table: EnvironmentTable | None, config: CurriculumConfig | None = None
) -> PromptSampler:
    """What draws the prompts of a run."""
    if table is not None:
        return EnvironmentSampler(prompts, seed, table)
    if config is None or config.curriculum == "uniform":
        return PromptSampler(prompts, seed)
    return CurriculumSampler(prompts, config, seed)


class EnvironmentSampler(PromptSampler):
    """Draws prompts in the table's ratios, and none of an environment that was switched off.

    An environment with a `max_failure_share` is switched off when of its last 8 groups a larger share of episodes
    failed; its failures don't count as those of the run (`--rollout.max_failed_fraction`). Its prompts are passed over
    from then on, and counted. One without is named when all episodes of its last 8 groups failed.
    """

    def __init__(self, dataset: PromptDataset, seed: int, table: EnvironmentTable) -> None:
        self._limits = {e.name: e.max_failure_share for e in table.environments}
        self._last: dict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=JUDGED))
        self._off: dict[str, str] = {}
        self._named: set[str] = set()
        self._skipped: dict[str, int] = defaultdict(int)
        super().__init__(dataset, seed, strata=dataset.strata)

    def next(self, n: int) -> list[PromptItem]:
        """The next n prompts of environments that are on. ValueError when all were switched off."""
        items: list[PromptItem] = []
        while len(items) < n and (drawn := super().next(1)):
            if drawn[0].environment not in self._off:
                items += drawn
                continue
            self._skipped[drawn[0].environment] += 1
            if len(self._off) == len(self._limits):
                told = "; ".join(f"{name}: {why}" for name, why in self._off.items())
                raise ValueError(f"all environments of --train.agent_func_path were switched off: {told}")
        return items

    def judged(self, item: PromptItem) -> bool:
        return self._limits[item.environment] is None

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None:
        name, failures = item.environment, episodes.failures(samples)
        last = self._last[name]
        last.append((len(episodes.by_episode(samples)), len(failures)))
        if len(last) < JUDGED or name in self._off:
            return
        share, limit = self._share(name), self._limits[name]
        what = f"{sum(f for _, f in last)} of the {sum(n for n, _ in last)} episodes of its last {JUDGED} groups failed"
        if limit is not None and share > limit:
            self._off[name] = f"{what}, more than max_failure_share {limit:g}"
            first = failures[0].failure if failures else ""
            log.warning("environment %r is switched off: %s; a failure:\n%s", name, self._off[name], first)
        elif share == 1.0 and name not in self._named:
            self._named.add(name)
            log.warning("environment %r fails always: %s; a failure:\n%s", name, what, failures[0].failure)

    def failing(self) -> dict[str, float]:
        return {name: share for name in self._limits if (share := self._share(name)) > 0}

    def metrics(self) -> dict[str, float]:
        """environment/{name}/failed_share of its last 8 groups, /off (1 or 0), /skipped_prompts so far."""
        found: dict[str, float] = {}
        for name in self._limits:
            if len(self._last[name]) == JUDGED:
                found[f"environment/{name}/failed_share"] = self._share(name)
            found[f"environment/{name}/off"] = float(name in self._off)
            found[f"environment/{name}/skipped_prompts"] = float(self._skipped[name])
        return found

    def state_dict(self) -> dict[str, Any]:
        state = {
            "names": list(self._limits),
            "last": {name: [list(pair) for pair in pairs] for name, pairs in self._last.items()},
            "off": self._off,
            "named": sorted(self._named),
            "skipped": dict(self._skipped),
        }
        return super().state_dict() | {"environments": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stopped. An environment whose max_failure_share was taken away is on again.

        Raises ValueError where that run had other environments: prompts that it had begun would be nobody's.
        """
        super().load_state_dict(state)
        saved = state.get("environments", {"names": []})
        if saved["names"] != list(self._limits):
            then, now = ", ".join(saved["names"]) or "none", ", ".join(self._limits)
            raise ValueError(
                f"the checkpoint was written with the environments {then} (--train.agent_func_path), this run has {now}"
            )
        for name, pairs in saved["last"].items():
            self._last[name].extend(tuple(pair) for pair in pairs)
        self._off = {name: why for name, why in saved["off"].items() if self._limits[name] is not None}
        self._named = set(saved["named"])
        self._skipped.update(saved["skipped"])

    def _share(self, name: str) -> float:
        last = self._last[name]
        return sum(failed for _, failed in last) / max(sum(count for count, _ in last), 1)
