"""mypy in several processes: `python -m tests.tools.type_check WORKERS …`.

They have three seconds to come up, which a busy machine does not leave them; mypy then ends with an internal error.
Types are checked in one process then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

NOT_STARTED = "Failed to establish connection with worker"
"""mypy's words, of its version in constraints.txt."""


def check(workers: int, others: Sequence[str] = ()) -> int:
    """Check types, and return mypy's exit status."""
    command = [sys.executable, "-m", "mypy", *others]
    if workers > 1:
        done = subprocess.run(
            [*command, "--num-workers", str(workers)], capture_output=True, text=True, check=False
        )
        if not (done.returncode and NOT_STARTED in done.stdout + done.stderr):
            print(done.stdout, end="", flush=True)
            print(done.stderr, end="", file=sys.stderr, flush=True)
            return done.returncode
        print("mypy's processes did not come up within its three seconds: one checks all", flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(check(int(sys.argv[1]), sys.argv[2:]))
