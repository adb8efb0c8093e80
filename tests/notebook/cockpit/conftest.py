"""An engine for the cockpit's notebooks, and notebooks on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_support.cockpit import ENGINE, WHOLE, Cockpit, OpenCockpit
from notebook_support.desk import Desk
from notebook_support.kernel import Kernel
from notebook_support.leaks import end_engines
from notebook_support.paced import start_line


@pytest.fixture(scope="module")
def engine(kernel: Kernel) -> Iterator[str]:
    """An engine that all notebooks may attach to, which writes the alphabet; yields its name."""
    kernel.run(start_line(name=ENGINE, tokens_per_second=150))
    yield ENGINE
    kernel.run(f"%engine stop {ENGINE}")
    # Those of notebooks whose test has failed.
    end_engines()


@pytest.fixture
def open_cockpit(desk: Desk, engine: str) -> Iterator[OpenCockpit]:
    """Open a notebook with the extension, attached to the engine."""
    opened: list[Cockpit] = []

    def open_one(name: str = "cockpit.ipynb", *, height: int = WHOLE) -> Cockpit:
        opened.append(Cockpit(desk.open(name, ["'the first cell'"], height=height)))
        assert "attached to engine" in opened[-1].run(f"%engine attach {engine}")
        return opened[-1]

    yield open_one
    for cockpit in opened:
        cockpit.close()
    desk.clear()
