"""Chromium without a window, for the tests, benchmarks and pictures that need a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    # What draws without a GPU needs no process of its own, and costs a tenth less without one.
    "--in-process-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# A machine that does other things must not fail a test.
expect.set_options(timeout=60_000)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian's package chromium)"
)


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser that keeps its files in `directory`, its reports of crashes, too."""
    with sync_playwright() as playwright:
        own = os.environ | dict.fromkeys(
            ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(directory)
        )
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=own)
        try:
            yield started
        finally:
            started.close()
