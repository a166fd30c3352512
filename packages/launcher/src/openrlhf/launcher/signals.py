"""INT and TERM end a run in order: the first one unwinds the program (130 / 143), further ones wait for that.

USR1 is a job scheduler's warning: the run saves after the step under way and exits with SAVED_EXIT.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

log = logging.getLogger(__name__)

HANDLED = (signal.SIGINT, signal.SIGTERM)
SAVED_EXIT = 85
"""Exit code of a run that was warned, has written a checkpoint and wants to be started again with it."""
ALARM_EXIT = 87
"""Exit code of a run that --logger.health stop has ended, with a checkpoint."""


class Interrupted(SystemExit):
    """A signal asked the run to end; `code` is 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class StoppedAfterSave(Exception):  # noqa: N818  not an error: the run goes on elsewhere
    """The run was warned and has saved what --ckpt.* asks for. resumable: without --ckpt.disable_ds."""

    status = SAVED_EXIT
    why = ""

    def __init__(self, step: int, *, resumable: bool) -> None:
        then = "a checkpoint was written; resume with --ckpt.load_enable"
        otherwise = "--ckpt.disable_ds left the checkpoint out, a restart begins anew"
        super().__init__(f"stopped after step {step}{self.why}; {then if resumable else otherwise}")


class StoppedByAlarm(StoppedAfterSave):
    """--logger.health stop has ended the run. names: of the alarms."""

    status = ALARM_EXIT

    def __init__(self, step: int, names: Sequence[str], *, resumable: bool) -> None:
        self.why = f" by --logger.health stop ({', '.join(names)})"
        super().__init__(step, resumable=resumable)


_received: signal.Signals | None = None


def received() -> signal.Signals | None:
    """The signal that asked this process to end, if one did.

    Ray turns an exit that is raised while it waits into one with code 1, and actors killed by the same signal into
    errors: the way out of a run asks here for the reason.
    """
    return _received


def saved(stop: StoppedAfterSave) -> int:
    """Say that a warned run has ended, and what was saved; returns its exit code."""
    log.warning("%s", stop)
    return stop.status


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
        _say_warned()
        stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, warned)


class Warned:
    """Whether USR1 came since this was made: for programs without an event loop."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.came = True
        _say_warned()


def _say_warned() -> None:
    sys.stderr.write("\nSIGUSR1 received: saving after this step, then ending the run\n")
