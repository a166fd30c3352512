import random
from collections import Counter

import task


def test_sorts_digits() -> None:
    example = task.sort_example("60453")
    assert (example.question, example.answer) == ("sort 60453", "03456")


def test_same_seed_same_examples() -> None:
    assert task.draw_examples(5, seed=3) == task.draw_examples(5, seed=3)
    assert task.draw_examples(5, seed=3) != task.draw_examples(5, seed=4)


def test_imperfect_answers_keep_the_digits_and_are_often_wrong() -> None:
    rng = random.Random(0)
    answers = [task.imperfect_answer("01234", rng, 0.6) for _ in range(2000)]
    assert all(Counter(a) == Counter("01234") for a in answers)
    assert 0.38 < sum(a == "01234" for a in answers) / 2000 < 0.48
    assert {task.imperfect_answer("01234", rng, 0.0) for _ in range(20)} == {"01234"}


def test_datasets_hold_out_the_evaluation_prompts(tmp_path) -> None:
    train, held_out = task.make_datasets(tmp_path, train_count=2000, eval_count=512, seed=1)
    train_rows, eval_rows = task.read_jsonl(train), task.read_jsonl(held_out)
    assert (len(train_rows), len(eval_rows)) == (2000, 512)
    assert not {e.question for e in train_rows} & {e.question for e in eval_rows}
    assert any(e.answer.startswith("0") for e in train_rows), "leading zeros must survive the file"


def test_evaluation_prompts_do_not_depend_on_the_seed(tmp_path) -> None:
    files = [task.make_datasets(tmp_path / str(s), train_count=8, eval_count=16, seed=s) for s in (1, 2)]
    assert files[0][1].read_text() == files[1][1].read_text()
    assert files[0][0].read_text() != files[1][0].read_text()
