"""Run the tests of folders in several pytests beside each other: `python -m tests.tools.side_by_side 2 [OPTION …] FOLDER …`.

Each pytest imports and collects its own files alone, and keeps its reports to itself. Those of pytest-xdist import all
files each, and send reports of each test: 3,000 empty ones took 12.6 processor seconds in two of them, and 4.2 in one pytest.
Which pytest has a file is decided before, by the seconds that are on record for it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.tools import scratch
from tests.tools.durations import UNKNOWN_SECONDS, seconds_of

ROOT = Path(__file__).parents[2]
_IMPORTS = re.compile(r"transformers|oracle|save_random|random_models|(family|gguf|recurrent)_cases")
"""A file that names one of these imports transformers, which takes ten seconds: as few pytests as can be do."""


def imports_transformers(file: str) -> bool:
    """Return whether a file of tests, given relative to the root, imports transformers."""
    return _IMPORTS.search((ROOT / file).read_text()) is not None


def parts_of(
    seconds: Mapping[str, float], number: int, is_together: Callable[[str], bool]
) -> list[list[str]]:
    """Divide files with their seconds among `number` processes, so that the last one ends early; those that are together
    fill as few as can be."""
    parts: list[list[str]] = [[] for _ in range(number)]
    sums = [0.0] * number
    share = sum(seconds.values()) / number
    for together in (True, False):
        own = [file for file in seconds if is_together(file) == together]
        for file in sorted(own, key=lambda file: (-seconds[file], file)):
            filled = [each for each in range(number) if parts[each] and sums[each] + seconds[file] <= share]
            least = min(range(number), key=sums.__getitem__)
            chosen = filled[0] if together and filled else least
            parts[chosen].append(file)
            sums[chosen] += seconds[file]
    return [sorted(part) for part in parts if part]


def run(commands: Sequence[Sequence[str]]) -> int:
    """Run commands at once; the first one's output is seen as it comes, that of each other one when it has ended.

    The result is the first exit status that is not 0.
    """
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands[1:]]
        processes = [
            subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT)
            for command, output in zip(commands, (None, *outputs), strict=True)
        ]
        # An interrupt from the keyboard reaches the pytests, too, and each of them sums up then.
        with contextlib.suppress(KeyboardInterrupt):
            for process in processes:
                process.wait()
        statuses = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    return next((status for status in statuses if status), 0)


def main(number: str, *arguments: str) -> int:
    """Run what is in the folders, given relative to the root; each pytest gets the options, which begin with `-`, with its
    number in place of `{}`."""
    options = [argument for argument in arguments if argument.startswith("-")]
    folders = [argument for argument in arguments if argument not in options]
    files = sorted(
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("test_*.py")
    )
    seconds = {file: seconds_of(file, otherwise=UNKNOWN_SECONDS) for file in files}
    pytest = [sys.executable, "-m", "tests.tools.one_part", "-p", "tests.tools.cpu_seconds"]
    # The pytests share the cache of this scratch folder.
    with scratch.entered():
        return run(
            [
                [*pytest, *(option.replace("{}", str(each)) for option in options), *part]
                for each, part in enumerate(parts_of(seconds, int(number), imports_transformers))
            ]
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
