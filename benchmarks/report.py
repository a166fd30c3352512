"""What a report costs: seconds to write one of 200 steps of 64 samples, its size, and how soon a browser shows it.

The run is made up (turns, tools, images, branches, failures). The seconds to write are those of
`openrlhf-launch report` as a user starts it, Python's own start included; those to open are from the request until the
page says that it is ready, in the system's Chromium.

    .venv/bin/python benchmarks/report.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.browser import find_browser
from support.report_runs import PER_STEP, write_run

STEPS, ROUNDS = 200, 3
WRITE, OPEN, SIZE = 5.0, 2.0, 15.0
"""Aims: seconds, seconds, MiB."""


def seconds_to_write(run: Path) -> float:
    """Of the command line, from its start to its end."""
    program = Path(sys.executable).with_name("openrlhf-launch")
    began = time.perf_counter()
    subprocess.run([program, "report", run], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def openings(page_file: Path) -> list[float]:
    """Seconds until the page is ready, each time in a fresh context of one browser; [] where there is no browser."""
    program = find_browser()
    if program is None:
        return []
    found = []
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        for _ in range(ROUNDS):
            context = browser.new_context()
            page = context.new_page()
            began = time.perf_counter()
            page.goto(page_file.as_uri())
            page.locator("html[data-ready]").wait_for(state="attached")
            found.append(time.perf_counter() - began)
            context.close()
        browser.close()
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps=STEPS)
        writing = median(seconds_to_write(run) for _ in range(ROUNDS))
        page = run / "report.html"
        size, opening = page.stat().st_size / 2**20, openings(page)
    print(f"{STEPS} steps of {PER_STEP} samples: {size:.1f} MiB (aim: {SIZE:g})")
    print(f"written in {writing:.2f} s (median of {ROUNDS}; aim: {WRITE:g})")
    shown = f"{median(opening):.2f} s (median of {ROUNDS}; aim: {OPEN:g})" if opening else "not measured: no Chromium"
    print(f"open in {shown}")
    return 0 if size <= SIZE and writing <= WRITE and median(opening or [0.0]) <= OPEN else 1


if __name__ == "__main__":
    sys.exit(main())
