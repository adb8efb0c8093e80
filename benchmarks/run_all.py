"""Run every benchmark, one after another, with its JSON in docs/benchmarks; run nothing else meanwhile.

Those that need other engines run only if they are named; `make bench-peers` installs the engines first.

python benchmarks/run_all.py [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BESIDE_PEERS = {"peers", "quality", "server"}
RESULTS = HERE.parent / "docs" / "benchmarks"


def names() -> list[str]:
    """List the names of the benchmarks: `bench_NAME.py`."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def main() -> int:
    """Run the benchmarks; return 1 if one failed, which does not keep the others from running."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"the benchmarks to run: {', '.join(names())} (default: all that need no other engine)",
    )
    chosen = parser.parse_args().names or [name for name in names() if name not in BESIDE_PEERS]
    if unknown := set(chosen) - set(names()):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    RESULTS.mkdir(exist_ok=True)
    # The engine sets this for its own processes; the peers in a benchmark's process get the same.
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
    failed = []
    for name in chosen:
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", str(RESULTS / f"{name}.json")]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
