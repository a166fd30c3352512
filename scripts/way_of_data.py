"""Which of our files a prompt's data passes on its way to the loss: run a training command and count them.

python scripts/way_of_data.py -- python examples/quickstart/run.py --steps 3 --output out/way

Every Python process of the command notes which of our functions start. Counted is the second step, from the first
prompt that is drawn to the last policy loss that is computed: start-up, weight push and logging lie outside, as does
what reads a prompt from its file. What merely runs at the same time, by the clock, is counted too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

FIRST = "openrlhf/launcher/data/sampler.py:PromptSampler.next"
"""A prompt is drawn."""
LAST = "openrlhf/learner/objective.py:PolicyObjective.__call__"
"""The loss of a micro-batch is computed."""

RECORDER = """
import os, sys, threading, time

SEEN = {}
OUT = os.open(os.path.join(os.environ["WAY_OF_DATA"], str(os.getpid())), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
EVERY = 2_000_000  # nanoseconds between two notes of one function
GENERATORS = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators


def read(frame):
    while frame is not None and frame.f_code.co_qualname != "PromptSampler.next":
        frame = frame.f_back
    return frame is not None


def note(frame, event, arg):
    code = frame.f_code
    if event != "call" or (code.co_flags & GENERATORS and code.co_code[frame.f_lasti + 1]):
        return  # the argument of RESUME is 0 at the start; a coroutine that goes on is no call
    known = SEEN.get(code)
    if known is None:
        file = code.co_filename
        place = file.rpartition("/src/")[2] if "/src/openrlhf/" in file else ""
        known = SEEN[code] = [f"{place}:{code.co_qualname}" if place else "", 0]
    if known[0]:
        now = time.time_ns()
        if now - known[1] > EVERY and not read(frame.f_back):
            known[1] = now
            os.write(OUT, f"{now} {known[0]}\\n".encode())


os.register_at_fork(after_in_child=lambda: globals().update(
    OUT=os.open(os.path.join(os.environ["WAY_OF_DATA"], str(os.getpid())), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
))
threading.setprofile(note)
sys.setprofile(note)
"""


@dataclass(frozen=True, order=True)
class Call:
    """A call of one of our functions. place: file and name; moment: nanoseconds."""

    moment: int
    place: str
    process: str


def record(command: list[str]) -> list[Call]:
    """Run the command; all calls of ours in all its processes, in time order. Exits with the command's own status."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(RECORDER)
        notes = Path(folder) / "notes"
        notes.mkdir()
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "WAY_OF_DATA": str(notes)}, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        return sorted(
            Call(int(moment), place, file.name)
            for file in notes.iterdir()
            for moment, _, place in (line.partition(" ") for line in file.read_text().splitlines())
        )


def second_step(calls: list[Call]) -> list[Call]:
    """From the first prompt after the first step's losses to the last loss before the third step's prompts."""
    losses = [i for i, call in enumerate(calls) if call.place == LAST]
    draws = [i for i, call in enumerate(calls) if call.place == FIRST]
    start = next((i for i in draws if losses and i > losses[0]), None)
    if start is None:
        raise SystemExit("the command did not take two steps in which a prompt led to a policy loss")
    later = next((i for i in losses if i > start), None)
    if later is None:
        raise SystemExit("the second step has no policy loss")
    end = next((i for i in draws if i > later), len(calls))
    return calls[start : max(i for i in losses if i < end) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+", help="a training command, after --; Python 3.11 or later")
    way = second_step(record(parser.parse_args().command))
    functions: dict[str, dict[str, int]] = defaultdict(dict)
    for call in way:
        file, _, name = call.place.partition(":")
        functions[file].setdefault(name, call.moment)
    for file, names in sorted(functions.items(), key=lambda item: min(item[1].values())):
        print(f"{file}: {', '.join(sorted(names, key=names.__getitem__))}")
    print(f"{len(functions)} files, {sum(map(len, functions.values()))} functions")


if __name__ == "__main__":
    main()
