"""The engines that can be measured, and their processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.protocol import Answer, Job

BENCHMARKS = Path(__file__).parents[1]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
OURS = "nbengine"
UNWANTED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "PYTHONDONTWRITEBYTECODE")
"""Settings of this process that the engines' processes do not get: each chooses for itself."""
TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine of which the environment may or may not have the package."""

    name: str
    package: str
    """The distribution that has to be installed, as `requirements.txt` names it."""
    tries_threads: bool = False
    """It is measured with several numbers of threads, of which the best counts."""
    most_streams: int | None = None
    """The most requests that its interface takes at once; None: any number."""

    def takes(self, streams: int) -> bool:
        """Tell whether it can be measured with that number of streams."""
        return self.most_streams is None or streams <= self.most_streams


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama_cpp", "llama-cpp-python[server]", tries_threads=True),
        Peer("openvino", "openvino-genai"),
        # Its Python package refuses a request while it has one.
        Peer("mistralrs", "mistralrs", most_streams=1),
        Peer("transformers", "accelerate"),
    )
}


class MissingPeerError(Exception):
    """An engine is not installed; the message has the reason."""


class FailedRunError(Exception):
    """An engine's process failed; the message has its last lines."""


def install_command(peer: Peer, python: str) -> str:
    """Return the command that installs the pinned version."""
    lines = REQUIREMENTS.read_text().splitlines()
    (pinned,) = (line for line in lines if line.partition("==")[0] == peer.package)
    return f"{python} -m pip install {shlex.quote(pinned)}"


def thread_choices(threads: int) -> list[int]:
    """List the numbers of threads that an engine is tried with: all, half and a quarter of them."""
    return sorted({max(1, threads // part) for part in (1, 2, 4)}, reverse=True)


class Processes:
    """Starts a fresh process for every measurement, in the environment of its engine."""

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self._pythons = pythons

    def python(self, engine: str) -> str:
        """Return the interpreter of an engine."""
        return self._pythons.get(engine, sys.executable)

    def version(self, engine: str) -> str:
        """Return an engine's version.

        Raises:
            MissingPeerError: its package cannot be imported.
        """
        done = self._run(engine, ["peers.worker", engine, "--version"], "", 1)
        if done.returncode:
            raise MissingPeerError(_last_line(done.stderr))
        return done.stdout.split()[-1]

    def answer(self, engine: str, job: Job) -> tuple[Answer, float]:
        """Have a job done; return its answer and the time at which the process was started.

        Raises:
            FailedRunError: the process failed.
        """
        spawned_at = time.monotonic()
        done = self._run(engine, ["peers.worker", engine], job.encode(), job.threads)
        if done.returncode:
            raise FailedRunError(f"{engine} failed:\n{done.stderr[-3000:]}")
        return Answer.decode(done.stdout.splitlines()[-1]), spawned_at

    def output(self, module: str, *arguments: str, threads: int) -> str:
        """Return what a module prints, run in nbengine's environment."""
        done = self._run(OURS, [module, *arguments], "", threads)
        if done.returncode:
            raise FailedRunError(f"{module} failed:\n{done.stderr[-3000:]}")
        return done.stdout

    def _run(
        self, engine: str, module: list[str], given: str, threads: int
    ) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key not in UNWANTED}
        environment["OMP_NUM_THREADS"] = str(threads)
        environment["HF_HUB_OFFLINE"] = environment["TRANSFORMERS_OFFLINE"] = "1"
        # The recorder of logits is a module of ours that the engine's own process imports.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(BENCHMARKS), environment.get("PYTHONPATH")))
        )
        try:
            return subprocess.run(
                [self.python(engine), "-m", *module],
                cwd=BENCHMARKS,
                input=given,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise FailedRunError(f"{engine} had not ended after {TIMEOUT} s") from error


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
