import pytest
import torch
from evaluate import accuracy, decode_answer, sample_answers
from model import build_model, build_tokenizer
from task import draw_examples
from warm_start import IGNORED, WarmStart, demonstration_batch, is_made, make_warm_start, train

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
