"""INT and TERM end a run in order: the first one unwinds the program (130 / 143), further ones wait for that.

USR1 is a job scheduler's warning: the run saves after the step under way and exits with SAVED_EXIT.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)
SAVED_EXIT = 85
"""Exit code of a run that was warned, has written a checkpoint and wants to be started again with it."""


class Interrupted(SystemExit):
    """A signal asked the run to end; `code` is 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


_received: signal.Signals | None = None


def received() -> signal.Signals | None:
    """The signal that asked this process to end, if one did.

    Ray turns an exit that is raised while it waits into one with code 1, and actors killed by the same signal into
    errors: the way out of a run asks here for the reason.
    """
    return _received


def install() -> None:
    """Handle INT and TERM in this process. Call again after anything that replaces the handlers, as ray.init does."""
    for signum in HANDLED:
        signal.signal(signum, _interrupt)


def ignore() -> None:
    """From here on nothing interrupts the clean-up."""
    for signum in HANDLED:
        signal.signal(signum, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _received
    del frame
    ignore()
    _received = signal.Signals(signum)
    sys.stderr.write(f"\n{signal.Signals(signum).name} received: ending the run\n")
    raise Interrupted(signum)


def on_warning(stop: Callable[[], None]) -> None:
    """Call `stop` on USR1. Must run on the event loop's thread, in a running loop."""

    def warned() -> None:
        sys.stderr.write("\nSIGUSR1 received: saving after this step, then ending the run\n")
        stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, warned)
