"""The browser that tests of pages drive."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """The system's Chromium or Chrome; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing_for_browser() -> str | None:
    """Why tests of pages cannot run here; None where they can."""
    return None if find_browser() else "no Chromium on this machine (Debian: apt-get install chromium)"
