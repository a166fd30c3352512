"""What a failed run prints: one message for a mistake of the user, the whole traceback for anything else."""

from __future__ import annotations

import os
import sys

from openrlhf.launcher.redaction import redact, traceback_text
from openrlhf.launcher.terms import with_flags

USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)
FAILED = 1


def report_error(error: Exception) -> int:
    """Print the error, without secrets, to stderr and return the exit code.

    OPENRLHF_TRACEBACK=1 shows every traceback.
    """
    plain = isinstance(error, USER_ERRORS) or getattr(error, "user_message", False)
    if not plain or os.environ.get("OPENRLHF_TRACEBACK"):
        sys.stderr.write(traceback_text(error))
    sys.stderr.write(redact(with_flags(f"error: {error}\n")))
    sys.stderr.flush()
    return FAILED
