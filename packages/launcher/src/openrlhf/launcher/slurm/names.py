"""Strings that Slurm prints: node lists, job ids, tasks per node, GPU requests, times. Pure text, no Slurm needed."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_GROUP = re.compile(r"\[([^\]]*)\]")
_JOB_ID = re.compile(r"(\d+)(?:_(\d+|\[[^\]]+\])|\+(\d+))?")


def expand_nodes(text: str) -> list[str]:
    """The hosts of a compact list, as `scontrol show hostnames` prints them: `n[08-10],m` -> n08, n09, n10, m.

    Raises ValueError for an empty or malformed list.
    """
    hosts = [host for item in _split_outside_brackets(text.strip()) for host in _expand_item(item, text)]
    if not hosts:
        raise ValueError(f"the node list {text!r} names no node")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def _expand_item(item: str, text: str) -> list[str]:
    if item.count("[") != item.count("]") or "[" in _GROUP.sub("", item) or "]" in _GROUP.sub("", item):
        raise ValueError(f"brackets do not match in the node list {text!r}")
    pieces = _GROUP.split(item)  # text, ranges, text, ranges, ..., text
    choices = [_expand_ranges(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(combination) for combination in itertools.product(*choices)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no number or range in the node list {text!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"the range {part!r} runs backwards in the node list {text!r}")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


@dataclass(frozen=True, kw_only=True)
class JobId:
    """`123`, `123_4` (array task), `123_[1-3]` (tasks that wait), `123+1` (part of a heterogeneous job)."""

    job: int
    task: str = ""
    part: int | None = None


def parse_job_id(text: str) -> JobId:
    """Raises ValueError for anything that is no job id."""
    match = _JOB_ID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no Slurm job id: 123, 123_4, 123_[1-3] or 123+1")
    return JobId(job=int(match[1]), task=(match[2] or "").strip("[]"), part=None if match[3] is None else int(match[3]))


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` -> 2, 2, 2, 1. The form of SLURM_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of counts per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def count_gpus(text: str) -> int:
    """`4`, `h100:4`, `gpu:4`, `gpu:h100:4(S:0-1)` or several of them, joined by commas: the number of GPUs.

    Beside one that says `gpu` all others are of another kind: `gpu:4,lscratch:100` are four.
    """
    total, items = 0, re.sub(r"\([^)]*\)", "", text).split(",")
    if any(item.strip().split(":")[0] == "gpu" for item in items):
        items = [item for item in items if item.strip().split(":")[0] == "gpu"]
    for item in items:
        words = item.strip().split(":")
        kinds, count = (words[:-1], words[-1]) if words[-1].isdigit() else (words, "1")
        if kinds and kinds[0] != "gpu" and (len(kinds) > 1 or not words[-1].isdigit()):
            continue  # another generic resource, such as nic:2:1 or shard
        total += int(count)
    return total


def gpus_of_gres(text: str) -> int:
    """`gpu:h100:8,nic:2`: the number of GPUs among generic resources."""
    return count_gpus(",".join(item for item in text.split(",") if item.strip().split(":")[0] == "gpu"))


def minutes(text: str) -> int:
    """A time limit in Slurm's forms, in minutes: `90`, `90:00`, `1:30:00`, `1-0`, `1-02:30`, `1-02:30:00`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time limit: MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
    days, first, second, third = (int(group) if group else 0 for group in match.groups())
    if match[1] is not None:
        seconds = days * 86400 + first * 3600 + second * 60 + third
    elif match[4] is not None:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    if not seconds:
        raise ValueError(f"{text!r} is no limit at all to Slurm, and a run is warned before its limit: give one")
    return -(-seconds // 60)
