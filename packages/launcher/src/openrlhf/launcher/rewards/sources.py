"""The reward sources of a run: checked, shipped to agent workers, and made there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from openrlhf.agents.config import AUTO, RewardFunctionConfig
from openrlhf.agents.engine import Engine
from openrlhf.agents.files import CodeFile
from openrlhf.agents.memory import usable_bytes
from openrlhf.agents.reward_file import IMPORT_SECONDS
from openrlhf.agents.reward_process import GIB, RewardPool
from openrlhf.agents.reward_sources import NamedSource, RewardSources
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.json_servers import RetryPolicy
from openrlhf.launcher.rewards.http import HttpRewardSource
from openrlhf.launcher.rewards.judge import EngineJudge, JudgeSource, JudgeSpec, ServedJudge
from openrlhf.launcher.threads import usable_cores
from openrlhf.launcher.tokenizers import load_tokenizer

Totals = Callable[[], Mapping[str, float]]

MOST_PROCESSES = 8
"""Of reward functions, where nobody says how many: each holds what its file imports."""
LEAST_MEMORY = 4 * GIB
MEMORY_SHARE = 4
"""One reward process may hold so many times less than there is, where nobody says how much."""


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source; one of the three last says where it is."""

    name: str = ""
    weight: float = 1.0
    file: CodeFile | None = None
    urls: tuple[str, ...] = ()
    judge: JudgeSpec | None = None


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """All that an agent worker needs to make the run's sources. workers: how many share the processes and requests."""

    sources: tuple[SourceSpec, ...] = ()
    choose_by: str | None = None
    api_key: str | None = None
    function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    workers: int = 1

    def share(self, total: int, worker: int) -> int:
        """What worker number `worker` has of something that there is `total` times: evenly, at least one."""
        return max(1, total // self.workers + (worker < total % self.workers))


def reward_spec(config: TrainPPOConfig, sources: tuple[SourceSpec, ...]) -> RewardSpec:
    """What every agent worker of a run is told of its sources."""
    return RewardSpec(
        sources=sources,
        choose_by=config.reward.choose_by,
        api_key=config.reward.api_key,
        function=RewardFunctionConfig(**{f.name: getattr(config.reward, f.name) for f in fields(RewardFunctionConfig)}),
        workers=config.agent.num_workers,
    )


def reward_seconds(config: TrainPPOConfig) -> float:
    """Most seconds that the rewards of one group may take, with every attempt and without the wait for others."""
    call = (config.reward.timeout + IMPORT_SECONDS) * RetryPolicy().attempts
    return call + config.judge.timeout * config.judge.attempts * config.rollout.n_samples_per_prompt


async def make_sources(
    spec: RewardSpec, worker: int, special: Sequence[str], engines: Engine | None = None
) -> RewardSources | None:
    """The sources as one, with a process of every reward function started; None where there is none.

    worker: the number of the agent worker. special: texts of the policy's special tokens. engines: of a judge in the
    cluster.
    """
    if not spec.sources:
        return None
    made = [await _make(spec, source, worker, special, engines) for source in spec.sources]
    return RewardSources(made, spec.choose_by)


async def _make(
    spec: RewardSpec, source: SourceSpec, worker: int, special: Sequence[str], engines: Engine | None
) -> NamedSource:
    if source.file is not None:
        pool = RewardPool(source.file, spec.function.timeout, _processes(spec, worker), _memory(spec.function))
        await pool.start()
        return _named(source, pool, pool.totals)
    if source.judge is not None:
        asked, config = source.judge, source.judge.config
        concurrency = spec.share(config.max_concurrency, worker)
        if asked.urls:
            model = ServedJudge(asked, concurrency)
        else:
            assert engines is not None, "engines of a judge are started where a source is one"
            tokenizer = load_tokenizer(asked.model, flag="--judge.model_name_or_path")
            model = EngineJudge(engines, tokenizer, config, concurrency)
        judge = JudgeSource(model, asked.rubric, special=special, unreadable_score=config.unreadable_score)
        return _named(source, judge, judge.totals)
    servers = HttpRewardSource(source.urls, api_key=spec.api_key, retry=RetryPolicy(timeout=spec.function.timeout))
    return _named(source, servers, dict)


def _named(spec: SourceSpec, source: RewardPool | HttpRewardSource | JudgeSource, totals: Totals) -> NamedSource:
    return NamedSource(name=spec.name, source=source, weight=spec.weight, close=source.close, totals=totals)


def _processes(spec: RewardSpec, worker: int) -> int:
    asked = spec.function.processes
    return spec.share(min(usable_cores(), MOST_PROCESSES) if asked == AUTO else asked, worker)


def _memory(function: RewardFunctionConfig) -> int | None:
    """Bytes that one process may hold; None where nobody knows how much there is."""
    if function.max_memory_gib != AUTO:
        return int(function.max_memory_gib * GIB)
    there = usable_bytes()
    return None if there is None else max(LEAST_MEMORY, there // MEMORY_SHARE)


def reward_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """reward/NAME/...: what the sources counted in a span of time (`RewardSources.totals`).

    calls and failures; seconds and wait_seconds of a call, wait for a process included; of judges their tokens and the
    share of answers that could not be read. A source that was not asked has only its calls.
    """
    metrics: dict[str, float] = {}
    for key, value in totals.items():
        name, _, what = key.rpartition("/")
        calls, samples = (totals.get(f"{name}/{unit}" if name else unit, 0.0) for unit in ("calls", "samples"))
        if what == "samples" or (not calls and what != "calls"):
            continue
        per = {"seconds": calls, "wait_seconds": calls, "unreadable": samples}.get(what, 1.0)
        metrics[f"reward/{name}/{what}" if name else f"reward/{what}"] = value / per
    return metrics
