"""Runs of the supervised command lines, one after the other in one process (a start costs more than they do).

python supervised_runs.py FOLDER: writes `<name>.txt` with what a run printed, and `results.json` with its exit codes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from openrlhf.launcher.logging.logger import RunLogger

RESUMED = {
    "sft": ["--data.output_key", "output", "--ds.packing_samples", "--data.dataloader_num_workers", "1"],
    "rm": ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "64", "--optim", "muon"],
    "dpo": ["--ds.zero_stage", "3", "--ds.lora.rank", "4", "--ds.lora.dropout", "0.1", "--model.nll_loss_coef", "0.1"],
}
"""Options of the runs that are stopped after step 4 of 6 and go on."""

DISTILLED = {
    "distilled": ["--distill.divergence", "forward", "--ref.offload"],
    "distilled-top": [
        "--distill.divergence",
        "jsd",
        "--distill.jsd_beta",
        "0.2",
        "--distill.top_k",
        "8",
        "--distill.coef",
        "2",
        "--distill.nll_coef",
        "0.5",
    ],
}
"""Options of the runs with a larger teacher."""
WARNED = "sft-warned"
WARNED_AFTER = 2
"""The run that gets SIGUSR1, and the step after which it does."""


def write_data(folder: Path, rows: int = 10) -> None:
    """`sft.jsonl` and `pairs.jsonl`: digits to sort."""
    rng = random.Random(0)
    asked = [f"{rng.randrange(10**n):0{n}d}1" for n in [2, 6, 4] * rows][:rows]
    answers = ["".join(sorted(d)) for d in asked]
    sft = [{"input": f"sort {d}", "output": a} for d, a in zip(asked, answers, strict=True)]
    pairs = [
        {"prompt": f"sort {d}", "chosen": a, "rejected": f"{a[::-1]}0"} for d, a in zip(asked, answers, strict=True)
    ]
    for name, lines in (("sft", sft), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def command_lines(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Name of a run -> (command, its arguments)."""
    found: dict[str, tuple[str, list[str]]] = {}
    for kind, extra in RESUMED.items():
        prompt = [] if kind == "sft" else ["--data.prompt_key", "prompt"]
        data = folder / ("sft.jsonl" if kind == "sft" else "pairs.jsonl")
        for name, more in ((f"{kind}-straight", []), (f"{kind}-resumed", ["--ckpt.load_enable"])):
            flags = {
                "model.model_name_or_path": folder / "model",
                "data.dataset": data,
                "data.cache_dir": folder / "tokens",
                "eval.dataset": data,
                "eval.split": "train",
                "data.max_len": 64,
                "train.batch_size": 4,
                "train.micro_batch_size": 2,
                "train.max_epochs": 2,
                "adam.lr": 1e-3,
                "ckpt.path": folder / f"checkpoints-{kind}",
                "ckpt.save_steps": 4,
                "ckpt.output_dir": folder / name,
                "logger.tensorboard_dir": folder / "logs",
                "logger.wandb.run_name": name,
            }
            words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
            found[name] = (f"train_{kind}", [*words, "--data.apply_chat_template", *prompt, *extra, *more])
    warned = [*found["sft-resumed"][1], "--ckpt.path", str(folder / "checkpoints-warned")]
    for name in (WARNED, f"{WARNED}-resumed"):
        found[name] = ("train_sft", [*warned, "--logger.wandb.run_name", name, "--ckpt.output_dir", str(folder / name)])
    learned = [*found["sft-straight"][1], "--ref.model_name_or_path", str(folder / "teacher")]
    for name, extra in DISTILLED.items():
        named = ["--logger.wandb.run_name", name, "--ckpt.output_dir", str(folder / name), "--ckpt.save_steps", "-1"]
        found[name] = ("train_sft", [*learned, *extra, *named])
    adapter = ["--model_path", str(folder / "model"), "--lora_path", str(folder / "dpo-straight")]
    found["merge"] = ("lora_combiner", [*adapter, "--output_path", str(folder / "merged"), "--ds.param_dtype", "fp32"])
    wrong = found["sft-straight"][1]
    found["bad-key"] = ("train_sft", [*wrong, "--data.output_key", "answer"])
    found["bad-model"] = ("train_sft", [*wrong, "--model.model_name_or_path", str(folder / "nowhere")])
    found["bad-resume"] = ("train_sft", [*wrong, "--ckpt.load_enable", "--train.batch_size", "5"])
    return found


def run(command: str, argv: Sequence[str], log: Path) -> int:
    """One run as a process of its own would do it: its exit code."""
    logging.getLogger().handlers.clear()  # the last run's wrote into its own file
    main: Callable[[Sequence[str]], int] = import_module(f"openrlhf.cli.{command}").main
    with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return main(argv)


@contextlib.contextmanager
def warning_signal() -> Iterator[None]:
    """Inside, this process is sent SIGUSR1 when step WARNED_AFTER is logged."""
    log_step = RunLogger.log_step

    def log_and_warn(self: RunLogger, step: int, values: dict[str, float]) -> None:
        log_step(self, step, values)
        if step == WARNED_AFTER:
            os.kill(os.getpid(), signal.SIGUSR1)

    with patch.object(RunLogger, "log_step", log_and_warn):
        yield


def run_all(folder: Path) -> None:
    from support.tiny_models import tiny_qwen3

    tiny_qwen3(folder / "model")
    tiny_qwen3(folder / "teacher", tied=False, seed=1, hidden_size=96, intermediate_size=128)
    write_data(folder)
    codes = {}
    with patch("openrlhf.launcher.supervised.session.leave_distributed"):  # DeepSpeed joins one group in a process
        for name, (command, argv) in command_lines(folder).items():
            with warning_signal() if name == WARNED else contextlib.nullcontext():
                codes[name] = run(command, argv, folder / f"{name}.txt")
    (folder / "results.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    run_all(Path(sys.argv[1]))
