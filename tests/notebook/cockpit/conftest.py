"""A JupyterLab, a browser and an engine for the cockpit's notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import browser
from notebook_support.cockpit import ENGINE, WHOLE, Cockpit, OpenCockpit
from notebook_support.kernel import Kernel
from notebook_support.lab import jupyter_lab, open_notebook, write_notebook
from notebook_support.leaks import end_engines
from notebook_support.paced import start_line
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebooks are."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(notebook_environment: dict[str, str], kernel: Kernel, directory: Path) -> Iterator[str]:
    """One JupyterLab, and an engine that all notebooks may attach to, which writes the alphabet."""
    kernel.run(start_line(name=ENGINE, tokens_per_second=150))
    with jupyter_lab(directory, notebook_environment) as address:
        yield address
    kernel.run(f"%engine stop {ENGINE}")
    # Those of notebooks whose test has failed.
    end_engines()


@pytest.fixture(scope="module")
def chromium(lab: str, directory: Path) -> Iterator[Browser]:
    """One browser."""
    with browser(directory) as started:
        yield started


@pytest.fixture
def open_cockpit(chromium: Browser, lab: str, directory: Path) -> Iterator[OpenCockpit]:
    """Open notebooks with the extension, attached to the engine."""
    opened: list[Cockpit] = []

    def open_one(name: str = "cockpit.ipynb", *, height: int = WHOLE) -> Cockpit:
        write_notebook(directory / name, ["'the first cell'"])
        opened.append(Cockpit(open_notebook(chromium, lab, name, height=height)))
        assert "attached to engine" in opened[-1].run(f"%engine attach {ENGINE}")
        return opened[-1]

    yield open_one
    for cockpit in opened:
        cockpit.close()
