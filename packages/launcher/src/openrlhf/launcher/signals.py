"""INT and TERM end a run in order: the first one unwinds the program (130 / 143), further ones wait for that."""

from __future__ import annotations

import signal
import sys
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal asked the run to end; `code` is 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def install() -> None:
    """Handle INT and TERM in this process. Call again after anything that replaces the handlers, as ray.init does."""
    for signum in HANDLED:
        signal.signal(signum, _interrupt)


def ignore() -> None:
    """From here on nothing interrupts the clean-up."""
    for signum in HANDLED:
        signal.signal(signum, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del frame
    ignore()
    sys.stderr.write(f"\n{signal.Signals(signum).name} received: ending the run\n")
    raise Interrupted(signum)
