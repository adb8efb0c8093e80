"""Run pytest and end at once: `python -m tests.tools.one_part ARGUMENT …`.

An interpreter's end looks for garbage among the million objects of eleven thousand tests, again and again, for seconds.
"""

from __future__ import annotations

import atexit
import os
import sys

import pytest


def main(arguments: list[str]) -> None:
    """Run pytest with the arguments, then what is registered for the interpreter's end, and end with pytest's status."""
    status = int(pytest.main(arguments))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
