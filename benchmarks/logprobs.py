"""Peak memory and time of forward + backward: chunked token log-probs against the plain way.

    python benchmarks/logprobs.py [--vocab 151936] [--hidden 256] [--tokens 2048] [--json FILE]

Plain: fp32 logits [N, V], log_softmax, gather, backward; the logits themselves are dropped as soon as autograd allows.
Every variant runs in a fresh process. Memory is the high-water mark of the resident set (VmHWM) minus the resident set
with all inputs in place, so it holds everything that forward and backward add, gradients included. Time is the fastest
of the repetitions; the limit is on CPU seconds, which other load on the machine disturbs less than wall seconds.
Linux only. Exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MEMORY_SHARE = 0.20
"""Chunked peak memory as a share of the plain one, at the same number of tokens."""

TIME_RATIO = 1.5

LONG_FACTOR = 4
LONG_MEMORY_SHARE = 0.15
"""Chunked peak memory at LONG_FACTOR times the tokens, as a share of LONG_FACTOR times the plain peak."""


CHILD_TIMEOUT = 3600.0
"""Seconds for one variant: generous, for a machine that others use too."""


@dataclass(frozen=True, kw_only=True)
class Result:
    variant: str
    tokens: int
    peak_mib: float
    seconds: float
    cpu_seconds: float
    checksum: float


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure(variant: str, tokens: int, vocab: int, hidden_size: int, repeats: int, threads: int) -> Result:
    """Run one variant in this process."""
    import torch

    from openrlhf.core.logprobs import token_logprobs

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight = torch.empty(vocab, hidden_size).normal_(std=0.05).requires_grad_()
    hidden = torch.empty(tokens, hidden_size).normal_().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))

    def plain() -> torch.Tensor:
        return (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    def chunked() -> torch.Tensor:
        return token_logprobs(hidden, weight, targets)[0]

    run: Callable[[], torch.Tensor] = {"plain": plain, "chunked": chunked}[variant]
    before, seconds, cpu_seconds = resident_mib("VmRSS"), float("inf"), float("inf")
    for _ in range(repeats):
        weight.grad = hidden.grad = None
        start, cpu_start = time.perf_counter(), time.process_time()
        run().sum().backward()
        seconds = min(seconds, time.perf_counter() - start)
        cpu_seconds = min(cpu_seconds, time.process_time() - cpu_start)
    peak = resident_mib("VmHWM") - before
    assert weight.grad is not None
    checksum = float(weight.grad.double().square().sum())
    return Result(
        variant=variant, tokens=tokens, peak_mib=peak, seconds=seconds, cpu_seconds=cpu_seconds, checksum=checksum
    )


def measure_in_child(variant: str, tokens: int, args: argparse.Namespace) -> Result:
    command = [sys.executable, __file__, "--child", variant, "--tokens", str(tokens), "--vocab", str(args.vocab)]
    command += ["--hidden", str(args.hidden), "--repeats", str(args.repeats), "--threads", str(args.threads)]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=CHILD_TIMEOUT)
    return Result(**json.loads(done.stdout))


def checks(plain: Result, chunked: Result, long: Result) -> dict[str, tuple[float, float]]:
    """Name -> (measured, limit)."""
    return {
        f"memory, chunked / plain at {plain.tokens}": (chunked.peak_mib / plain.peak_mib, MEMORY_SHARE),
        f"CPU time, chunked / plain at {plain.tokens}": (chunked.cpu_seconds / plain.cpu_seconds, TIME_RATIO),
        f"memory, chunked at {long.tokens} / {LONG_FACTOR} x plain at {plain.tokens}": (
            long.peak_mib / (LONG_FACTOR * plain.peak_mib),
            LONG_MEMORY_SHARE,
        ),
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of token log-probs.", allow_abbrev=False)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--child", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.child:
        result = measure(args.child, args.tokens, args.vocab, args.hidden, args.repeats, args.threads)
        print(json.dumps(asdict(result)))
        return 0
    plain = measure_in_child("plain", args.tokens, args)
    chunked = measure_in_child("chunked", args.tokens, args)
    long = measure_in_child("chunked", LONG_FACTOR * args.tokens, args)
    error = abs(chunked.checksum / plain.checksum - 1)
    if error > 1e-4:
        raise RuntimeError(f"the two ways disagree: relative difference of the squared gradients {error!r}")

    print(f"vocabulary {args.vocab}, hidden {args.hidden}, float32, {args.threads} thread(s)")
    print(f"{'variant':<10}{'tokens':>8}{'peak MiB':>12}{'seconds':>10}{'CPU s':>8}")
    for r in (plain, chunked, long):
        print(f"{r.variant:<10}{r.tokens:>8}{r.peak_mib:>12.0f}{r.seconds:>10.2f}{r.cpu_seconds:>8.2f}")
    limits = checks(plain, chunked, long)
    for name, (value, limit) in limits.items():
        print(f"{'ok  ' if value <= limit else 'MISS'} {name}: {value:.3f} (limit {limit})")
    summary = {"results": [asdict(r) for r in (plain, chunked, long)], "checks": limits}
    print(json.dumps(summary))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if all(value <= limit for value, limit in limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
