"""Measure what importing nbengine and loading its extension cost.

python benchmarks/bench_import.py [--json PATH]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from common import parser, report

IMPORT = "import nbengine"
SHELL = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
if {load}:
    shell.run_line_magic("load_ext", "nbengine")
print(time.perf_counter() - start)
"""
TIMED = """
import time
start = time.perf_counter()
{code}
print(time.perf_counter() - start)
import sys
assert "torch" not in sys.modules
"""


def seconds(code: str) -> float:
    """Return the seconds that a fresh interpreter says `code` took."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(result.stdout.split()[0])


def main() -> None:
    """Measure in fresh interpreters, median of the rounds."""
    arguments = parser(__doc__).parse_args()
    rows = []
    for name, code, limit in (
        ("import nbengine", TIMED.format(code=IMPORT), 0.15),
        ("%load_ext nbengine", SHELL.format(load=True), 0.5),
    ):
        seconds(code)
        figures = [seconds(code) for _ in range(arguments.rounds)]
        rows.append(
            {"what": name, "median s": statistics.median(figures), "max s": max(figures), "limit s": limit}
        )
    report("import and extension", rows, arguments.json)


if __name__ == "__main__":
    main()
