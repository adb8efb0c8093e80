"""The process of one measurement of one engine: `python -m peers.worker ENGINE`, in `benchmarks/`.

It reads a `Job` as JSON from its standard input and prints an `Answer` in the last line of its output.
`python -m peers.worker ENGINE --version` only prints the version of what is installed.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from importlib import import_module

from peers.memory import Watch
from peers.protocol import Answer, Engine, Job


def answer(engine: Engine, job: Job, version: str) -> Answer:
    """Run the job's batch as often as it says."""
    first_token_at, timings = 0.0, []
    watch = Watch(engine.pids(), job.model) if job.wants_memory else None
    with watch or nullcontext():
        for number in range(job.warmups + job.repeats):
            start = time.monotonic()
            timing = engine.generate(job.prompts, job.new_tokens)
            first_token_at = first_token_at or start + timing.first
            if number >= job.warmups:
                timings.append(timing)
    return Answer(version, timings, first_token_at, watch.last if watch is not None else {})


def write_logits(engine: Engine, job: Job, first: int) -> None:
    """Write the logits as a .npy file."""
    import numpy as np

    np.save(job.logits_path, engine.logits(job.prompts, first))


def main() -> None:
    """Answer one job."""
    module = import_module(f"peers.{sys.argv[1]}")
    version: str = module.version()
    if "--version" in sys.argv:
        print(version)
        return
    job = Job.decode(sys.stdin.read())
    engine: Engine = module.load(job)
    try:
        if job.logits_from is None:
            found = answer(engine, job, version)
        else:
            write_logits(engine, job, job.logits_from)
            found = Answer(version)
    finally:
        engine.close()
    # A library may have left half a line behind.
    print(f"\n{found.encode()}", flush=True)


if __name__ == "__main__":
    main()
