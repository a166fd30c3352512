import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import run


def test_command_names_the_warm_start_and_the_seed() -> None:
    paths = run.Paths(output=Path("/o"), seed=2)
    command = run.train_command(paths, Path("/o/t.jsonl"), Path("/o/e.jsonl"), ["--train.max_steps", "3"])
    assert command[1:3] == ["-m", "openrlhf.cli.train_ppo_ray"]
    pairs = dict(pairwise(command))
    assert pairs["--actor.model_name_or_path"] == "/o/warm_start"
    assert pairs["--train.seed"] == "2"
    assert command[-2:] == ["--train.max_steps", "3"]
    assert " \\\n    --train.seed 2" in run.shown(command)


def test_given_flag_replaces_the_one_of_the_script() -> None:
    paths = run.Paths(output=Path("/o"), seed=2)
    command = run.train_command(paths, Path("/o/t"), Path("/o/e"), ["--eval.steps=5", "--actor.adam.lr", "1e-4"])
    assert [part for part in command if part.startswith("--eval.steps")] == ["--eval.steps=5"]
    assert command.count("--actor.adam.lr") == 1
    assert command[-3:] == ["--eval.steps=5", "--actor.adam.lr", "1e-4"]


def test_flags_after_two_dashes_reach_the_trainer() -> None:
    args = run.parse(["--seed", "3", "--", "--algo.advantage.estimator", "rloo"])
    assert (args.seed, args.extra) == (3, ["--algo.advantage.estimator", "rloo"])


def test_exit_code_of_the_training_command_is_kept() -> None:
    assert run.run_training([sys.executable, "-c", "raise SystemExit(7)"]) == 7


def test_signal_reaches_the_training_command(quickstart) -> None:
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)"
    )
    code = f"import sys, run; sys.exit(run.run_training([sys.executable, '-c', {child!r}]))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=quickstart, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 143


def test_x01_only_what_a_quickstart_made_is_removed(tmp_path: Path) -> None:
    run.clear(tmp_path / "seed1")
    (tmp_path / "seed1" / "model").mkdir()
    (tmp_path / "seed1" / "notes.md").write_text("mine")
    run.clear(tmp_path / "seed1")
    assert sorted(p.name for p in (tmp_path / "seed1").iterdir()) == [run.MARK, "notes.md"]
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(SystemExit, match="holds files that no quickstart made"):
        run.clear(tmp_path)
