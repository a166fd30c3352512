"""From runs to one HTML page, which opens offline and asks nobody for anything.

Text of a model or a user is never part of the markup: it travels as compressed data, and the page's scripts show it as
text. A policy in the page allows its own scripts, by their hashes, and no address.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from openrlhf.launcher.record.schema import RecordedGroup, RecordedSample
from openrlhf.launcher.report.episodes import difference, interesting, number, pack, step_block
from openrlhf.launcher.report.run_files import Row, RunFiles
from openrlhf.launcher.report.words import in_words

SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "source.js",
    "curves.js",
    "tables.js",
    "tokens.js",
    "branches.js",
    "episodes.js",
    "main.js",
)
"""In the order in which they are loaded; each uses those before it."""
STYLES = ("vendor/uPlot.min.css", "style.css", "viewer.css")

BLOCK = "application/octet-stream"
"""The kind of a block of data, which no browser runs."""
BASE64 = 4 / 3
"""Size of data in a page over its size in bytes."""
SMALLEST_SHARE = 0.001
"""Of the samples; below that a page holds no tokens."""


@dataclass
class Page:
    """A page under way. blocks: name -> compressed data."""

    title: str
    blocks: dict[str, bytes] = field(default_factory=dict)
    live: bool = False

    def html(self) -> str:
        """All of it."""
        scripts = [asset(name) for name in SCRIPTS]
        hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        ask = "'self'" if self.live else "'none'"
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src blob:; connect-src {ask}; "
            "base-uri 'none'; form-action 'none'"
        )
        data = "\n".join(
            f'<script type="{BLOCK}" id="{name}">{base64.b64encode(block).decode()}</script>'
            for name, block in self.blocks.items()
        )
        parts = {
            "POLICY": html.escape(policy),
            "TITLE": html.escape(self.title.encode("utf-8", "replace").decode()),
            "LIVE": "live" if self.live else "",
            "STYLES": "\n".join(f"<style>\n{asset(name)}\n</style>" for name in STYLES),
            "DATA": data,
            "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
        }
        head, *rest = asset("page.html").split("{{")
        return head + "".join(parts[name] + text for name, _, text in (part.partition("}}") for part in rest))


def asset(name: str) -> str:
    """A file of the page."""
    return resources.files("openrlhf.launcher.report").joinpath("page", *name.split("/")).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def write_page(runs: Sequence[RunFiles], *, max_bytes: int) -> str:
    """The page of a run and of those that it is compared with.

    Where the tokens of all samples would make it larger than `max_bytes`, every step keeps those of its worst and best
    samples, in the end of none, and the page says so.
    """
    title = " and ".join(run.name for run in runs)
    room = max(0, max_bytes - len(Page(title=title).html())) / BASE64
    share = 1.0
    while True:
        blocks, fits = _blocks(runs, share=share, room=room)
        if fits >= 1 or share == 0:
            return Page(title=title, blocks=blocks).html()
        share *= min(0.8, fits)
        if share < SMALLEST_SHARE:
            share = 0.0


def _blocks(runs: Sequence[RunFiles], *, share: float, room: float) -> tuple[dict[str, bytes], float]:
    """The data of the page with the tokens of this share of every step's samples, and room over size, at most 1.

    Stops where there is no more room, and guesses the size from the steps that were packed.
    """
    blocks: dict[str, bytes] = {}
    overviews: list[dict[str, Any]] = []
    size, total = 0, sum(len(run.record.complete_steps()) for run in runs if run.record)
    for n, run in enumerate(runs):
        stats: dict[int, dict[str, Any]] = {}
        for step, groups, samples in recorded_steps(run):
            assert run.record is not None
            kept = interesting(samples, math.ceil(share * len(samples))) if share < 1 else None
            block = step_block(run.record, groups, samples, step=step, kept=kept)
            blocks[f"run-{n}-step-{step}"] = block
            stats[step] = step_stats(groups, samples)
            size += len(block)
            if size > room and share > 0:
                return blocks, room / size * len(blocks) / total
        overviews.append(overview(run, stats, share=share))
    first = pack({"runs": overviews})
    return {"overview": first} | blocks, min(1.0, room / (size + len(first)))


def recorded_steps(run: RunFiles) -> Iterator[tuple[int, Sequence[RecordedGroup], Sequence[RecordedSample]]]:
    """(step, groups without samples, samples) of every step whose samples are all there."""
    if run.record is None:
        return
    steps = run.record.steps()
    for step in run.record.complete_steps():
        yield step, steps[step].groups, run.record.samples(step)


def step_stats(groups: Sequence[RecordedGroup], samples: Sequence[RecordedSample]) -> dict[str, Any]:
    """What lists of all steps' episodes show, in the order of the block's samples."""
    others = [info for group in groups for info in group.others.values()]
    gaps = [np.abs(difference(sample)) for sample in samples]
    return {
        "reward": [number(s.reward) for s in samples] + [number(info.get("reward")) for info in others],
        "length": [len(s.tokens) for s in samples] + [int(info.get("total_length") or 0) for info in others],
        "gap": [number(float(np.nanmax(g))) if np.isfinite(g).any() else None for g in gaps] + [None] * len(others),
        "failed": [len(samples) + i for i, info in enumerate(others) if info.get("failed")],
    }


def overview(run: RunFiles, stats: Mapping[int, Mapping[str, Any]], *, share: float = 1.0) -> dict[str, Any]:
    """All of a run but its episodes, as JSON values."""
    return {
        "name": run.name,
        "folder": str(run.folder),
        "words": in_words(run.steps, run.evaluations, run.alarms),
        "steps": _table(run.steps),
        "evaluations": _table(run.evaluations),
        "alarms": list(run.alarms),
        "settings": [[s.name, s.value, s.default, s.help] for s in run.settings],
        "sources": run.sources,
        "episodes": {str(step): part for step, part in stats.items()},
        "share": number(share),
    }


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    names = sorted({name for row in rows for name in row.metrics})
    return {
        "step": [row.step for row in rows],
        "time": [round(row.time, 1) for row in rows],
        "metrics": {name: [number(row.metrics.get(name)) for row in rows] for name in names},
    }
