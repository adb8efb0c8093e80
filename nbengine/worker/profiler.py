"""torch's profiler around the steps of one worker."""

from __future__ import annotations

import gzip
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from torch.autograd.profiler import profile as profile_of_cpu
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from nbengine.errors import UtilityError
from nbengine.ipc.utilities import ProfileReport

TOP_OPERATIONS = 12
_COMPRESSION = 3
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class _Event(msgspec.Struct):
    """The fields that are used of an event of a Chrome trace; times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]


class _CpuProfile:
    """The part of `torch.profiler.profile` that is needed here, for a worker without a GPU.

    That one imports torch's compiler, to learn whether it uses CUDA graphs: some seconds in which nobody gets a token.
    """

    def __init__(self) -> None:
        self._recording = profile_of_cpu(use_kineto=True)
        self._step: record_function | None = None
        self._num_steps = 0

    def start(self) -> None:
        self._recording.__enter__()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self._end_step()
        self._num_steps += 1
        self._step = record_function(f"ProfilerStep#{self._num_steps}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._end_step()
        self._recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def export_chrome_trace(self, path: str) -> None:
        self._recording.export_chrome_trace(path)  # type: ignore[no-untyped-call]

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


class WorkerProfiler:
    """A profiler that records from its construction on, for at most `max_steps` steps and those that are computed at
    once with the last of them, so that a profile that nobody ends stays bounded in memory.

    Raises:
        UtilityError: nothing can be written to `directory`.
    """

    def __init__(self, directory: str, max_steps: int, device: torch.device, worker: str = "") -> None:
        """Begin to record; `worker` becomes a part of the files' names, to tell those of several workers
        apart."""
        self._worker = f"-{worker}" if worker else ""
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UtilityError(f"no profile can be written to {directory}: {error}") from error
        if not os.access(self._directory, os.W_OK):
            raise UtilityError(f"no profile can be written to {directory}: it is not writable")
        self._max_steps = max_steps
        self._num_steps = 0
        self._profile: profile | _CpuProfile = _CpuProfile()
        if device.type == "cuda":
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()
        self._is_recording = True

    def begin_step(self) -> None:
        """Note that a step is about to be executed; after `max_steps` of them the recording ends."""
        if not self._is_recording:
            return
        if self._num_steps >= self._max_steps:
            self._end()
        else:
            self._profile.step()
            self._num_steps += 1

    def count_further(self, num_steps: int) -> None:
        """Count the steps that were computed at once with the one that was begun last."""
        if self._is_recording:
            self._num_steps += num_steps

    def stop(self) -> ProfileReport:
        """Write the trace and return a report of it.

        Raises:
            UtilityError: it cannot be written.
        """
        self._end()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        number = f"{os.getpid()}-{time.monotonic_ns() % 10**6:06}"
        path = self._directory / f"nbengine-{stamp}{self._worker}-{number}.trace.json.gz"
        plain, partial = path.with_suffix(""), path.with_suffix(".partial")
        try:
            self._profile.export_chrome_trace(str(plain))
            trace = plain.read_bytes()
            partial.write_bytes(gzip.compress(trace, _COMPRESSION))
            partial.rename(path)
        except (OSError, RuntimeError) as error:
            raise UtilityError(f"the profile cannot be written to {path}: {error}") from error
        finally:
            plain.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        return ProfileReport([str(path)], self._num_steps, _summary(trace))

    def _end(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self._profile.stop()


def _summary(trace: bytes) -> str:
    """Make a table of the operations that took longest by themselves, on the GPU where it did anything."""
    events = [event for event in msgspec.json.decode(trace, type=_Trace).traceEvents if event.ph == "X"]
    kernels = [event for event in events if event.cat in _ON_DEVICE]
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event, microseconds in _own_times(kernels or [event for event in events if event.cat == "cpu_op"]):
        times[event.name] += microseconds
        counts[event.name] += 1
    total = sum(times.values())
    lines = [f"{'operation':<44} {'calls':>9} {'ms':>10} {'share':>6}"]
    for name in sorted(times, key=lambda name: -times[name])[:TOP_OPERATIONS]:
        share = times[name] / total if total else 0.0
        lines.append(f"{name[:44]:<44} {counts[name]:>9} {times[name] / 1000:>10.2f} {share:>6.1%}")
    return "\n".join(lines)


def _own_times(events: Iterable[_Event]) -> Iterator[tuple[_Event, float]]:
    """Yield each event with the microseconds in which no event within it ran; the events of a thread nest."""
    for _, of_thread in itertools.groupby(sorted(events, key=_by_thread), key=lambda event: event.tid):
        around: list[_Event] = []
        own: list[float] = []
        for event in of_thread:
            while around and around[-1].ts + around[-1].dur <= event.ts:
                yield around.pop(), own.pop()
            if around:
                own[-1] -= event.dur
            around.append(event)
            own.append(event.dur)
        yield from zip(around, own, strict=True)


def _by_thread(event: _Event) -> tuple[str, float, float]:
    return str(event.tid), event.ts, -event.dur
