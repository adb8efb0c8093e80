"""One JupyterLab for the tests of a pytest process: its page stays open while notebooks come and go in it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notebook_support.lab import (
    DEADLINE_SECONDS,
    TOKEN,
    WIDE,
    is_dark,
    open_notebook,
    set_theme,
    set_width,
    wait_for_notebook,
    wait_until_idle,
    write_notebook,
)
from playwright.sync_api import Browser, Page
from playwright.sync_api import Error as PlaywrightError

OpenLab = Callable[..., Page]

_OPEN = """async (path) => { await window.jupyterapp.commands.execute('docmanager:open', { path }); }"""
# A page that was loaded again opens what its address names some time after it has shown what was open.
_CLOSE_OTHERS = """(path) => {
    const { shell } = window.jupyterapp;
    for (const widget of [...shell.widgets('main')]) if (widget.context?.path !== path) widget.dispose();
    shell.activateById([...shell.widgets('main')][0].id);
}"""
# Nobody is asked whether something is to be saved: what a test wants saved, it has saved.
_CLEAR = """async () => {
    const { shell, restored } = window.jupyterapp;
    await restored;
    for (const widget of [...shell.widgets('main')]) widget.dispose();
    if (shell.leftCollapsed) shell.expandLeft();
}"""
_IS_CLEAR = "() => !document.querySelector('.jp-NotebookPanel, .jp-Dialog')"


class Desk:
    """A browser's page with JupyterLab, in which a test opens its notebooks, and the server behind it."""

    def __init__(self, browser: Browser, address: str, directory: Path) -> None:
        self.browser = browser
        self.address = address
        self.directory = directory
        self._page: Page | None = None

    def open(self, name: str, cells: list[str], *, width: int = WIDE, height: int = 1000) -> Page:
        """Write a notebook of code cells and open it as the only one; its kernel is idle."""
        write_notebook(self.directory / name, cells)
        return self.open_file(name, width=width, height=height)

    def open_file(self, name: str, *, width: int = WIDE, height: int = 1000) -> Page:
        """Open a notebook that is in the directory as the only one; its kernel is idle."""
        if self._page is None or self._page.is_closed():
            self._page = open_notebook(self.browser, self.address, name, width=width, height=height)
            return self._page
        set_width(self._page, width, height)
        self._page.evaluate(_OPEN, name)
        wait_for_notebook(self._page)
        wait_until_idle(self._page)
        self._page.evaluate(_CLOSE_OTHERS, name)
        wait_until_idle(self._page)
        return self._page

    def clear(self) -> None:
        """Close what is open and end every kernel of the server."""
        page, self._page = self._page, None
        try:
            if page is not None and not page.is_closed():
                _clear(page)
                self._page = page
        finally:
            self.end_kernels()

    def close(self) -> None:
        """Close the page."""
        if self._page is not None:
            self._page.close()

    def end_kernels(self) -> None:
        """End every kernel of the server, those of pages that tests opened themselves, too."""
        for session in self._ask("sessions"):
            self._ask(f"sessions/{session['id']}", method="DELETE")
        end = time.monotonic() + DEADLINE_SECONDS
        while kernels := self._ask("kernels"):
            assert time.monotonic() < end, kernels
            time.sleep(0.05)

    def _ask(self, what: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {TOKEN}"}
        request = urllib.request.Request(f"{self.address}/api/{what}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return json.loads(answer.read() or "null")


def _clear(page: Page) -> None:
    """Make a page what it was before the first notebook, or close it, so that the next test begins with a new one."""
    try:
        page.mouse.move(1, 1)
        page.evaluate(_CLEAR)
        page.wait_for_function(_IS_CLEAR)
        if is_dark(page):
            set_theme(page, dark=False)
    except PlaywrightError:
        page.close()
        raise
