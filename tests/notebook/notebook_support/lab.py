"""A real JupyterLab and a real browser on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

DEADLINE_SECONDS = 60.0
TOKEN = "secret"
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}
NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook"
KERNEL_IS_IDLE = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.connectionStatus === 'connected'
        && session.session.kernel.status === 'idle';
}"""


@contextmanager
def jupyter_lab(directory: Path, environment: dict[str, str]) -> Iterator[str]:
    """Serve a directory's notebooks; yields the server's address. The kernels end with it."""
    settings = directory / "settings"
    settings.mkdir()
    (settings / "overrides.json").write_text(json.dumps(SETTINGS))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": directory,
        "IdentityProvider.token": TOKEN,
        "LabApp.expose_app_in_browser": True,
        "LabApp.extension_manager": "readonly",
        "LabApp.news_url": None,
        "LabApp.app_settings_dir": settings,
        "LabApp.user_settings_dir": directory / "user-settings",
        "LabApp.workspaces_dir": directory / "workspaces",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=environment | {"JUPYTER_RUNTIME_DIR": str(directory / "runtime")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_serving(address, server, directory / "server.log")
            yield address
        finally:
            server.terminate()
            server.wait(DEADLINE_SECONDS)


def wait_until_serving(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers."""
    end = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/api", timeout=5):
                return
        except urllib.error.URLError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)


def write_notebook(path: Path, cells: list[str]) -> None:
    """Write a notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def notebook_page(address: str, name: str, chromium: str, directory: Path) -> Iterator[Page]:
    """Open a notebook in a browser, which keeps its files in `directory`, and wait until its kernel is idle."""
    own = {**os.environ, "XDG_RUNTIME_DIR": str(directory)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS, env=own)
        try:
            page = browser.new_page(viewport={"width": 1100, "height": 1000})
            page.set_default_timeout(DEADLINE_SECONDS * 1000)
            page.goto(f"{address}/lab/workspaces/test/tree/{name}?reset&token={TOKEN}")
            page.wait_for_selector("#jupyterlab-splash", state="detached")
            page.wait_for_selector(f"{NOTEBOOK} .jp-Cell")
            page.wait_for_function(KERNEL_IS_IDLE)
            yield page
        finally:
            browser.close()


def run_command(page: Page, command: str) -> None:
    """Start a command of JupyterLab without waiting for its end."""
    page.evaluate("(command) => { window.jupyterapp.commands.execute(command); }", command)


def wait_for_prompt(page: Page, cell: int) -> None:
    """Wait until a code cell, counted from 0, has been executed."""
    page.wait_for_function(
        "(cell) => /\\d/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[cell]?.textContent ?? '')",
        arg=cell,
    )


def output_of(page: Page, cell: int) -> str:
    """What a code cell, counted from 0, shows."""
    return page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(cell).locator(".jp-Cell-outputArea").inner_text()
