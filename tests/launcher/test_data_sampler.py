from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.data.sampler import PromptSampler, order


class Numbers:
    """A prompt source whose prompts are their own numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        return PromptItem(group_id=f"e{episode}-p{index}", prompt=str(index), position=position, episode=episode)


def test_order_is_a_permutation_that_follows_seed_and_episode() -> None:
    first = order(50, seed=1, episode=0).tolist()
    assert sorted(first) == list(range(50))
    assert first == order(50, seed=1, episode=0).tolist()
    assert first != order(50, seed=2, episode=0).tolist()
    assert first != order(50, seed=1, episode=1).tolist()


def test_b049_the_last_batch_is_smaller_and_nothing_is_lost() -> None:
    sampler = PromptSampler(Numbers(5), seed=0)
    batches = [sampler.next(2) for _ in range(3)]
    assert [len(b) for b in batches] == [2, 2, 1]
    assert sorted(i.prompt for b in batches for i in b) == list("01234")
    assert [i.position for b in batches for i in b] == [0, 1, 2, 3, 4]
    assert sampler.next(2) == []


@given(size=st.integers(1, 20), stop=st.integers(0, 20), batch=st.integers(1, 7))
def test_b115_resumed_sampler_goes_on_where_it_stopped(size: int, stop: int, batch: int) -> None:
    whole = PromptSampler(Numbers(size), seed=3)
    whole.start_episode(2)
    everything = whole.next(size)
    stopped = PromptSampler(Numbers(size), seed=3)
    stopped.start_episode(2)
    done = stopped.next(stop)
    resumed = PromptSampler(Numbers(size), seed=3)
    resumed.load_state_dict(stopped.state_dict())
    while items := resumed.next(batch):
        done += items
    assert done == everything


def test_b114_an_exhausted_state_starts_the_next_episode() -> None:
    sampler = PromptSampler(Numbers(3), seed=0)
    sampler.next(3)
    resumed = PromptSampler(Numbers(3), seed=0)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.next(1) == []
    resumed.start_episode(resumed.episode + 1)
    assert len(resumed.next(5)) == 3


def test_another_dataset_or_seed_is_refused() -> None:
    state = PromptSampler(Numbers(3), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"size 3 \(--data\.prompt_dataset\), this run has 4"):
        PromptSampler(Numbers(4), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"seed 0 \(--train\.seed\), this run has 1"):
        PromptSampler(Numbers(3), seed=1).load_state_dict(state)
