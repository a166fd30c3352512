"""Whether a sample holds exactly the tokens that the engine was given and sampled."""

from openrlhf.agents.testing import ScriptedEngine
from openrlhf.agents.types import Trajectory


class SamplingEngine(ScriptedEngine):
    """A scripted engine that keeps what it sampled, in the order of its requests."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.samples: list[list[int]] = []

    def _generation(self, answer, sampling):
        generation = super()._generation(answer, sampling)
        self.samples.append(list(generation.token_ids))
        return generation


def check_exact(trajectory: Trajectory, engine: SamplingEngine) -> None:
    """One branch holds all turns: each prompt is the beginning of the sample, and each answer stands behind it."""
    assert trajectory.failure is None
    assert len(trajectory.turns) == len(engine.requests) == len(engine.samples)
    trained = [False] * len(trajectory.token_ids)
    for turn, request, sample in zip(trajectory.turns, engine.requests, engine.samples, strict=True):
        assert trajectory.token_ids[: turn.start] == request.token_ids
        assert trajectory.token_ids[turn.start : turn.end] == sample
        trained[turn.start : turn.end] = [True] * len(sample)
    assert list(map(bool, trajectory.trainable)) == trained
