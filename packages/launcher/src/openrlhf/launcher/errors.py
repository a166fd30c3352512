"""What a failed run prints: one message for a mistake of the user, the whole traceback for anything else."""

from __future__ import annotations

import os
import sys
import traceback

USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)
FAILED = 1


def report_error(error: Exception) -> int:
    """Print the error to stderr and return the exit code. OPENRLHF_TRACEBACK=1 shows every traceback."""
    plain = isinstance(error, USER_ERRORS) or getattr(error, "user_message", False)
    if not plain or os.environ.get("OPENRLHF_TRACEBACK"):
        traceback.print_exception(error)
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    return FAILED
