"""The quickstart: make a tiny model and its data, warm-start it, train it with the real command line, judge the result.

python examples/quickstart/run.py [--seed 1] [--output out/quickstart] [-- FLAGS FOR train_ppo_ray ...]
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import report
import task

HERE = Path(__file__).resolve().parent
EVAL_COUNT = 512
ROLLOUT_BATCH = 16
SAMPLES_PER_QUESTION = 4  # when judging: 2,048 samples put the accuracy within 0.02

MARK = ".quickstart"
"""In the folder of a run."""


@dataclass(frozen=True)
class Paths:
    """Where things lie. The warm start is shared by all seeds; everything else belongs to one run."""

    output: Path
    seed: int
    name: str = ""

    @property
    def warm_start(self) -> Path:
        return self.output / "warm_start"

    @property
    def run(self) -> Path:
        return self.output / (self.name or f"seed{self.seed}")

    @property
    def data(self) -> Path:
        return self.run / "data"

    @property
    def tensorboard(self) -> Path:
        return self.run / "tensorboard"

    @property
    def report(self) -> Path:
        return self.run / "report.html"

    @property
    def model(self) -> Path:
        return self.run / "model"


@dataclass
class Stopwatch:
    """Seconds by phase, in the order in which the phases ended."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self.started
        self.started = now


def train_command(paths: Paths, train_data: Path, eval_data: Path, extra: list[str]) -> list[str]:
    """The training command: 1 engine, 2 learner ranks, REINFORCE++-baseline, 16 prompts x 8 samples per step.

    A flag in `extra` takes the place of the one here.
    """
    flags: dict[str, object] = {
        "actor.model_name_or_path": paths.warm_start,
        "reward.remote_url": HERE / "reward.py",
        "data.prompt_dataset": train_data,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": 64,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 2,
        "vllm.num_engines": 1,
        "ds.zero_stage": 2,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0,
        "actor.adam.lr": 5e-4,
        "rollout.batch_size": ROLLOUT_BATCH,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 10,
        "rollout.micro_batch_size": 64,
        "train.batch_size": 64,
        "train.micro_batch_size": 32,
        "train.seed": paths.seed,
        "eval.dataset": eval_data,
        "eval.steps": 20,
        "eval.temperature": 1.0,
        "eval.n_samples_per_prompt": 1,
        "logger.tensorboard_dir": paths.tensorboard,
        "ckpt.path": paths.run / "checkpoints",
        "ckpt.output_dir": paths.model,
    }
    given = {part.partition("=")[0] for part in extra}
    own = [(f"--{name}", str(value)) for name, value in flags.items() if f"--{name}" not in given]
    pairs = [part for pair in own for part in pair]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *pairs, "--data.apply_chat_template", *extra]


def shown(command: list[str]) -> str:
    """The command as a user would type it, one flag per line."""
    return " ".join(shlex.quote(part) for part in command).replace(" --", " \\\n    --")


def run_training(command: list[str]) -> int:
    """Run the command to its end, handing INT and TERM on to it; its exit code, 128 + n when signal n ended it."""
    child = subprocess.Popen(command)
    received: list[int] = []

    def forward(signum: int, _frame: object) -> None:
        received.append(signum)
        child.send_signal(signum)

    previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if code < 0:
        return 128 - code
    return 128 + received[0] if received and code == 0 else code


def prepare(paths: Paths, steps: int) -> tuple[Path, Path]:
    """Write the data of this run and, unless it is there already, the warm-started model."""
    from warm_start import WarmStart, is_made, make_warm_start

    clear(paths.run)
    data = task.make_datasets(paths.data, train_count=steps * ROLLOUT_BATCH, eval_count=EVAL_COUNT, seed=paths.seed)
    settings = WarmStart()
    if is_made(paths.warm_start, settings):
        print(f"Warm start: {paths.warm_start} is there already", flush=True)
        return data
    print(f"Warm start: {settings.steps} supervised steps on demonstrations, {settings.wrong:.0%} of them spoiled")
    make_warm_start(paths.warm_start, settings, _print_loss)
    return data


def clear(run: Path) -> None:
    """Remove what an earlier run of the same name made. Exits where the folder holds something else."""
    if run.is_dir() and any(run.iterdir()) and not (run / MARK).is_file():
        raise SystemExit(f"{str(run)!r} holds files that no quickstart made: give another --output")
    for name in ("data", "tensorboard", "checkpoints", "model"):
        shutil.rmtree(run / name, ignore_errors=True)
    (run / "report.html").unlink(missing_ok=True)
    run.mkdir(parents=True, exist_ok=True)
    (run / MARK).touch()


def _print_loss(step: int, loss: float) -> None:
    if step % 100 == 0:
        print(f"  step {step:3d}  loss {loss:.3f}", flush=True)


def write_report(paths: Paths) -> None:
    """The page about the run."""
    command = [sys.executable, "-m", "openrlhf.launcher.main", "report", str(paths.tensorboard)]
    subprocess.run([*command, "--output", str(paths.report)], check=True, stdout=subprocess.DEVNULL)


def judge(model: Path, eval_data: Path) -> float:
    """Held-out accuracy at temperature 1 of the model in this folder."""
    from evaluate import accuracy

    examples = task.read_jsonl(eval_data) * SAMPLES_PER_QUESTION
    return accuracy(model, examples)


def summarise(paths: Paths, watch: Stopwatch, train_started: float, before: float, after: float) -> report.Summary:
    """Gather the closing table's numbers from the run's event files."""
    events = report.read_events(paths.tensorboard)
    rewards = report.require(events, report.REWARD)
    first_step = report.require(events, report.STEP_TOTAL)[0].time - train_started
    print("\nReward by rollout step\n" + report.terminal_plot([p.value for p in rewards]) + "\n")
    steps = {f"  all steps: {phase}": value for phase, value in report.phase_seconds(events).items()}
    seconds = {**watch.seconds, "  start until the first step is done": first_step, **steps}
    again = f"{sys.executable} {Path(__file__)} --seed {paths.seed + 1} -- --algo.advantage.estimator group_norm"
    return report.Summary(
        reward_first=rewards[0].value,
        reward_last=rewards[-1].value,
        accuracy_before=before,
        accuracy_after=after,
        seconds=seconds,
        places={
            "trained model": str(paths.model),
            "TensorBoard files": str(paths.tensorboard),
        },
        next={"try GRPO next": again, "see what the run did": f"open {paths.report} in a browser"},
    )


def parse(argv: list[str]) -> argparse.Namespace:
    head, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the training prompts and of the trainer")
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of 16 prompts")
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="everything is written here")
    args = parser.parse_args(head)
    args.extra = extra
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = Paths(output=args.output.resolve(), seed=args.seed)
    watch = Stopwatch()
    import torch
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no other
    torch.set_num_threads(1)  # more only wait for each other on a model this small
    train_data, eval_data = prepare(paths, args.steps)
    before = judge(paths.warm_start, eval_data)
    watch.lap("model, data and warm start")
    print(f"Held-out accuracy at temperature 1 before training: {before:.3f}\n")
    command = train_command(paths, train_data, eval_data, args.extra)
    print(shown(command) + "\n", flush=True)
    train_started = time.time()
    code = run_training(command)
    watch.lap("training command")
    if code:
        print(f"The training command ended with exit code {code}.", file=sys.stderr)
        return code
    write_report(paths)
    after = judge(paths.model, eval_data)
    watch.lap("evaluation of the exported model")
    print(report.render_table(summarise(paths, watch, train_started, before, after)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
