"""SFT -> reward model -> RL with it (in the cluster, then as a server) -> DPO on the same pairs, on two CPU cores.

python examples/pipeline/pipeline.py [--seed 1] [--output out/pipeline] [--without-rl]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import stages
from stages import Places, Sizes

RISE = 5  # steps at either end of an RL stage whose mean rewards are compared


@dataclass(frozen=True)
class Measure:
    """One line of the closing table: what was measured, and whether it is what the stage is for."""

    stage: str
    text: str
    ok: bool


class StageFailedError(RuntimeError):
    """A stage's command ended with an error."""


def run(stage: str, command: list[str]) -> None:
    """Run a stage's command to its end."""
    began = time.monotonic()
    print(f"== {stage}: {' '.join(command[1:])}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise StageFailedError(f"stage {stage!r} ended with exit code {code}")
    print(f"== {stage}: {time.monotonic() - began:.0f} s", flush=True)


@contextmanager
def server(command: list[str]) -> Iterator[str]:
    """The reward server; its URL."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next((m[0] for line in process.stdout if (m := re.search(r"http://\S+/get_reward", line))), None)
        if url is None:
            raise StageFailedError(f"the reward server ended with exit code {process.wait()}")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


def make_base(places: Places, seed: int) -> None:
    """The untrained model and its tokenizer."""
    from model import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=seed).save_pretrained(places.base)
    tokenizer.save_pretrained(places.base)


def accuracy(places: Places, stage: str) -> float:
    """Held-out accuracy at temperature 1 of the model that a stage made."""
    from evaluate import accuracy as judge
    from task import read_jsonl

    return judge(places.model(stage), read_jsonl(places.data("held_out")) * 2)


def supervised_stages(places: Places) -> list[Measure]:
    """SFT and the reward model."""
    run("sft", stages.sft_command(places))
    loss = stages.logged(places, "sft", "train/gpt_loss")
    run("reward_model", stages.reward_model_command(places))
    pairs = stages.logged(places, "reward_model", "eval/acc")[-1]
    return [
        Measure("sft", f"loss {loss[0]:.2f} -> {loss[-1]:.2f}", loss[-1] < loss[0]),
        Measure("reward_model", f"held-out pair accuracy {pairs:.3f}", pairs >= 0.95),
    ]


def rl_stages(places: Places) -> list[Measure]:
    """RL with the reward model in the cluster, then on with the same model behind a server."""
    run("rl_in_cluster", stages.rl_command(places, "rl_in_cluster", "sft", stages.in_cluster(places)))
    with server(stages.server_command(places)) as url:
        run("rl_remote", stages.rl_command(places, "rl_remote", "rl_in_cluster", {"reward.remote_url": url}))
    first, second = (stages.logged(places, stage, "train/reward") for stage in ("rl_in_cluster", "rl_remote"))
    start, middle, end = (sum(part) / len(part) for part in (first[:RISE], first[-RISE:], second[-RISE:]))
    right = [accuracy(places, stage) for stage in ("sft", "rl_in_cluster", "rl_remote")]
    return [
        _rise("rl_in_cluster", (start, middle), (right[0], right[1])),
        _rise("rl_remote", (start, end), (right[0], right[2])),
    ]


def _rise(stage: str, reward: tuple[float, float], right: tuple[float, float]) -> Measure:
    text = f"reward {reward[0]:.2f} -> {reward[1]:.2f}, held-out accuracy at T=1 {right[0]:.3f} -> {right[1]:.3f}"
    return Measure(stage, text, reward[1] > reward[0] and right[1] > right[0])


def dpo_stage(places: Places, start: str, steps: int) -> Measure:
    """Preference training on the pairs of the reward model."""
    run("dpo", stages.dpo_command(places, start, steps))
    margin, pairs = (stages.logged(places, "dpo", name)[-1] for name in ("eval/margin", "eval/acc"))
    return Measure("dpo", f"held-out margin {margin:.3f}, accuracy {pairs:.3f}", margin > 0)


def pipeline(places: Places, sizes: Sizes, *, seed: int, with_rl: bool) -> list[Measure]:
    """All stages, from nothing. Raises StageFailedError when a command fails."""
    stages.clear(places)
    stages.write_data(places, sizes, seed)
    make_base(places, seed)
    found = supervised_stages(places)
    if with_rl:
        found += rl_stages(places)
    found.append(dpo_stage(places, "rl_remote" if with_rl else "sft", sizes.dpo))
    return found


def main(argv: list[str]) -> int:
    """Run the pipeline and print the table; exit status 1 when a stage failed or did not do what it is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("out/pipeline"), help="everything is written here")
    parser.add_argument("--without-rl", action="store_true", help="leave the two RL stages out")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    try:
        found = pipeline(Places(args.output.resolve()), sizes, seed=args.seed, with_rl=not args.without_rl)
    except StageFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"{'ok ' if m.ok else 'NOT'}  {m.stage:14} {m.text}" for m in found))
    return int(not all(m.ok for m in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
