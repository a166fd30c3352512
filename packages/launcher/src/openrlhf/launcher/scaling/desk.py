"""Where a run that goes on takes orders about its engines: a folder of its own under `--ckpt.path`.

Only the run's user can read it, for it names the token of the run's Ray. An order is a file with a name of its own, the
answer another one; the run removes the folder at its end. Works wherever the folder is seen, also from another machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.learner.folders.files import replace_file

NAME = ".openrlhf-engines"
RUN, ORDER, ANSWER = "run.json", "order-", "answer-"
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""How far below the folder that is given a run is looked for."""
POLL = 0.5


@dataclass(frozen=True, kw_only=True)
class RunningRun:
    """What the run says of itself. ray: the address of its Ray; token: of that Ray, empty where the user started it.

    gpus: whether engines are on GPUs. width: devices, or cores, of one. engines: the names of those that are there.
    """

    pid: int
    host: str
    ray: str
    token: str = field(repr=False)
    gpus: bool
    width: int
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """Have `engines` of them from now on; or, with `on`, `more` than now, on the machine with that Ray resource."""

    engines: int = 0
    more: int = 0
    on: str = ""


class NotYetError(ValueError):
    """There is no room for what was asked, at this moment."""


class Desk:
    """The run's end."""

    def __init__(self, folder: str | Path, run: RunningRun) -> None:
        """Open; `folder` is held by this run (`hold_outputs`). Raises ValueError where another user made our place."""
        self.place = Path(folder) / NAME
        if self.place.is_symlink() or (self.place.exists() and self.place.stat().st_uid != os.getuid()):
            raise ValueError(f"{str(self.place)!r} belongs to another user: remove it, or give another --ckpt.path")
        shutil.rmtree(self.place, ignore_errors=True)  # of a run that was killed
        self.place.mkdir(mode=0o700, parents=True)
        self.tell(run)

    def tell(self, run: RunningRun) -> None:
        """What is true from now on."""
        replace_file(self.place / RUN, json.dumps(asdict(run)))

    def orders(self) -> Iterator[tuple[str, Order]]:
        """What was asked and has no answer yet, with its name; a file that is none is answered at once."""
        for path in sorted(self.place.glob(f"{ORDER}*.json")):
            name = path.stem.removeprefix(ORDER)
            try:
                order = Order(**json.loads(path.read_text()))
                if not isinstance(order.engines, int) or not isinstance(order.more, int):
                    raise TypeError(f"numbers of engines that are none: {order}")
            except (OSError, ValueError, TypeError) as error:
                self.answer(name, error=f"not an order: {error}")
                continue
            yield name, order

    def answer(self, name: str, **said: Any) -> None:
        """The order is done, or refused (`error`); it goes first, so that it is never done twice."""
        (self.place / f"{ORDER}{name}.json").unlink(missing_ok=True)
        replace_file(self.place / f"{ANSWER}{name}.json", json.dumps(said))

    def close(self) -> None:
        """The run is over: who waits for an answer sees that."""
        shutil.rmtree(self.place, ignore_errors=True)


def find_desk(run: str | Path) -> Path:
    """The desk of the run in this folder, or up to three levels below. Raises ValueError where none goes on."""
    places = (place.resolve() for depth in DEPTHS for place in Path(run).glob(f"{depth}{NAME}"))
    found = sorted({place for place in places if (place / RUN).is_file()})
    if not found:
        raise ValueError(f"no run goes on in {str(run)!r}: give the --ckpt.path of one that does, or a folder above it")
    if len(found) > 1:
        places = ", ".join(str(place.parent) for place in found)
        raise ValueError(f"several runs go on in {str(run)!r}: give the folder of one of them ({places})")
    if found[0].stat().st_uid != os.getuid():
        raise ValueError(f"the run in {str(found[0].parent)!r} is another user's")
    return found[0]


def read_run(place: Path) -> RunningRun:
    """What the run says of itself. Raises ValueError where it has ended."""
    try:
        said = json.loads((place / RUN).read_text())
        return RunningRun(**said | {"engines": tuple(said["engines"])})
    except FileNotFoundError:
        raise ValueError(f"the run in {str(place.parent)!r} has ended") from None


def ask(place: Path, order: Order, *, timeout: float, alive: Callable[[], object] = lambda: None) -> Mapping[str, Any]:
    """Give an order and wait for its answer. alive: called while it waits; what it raises ends the wait.

    Raises ValueError with the run's refusal (NotYetError: for want of room), or when it ends; TimeoutError after
    `timeout` seconds.
    """
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    read_run(place)
    replace_file(place / f"{ORDER}{name}.json", json.dumps(asdict(order)))
    answer, deadline = place / f"{ANSWER}{name}.json", time.monotonic() + timeout
    try:
        while not answer.is_file():
            alive()
            read_run(place)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run in {str(place.parent)!r} did not answer within {timeout:g} s")
            time.sleep(POLL)
    except BaseException:
        (place / f"{ORDER}{name}.json").unlink(missing_ok=True)
        raise
    said = json.loads(answer.read_text())
    answer.unlink(missing_ok=True)
    if said.get("error"):
        raise (NotYetError if said.get("later") else ValueError)(said["error"])
    return said
