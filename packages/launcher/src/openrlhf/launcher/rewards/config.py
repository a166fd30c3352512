"""Command-line section of judges, `--judge.*`: models that are asked for rewards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A model that grades answers by a rubric: a reward source `openai:URL` of `--reward.remote_url`, or `judge`.

    The key of a server is read from the variable OPENRLHF_JUDGE_API_KEY, or OPENRLHF_JUDGE_NAME_API_KEY for one with a
    name.
    """

    model_name_or_path: str | None = None
    """Model of the source judge, which runs in the cluster on engines of its own; they get no weights of the policy."""
    num_engines: int = 1
    """Engines of that model."""
    tensor_parallel_size: int = 1
    """Tensor-parallel degree of each of them: that many devices per engine."""
    max_len: int = 8192
    """Most tokens of a question to that model, its answer included."""
    rubric: tuple[str, ...] = ()
    """TOML file with what the judge is asked and how its answer becomes a score. For several judges: NAME=FILE of
    each."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_new_tokens: int = 1024
    """Most tokens of its answer."""
    max_concurrency: int = 64
    """Requests to each judge under way at the same time, of the whole run; agent workers share them evenly and have at
    least one each."""
    timeout: float = 120.0
    """Seconds that one attempt of a request may take, once it is sent."""
    attempts: int = 4
    """How often a request is made at most, where a server is away, busy or too slow."""
    unreadable_score: float | None = None
    """Score of an answer in which the rubric finds none. None: its sample fails, as with any reward that is missing."""

    @property
    def engines(self) -> int:
        """Engines of a judge inside the cluster."""
        return 0 if self.model_name_or_path is None else self.num_engines
