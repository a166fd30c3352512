import pytest
from report import Summary, phase_seconds, read_events, render_table, require, terminal_plot
from torch.utils.tensorboard import SummaryWriter


@pytest.fixture
def events(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step, (reward, total) in enumerate([(0.4, 2.0), (0.9, 1.0)], start=1):
            writer.add_scalar("train/reward", reward, step)
            writer.add_scalar("timing/step_total", total, step)
            writer.add_scalar("timing/generation", 0.5, step)
            writer.add_scalar("timing/ppo_train", 0.25, step)
    return read_events(tmp_path)


def test_reads_every_scalar(events) -> None:
    assert sorted(events) == ["timing/generation", "timing/ppo_train", "timing/step_total", "train/reward"]
    assert [(p.step, round(p.value, 6)) for p in events["train/reward"]] == [(1, 0.4), (2, 0.9)]


def test_phases_add_up_to_the_steps(events) -> None:
    phases = phase_seconds(events)
    assert phases == {"generation": 1.0, "make_experience": 0, "ppo_train": 0.5, "broadcast": 0, "other": 1.5}


def test_missing_tag_is_named(events) -> None:
    with pytest.raises(ValueError, match=r"no 'train/nothing'.*'train/reward'"):
        require(events, "train/nothing")


def test_terminal_plot_rises() -> None:
    lines = terminal_plot([0.0, 0.5, 1.0], height=2).splitlines()
    assert lines == [" 1.0 ┤  █", "     │ ██", "     └───", "      1 3"]


def test_terminal_plot_averages_long_runs() -> None:
    assert max(len(line) for line in terminal_plot([0.5] * 500, width=40).splitlines()) == 46
    assert terminal_plot([]) == "(no values)"


def test_table_lists_everything() -> None:
    summary = Summary(
        reward_first=0.41,
        reward_last=0.95,
        accuracy_before=0.43,
        accuracy_after=0.93,
        seconds={"training command": 100.0},
        places={"trained model": "/out/model"},
        next={"look at the curves": "tensorboard --logdir /out/tb"},
    )
    lines = render_table(summary).splitlines()
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines}) == 1
    assert lines[3].split()[-2:] == ["after", "0.930"]
    assert lines[-1].endswith("tensorboard --logdir /out/tb")
