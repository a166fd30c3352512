import pytest
import torch
from evaluate import accuracy, decode_answer, sample_answers
from model import build_model, build_tokenizer
from task import draw_examples
from warm_start import (
    IGNORED,
    OtherHalf,
    WarmStart,
    demonstration_batch,
    half_loss,
    is_made,
    make_warm_start,
    train,
)

TOKENIZER = build_tokenizer()


def test_only_the_answer_and_its_end_are_targets() -> None:
    ids, targets = demonstration_batch(TOKENIZER, WarmStart(batch_size=4, wrong=0.0), step=0)
    assert ids.shape == targets.shape == (4, 19)
    assert (targets[:, :13] == IGNORED).all()
    assert torch.equal(targets[:, 13:], ids[:, 13:])
    for row in ids.tolist():
        question, answer = str(TOKENIZER.decode(row[1:11])), TOKENIZER.decode(row[13:])
        assert answer == "".join(sorted(question.removeprefix("sort "))) + "<|end|>"


def test_loss_falls_within_a_few_steps() -> None:
    losses: list[float] = []
    train(build_model(TOKENIZER), TOKENIZER, WarmStart(steps=60), lambda step, loss: losses.append(loss))
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    assert losses[-1] < 3.0


def test_folder_is_complete_and_remembers_its_settings(tmp_path) -> None:
    settings = WarmStart(steps=2, batch_size=4)
    folder = tmp_path / "warm_start"
    assert not is_made(folder, settings)
    make_warm_start(folder, settings)
    assert is_made(folder, settings)
    assert not is_made(folder, WarmStart(steps=3, batch_size=4))
    make_warm_start(folder, WarmStart(steps=3, batch_size=4))
    assert [p.name for p in tmp_path.iterdir()] == ["warm_start"]
    assert accuracy(folder, draw_examples(8, seed=1)) == 0.0


def test_sampling_depends_on_the_seed_only() -> None:
    model = build_model(TOKENIZER).eval()
    torch.manual_seed(0)
    first = sample_answers(model, TOKENIZER, ["sort 12345"] * 4)
    torch.manual_seed(0)
    assert sample_answers(model, TOKENIZER, ["sort 12345"] * 4) == first
    assert len(set(first)) == 4
    greedy = sample_answers(model, TOKENIZER, ["sort 12345"] * 2, temperature=0.0)
    assert greedy[0] == greedy[1]


def test_answer_ends_at_the_first_end_mark() -> None:
    ids = TOKENIZER.encode("01<|end|>2<|pad|>")
    assert decode_answer(TOKENIZER, ids) == "01"
    assert decode_answer(TOKENIZER, TOKENIZER.encode("01<|pad|>")) == "01<|pad|>"


def test_two_halves_make_the_gradient_of_the_batch() -> None:
    settings = WarmStart(batch_size=7)
    model, alone = build_model(TOKENIZER, seed=3), build_model(TOKENIZER, seed=3)
    with OtherHalf(model, lambda step: half_loss(model, TOKENIZER, settings, step, 1)) as other:
        whole = 0.0
        for _ in range(2):  # twice: the gradients of a step before must not be in it
            model.zero_grad()
            other.begin(5)
            mine = half_loss(model, TOKENIZER, settings, 5, 0)
            mine.backward()
            whole = mine.item() + other.add_gradients()

    ids, targets = demonstration_batch(TOKENIZER, settings, 5)
    logits = alone(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    assert whole == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_a_half_that_fails_ends_the_warm_start(capfd) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

    def fail(step: int) -> torch.Tensor:
        raise ArithmeticError("half is broken")

    with OtherHalf(Broken(), fail) as other:
        other.begin(0)
        with pytest.raises(RuntimeError, match="half of the warm start ended"):
            other.add_gradients()
    assert "ArithmeticError: half is broken" in capfd.readouterr().err
