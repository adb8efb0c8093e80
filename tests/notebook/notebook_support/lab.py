"""A real JupyterLab or Notebook 7, and a real browser on it.

Cells are counted from 0, code cells alone. What waits gives up after `DEADLINE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import nbformat
from chromium import browser
from playwright.sync_api import Browser, Dialog, Locator, Page
from ports import reserved_port

DEADLINE_SECONDS = 60.0
TOKEN = "secret"
POLL_MS = 50
"""Milliseconds after which a page looks again for what it waits for; to look at each frame would cost
most."""
WIDE, NARROW = 1280, 800
"""Widths at which everything has to be readable."""
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True},
}
NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook"
CODE_CELL = f"{NOTEBOOK} .jp-CodeCell"
SESSION = "window.jupyterapp?.shell.currentWidget?.sessionContext"
KERNEL_IS_CONNECTED = f"""() => {{
    const session = {SESSION};
    return session?.isReady && session.session?.kernel?.connectionStatus === 'connected'
        && ['idle', 'busy'].includes(session.session.kernel.status);
}}"""
KERNEL_IS_IDLE = f"""() => {{
    const session = {SESSION};
    return session?.isReady && session.session?.kernel?.connectionStatus === 'connected'
        && session.session.kernel.status === 'idle';
}}"""


@contextmanager
def jupyter_lab(directory: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve a directory's notebooks in JupyterLab and in Notebook 7; yields the server's address. The kernels end with it.

    Pages of Notebook 7 are opened with `open_notebook(…, frontend="notebooks")`.
    """
    settings = directory / "settings"
    settings.mkdir(exist_ok=True)
    (settings / "overrides.json").write_text(json.dumps(SETTINGS))
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.root_dir": directory,
        "IdentityProvider.token": TOKEN,
        "LabApp.extension_manager": "readonly",
        "LabApp.news_url": None,
    }
    for app in ("LabApp", "JupyterNotebookApp"):
        options |= {
            f"{app}.expose_app_in_browser": True,
            f"{app}.app_settings_dir": settings,
            f"{app}.user_settings_dir": directory / "user-settings",
            f"{app}.workspaces_dir": directory / "workspaces",
        }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    # A server makes sure that a port is free, and listens a second later: without a port of its own, another one may
    # answer in its place, in which no notebook of these is found, and which ends the other one's kernels when asked.
    with reserved_port() as port, (directory / "server.log").open("wb") as log:
        options |= {"ServerApp.port": port, "ServerApp.port_retries": 0}
        server = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            # Its own files are none that an engine leaves behind.
            env=environment | {"JUPYTER_RUNTIME_DIR": str(directory / "runtime")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield wait_until_serving(server, directory / "server.log", f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            try:
                server.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                raise


def wait_until_serving(server: subprocess.Popen[bytes], log: Path, address: str) -> str:
    """Return the server's address when it answers there."""
    end = time.monotonic() + DEADLINE_SECONDS
    while True:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api", timeout=5):
            return address
        time.sleep(0.1)


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def notebook_page(
    address: str,
    name: str,
    directory: Path,
    *,
    width: int = 1100,
    height: int = 1000,
    frontend: str = "lab",
) -> Iterator[Page]:
    """Open a notebook in a browser, which keeps its files in `directory`, and wait until its kernel is idle.

    `frontend` is "lab" or "notebooks". Questions that the browser itself asks are answered with yes.
    """
    with browser(directory) as started:
        yield open_notebook(started, address, name, width=width, height=height, frontend=frontend)


def open_notebook(
    browser: Browser, address: str, name: str, *, width: int = WIDE, height: int = 1000, frontend: str = "lab"
) -> Page:
    """A new page with a notebook, as `notebook_page` opens it; to be closed by who asks for it.

    It has a workspace of its own: when it is loaded again, nothing is in it that another page has opened.
    """
    path = (
        f"lab/workspaces/{secrets.token_hex(4)}/tree/{quote(name)}?reset&"
        if frontend == "lab"
        else f"notebooks/{quote(name)}?"
    )
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(DEADLINE_SECONDS * 1000)
    page.on("dialog", _accept)
    page.goto(f"{address}/{path}token={TOKEN}")
    wait_for_notebook(page)
    wait_until_idle(page)
    return page


def _accept(dialog: Dialog) -> None:
    dialog.accept()


# Waiting.


def wait_for_notebook(page: Page) -> None:
    """Wait until the notebook is drawn and its kernel connected, idle or not."""
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    page.wait_for_selector(f"{NOTEBOOK} .jp-Cell")
    page.wait_for_function(KERNEL_IS_CONNECTED, polling=POLL_MS)


def wait_until_idle(page: Page) -> None:
    """Wait until the kernel has nothing to do."""
    page.wait_for_function(KERNEL_IS_IDLE, polling=POLL_MS)


def wait_for_prompt(page: Page, cell: int) -> None:
    """Wait until a code cell has been executed."""
    page.wait_for_function(
        "(cell) => /\\d/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[cell]?.textContent ?? '')",
        arg=cell,
        polling=POLL_MS,
    )


def wait_for_text(page: Page, text: str, cell: int | None = None) -> None:
    """Wait until a code cell's output, or the page if None, shows a text."""
    area = page.locator("body") if cell is None else _output_area(page, cell)
    area.filter(has_text=re.compile(re.escape(text))).first.wait_for()


# Doing what a person does.


def run_command(page: Page, command: str) -> None:
    """Start a command of JupyterLab without waiting for its end."""
    page.evaluate("(command) => { window.jupyterapp.commands.execute(command); }", command)


def run_cell(page: Page, cell: int) -> None:
    """Start a code cell without waiting for its end; the notebook has no cells of other kinds."""
    # In one turn: the end of a click into another cell makes that one active, and may come at any time.
    page.evaluate(
        """(cell) => {
            window.jupyterapp.shell.currentWidget.content.activeCellIndex = cell;
            window.jupyterapp.commands.execute('notebook:run-cell');
        }""",
        cell,
    )


def save(page: Page) -> None:
    """Save the notebook as it is now, and wait until that is done."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


def reload(page: Page) -> None:
    """Load the page again, as it was saved; the kernel goes on with what it does."""
    page.reload()
    wait_for_notebook(page)


def restart_kernel(page: Page) -> None:
    """Restart the kernel by the menu, with its question answered, and wait until the new one is idle."""
    kernel = f"{SESSION}.session.kernel"
    page.evaluate(
        f"""() => {{
            window.restarts = 0;
            {kernel}.statusChanged.connect((_, status) => {{
                window.restarts += ['restarting', 'autorestarting'].includes(status);
            }});
        }}"""
    )
    run_command(page, "kernelmenu:restart")
    page.click(".jp-Dialog .jp-mod-accept")
    page.wait_for_function("() => window.restarts > 0", polling=POLL_MS)
    wait_until_idle(page)


def set_theme(page: Page, *, dark: bool) -> None:
    """Change between the light and the dark theme, and wait until it is in force."""
    page.evaluate(
        "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
        "JupyterLab Dark" if dark else "JupyterLab Light",
    )
    page.wait_for_function(
        "(light) => document.body.dataset.jpThemeLight === light", arg="false" if dark else "true"
    )
    # The curtain that hides the change.
    page.wait_for_selector("#jupyterlab-splash", state="detached")


def is_dark(page: Page) -> bool:
    """Tell whether the dark theme is in force."""
    dark: bool = page.evaluate("() => document.body.dataset.jpThemeLight === 'false'")
    return dark


def set_width(page: Page, width: int, height: int = 1000) -> None:
    """Give the window another size."""
    page.set_viewport_size({"width": width, "height": height})


# Looking.


def output_of(page: Page, cell: int) -> str:
    """Read the text of a code cell's output."""
    return _output_area(page, cell).inner_text()


def screenshot(page: Page | Locator, name: str) -> None:
    """Bring an element into sight, and if $NBENGINE_ARTEFACTS is set keep a picture of it, or of the page, as `name`.png there."""
    if isinstance(page, Locator):
        page.scroll_into_view_if_needed()
    if directory := os.environ.get("NBENGINE_ARTEFACTS"):
        page.screenshot(path=Path(directory) / f"{name}.png")


def _output_area(page: Page, cell: int):
    return page.locator(CODE_CELL).nth(cell).locator(".jp-Cell-outputArea")
