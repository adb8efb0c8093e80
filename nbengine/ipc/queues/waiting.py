"""The waiting of one end of a ring in shared memory for another: it spins when that may be due, else sleeps.

Each end has its own *word* in the shared memory, which is 1 while the end sleeps or is about to. Nothing is
lost between looking and falling asleep, by Dekker's rule: the sleeper writes its word, fences, looks again
and only then sleeps; a process that changes something writes that, fences, and then looks at the word. On
Linux sleep is `futex(2)` on the word, which does not begin when the word is 0 again. Elsewhere an end looks
again at growing intervals.

Every sleep is bounded by `LONGEST_SLEEP`; then the sleeper also asks whether the other processes still run.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Callable

from nbengine.errors import PeerDiedError
from nbengine.kernels.cpu.futex import FUTEX_WAIT, FUTEX_WAKE, futex_number

SPIN = 200e-6
"""Seconds of looking before sleep: an engine core takes this time from one step's answer to the next step's
call with 32 requests. With 50 µs, a step of a tiny model takes 80 µs longer in
`benchmarks/bench_executor.py`, since both ends sleep."""
LEAD = 200e-6
"""Seconds of looking before a wait is expected to end. An end that last waited longer than `SPIN` sleeps
until `LEAD` before the same time has passed again, and looks from then on: steps of a model take about as
long as those before them, and a step whose answer is looked for, not slept for, ends 70 to 110 µs earlier
(`benchmarks/bench_executor.py`)."""
LONGEST_SLEEP = 0.05
"""Seconds until a sleeper looks up by itself."""
SHORTEST_POLL = 50e-6
LONGEST_POLL = 5e-3
"""Seconds between two looks where the system has no futex:
the first pause and, doubled each time, the longest."""


class Fence:
    """A full memory fence: no load or store moves across a call.

    CPython has none to offer, but taking a lock is an acquire and giving it back a release. On x86 the atomic
    instruction in either is a full fence. Where it is not, as on ARM, what stands before one pair may still
    pass into it from above and what stands after it from below; it takes two pairs, since an acquire never
    passes an earlier release (Arm Architecture Reference Manual for A-profile, B2.3,
    "Barrier-ordered-before").
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strong = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")

    def __call__(self) -> None:
        with self._lock:
            pass
        if not self._strong:
            with self._lock:
                pass


class _Futex:
    """`futex(2)` on words that processes share.

    Waiting releases the GIL; waking, which never waits, keeps it.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._wait = self._syscall(ctypes.CDLL(None))
        self._wake = self._syscall(ctypes.PyDLL(None))

    @staticmethod
    def _syscall(library: ctypes.CDLL) -> Callable[..., int]:
        function = library.syscall
        function.restype = ctypes.c_long
        word = ctypes.c_uint32
        function.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, word, ctypes.c_char_p)
        return function

    def wait(self, address: int, seconds: float) -> None:
        """Sleep while the word at `address` is 1, until woken, `seconds` at most or until a signal comes."""
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e9))
        self._wait(self._number, address, FUTEX_WAIT, 1, timeout)

    def wake(self, address: int) -> None:
        """Wake the end that sleeps on the word at `address`."""
        self._wake(self._number, address, FUTEX_WAKE, 1, None)


@functools.cache
def _find_futex() -> _Futex | None:
    number = futex_number()
    return None if number is None else _Futex(number)


class WakeWord:
    """The word (4 bytes, aligned) at `offset` of `memory`, on which one end sleeps."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = memoryview(memory)[offset : offset + 4].cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self._futex = _find_futex()

    def announce(self) -> None:
        """Say that this end is about to sleep; a fence and a look at what it waits for must follow."""
        self._word[0] = 1

    def withdraw(self) -> None:
        """Say that this end is awake."""
        self._word[0] = 0

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, `seconds` at most; not at all when woken since `announce`."""
        if self._futex is None:
            time.sleep(seconds)
        else:
            self._futex.wait(self._address, seconds)

    def wake(self) -> None:
        """Wake the end that sleeps here, if one does; call this after the change and a fence."""
        if self._word[0]:
            self._word[0] = 0
            if self._futex is not None:
                self._futex.wake(self._address)

    @property
    def polls(self) -> bool:
        """Tell whether the end must look by itself, because nobody can wake it here."""
        return self._futex is None

    def release(self) -> None:
        """Let go of the memory."""
        self._word.release()


class Waiter:
    """A waiter on `word`; `find_dead` returns the error if a process that the wait depends on is gone."""

    def __init__(self, word: WakeWord, fence: Fence, find_dead: Callable[[], PeerDiedError | None]) -> None:
        self._word = word
        self._fence = fence
        self._find_dead = find_dead
        self._last_wait = 0.0

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`; return False if it is not within `timeout` seconds (None: no limit).

        Raises:
            PeerDiedError: `find_dead` returned this error.
        """
        start = time.monotonic()
        found = self._look_when_due(ready, start, timeout) or self._sleep(ready, start, timeout)
        self._last_wait = time.monotonic() - start
        return found

    def _look_when_due(self, ready: Callable[[], bool], start: float, timeout: float | None) -> bool:
        """Spin around the time after which the last wait ended;
        not at all if that was so late that it says nothing."""
        nap = self._last_wait - LEAD if self._last_wait > SPIN else 0.0
        if nap > LONGEST_SLEEP or (timeout is not None and timeout < nap):
            return False
        if nap > 0 and self._sleep(ready, start, nap):
            return True
        end = time.monotonic() + SPIN
        if timeout is not None:
            end = min(end, start + timeout)
        while time.monotonic() < end:
            os.sched_yield()
            if ready():
                return True
        return False

    def _sleep(self, ready: Callable[[], bool], start: float, timeout: float | None) -> bool:
        poll = SHORTEST_POLL
        look_up = start + LONGEST_SLEEP
        try:
            while True:
                self._word.announce()
                self._fence()
                if ready():
                    return True
                now = time.monotonic()
                if now >= look_up:
                    look_up = now + LONGEST_SLEEP
                    dead = self._find_dead()
                    # Its last act may have ended this wait.
                    if dead is not None and not ready():
                        raise dead
                pause = LONGEST_SLEEP
                if timeout is not None:
                    pause = min(pause, start + timeout - now)
                    if pause <= 0:
                        return False
                if self._word.polls:
                    pause = min(pause, poll)
                    poll = min(2 * poll, LONGEST_POLL)
                self._word.sleep(pause)
        finally:
            self._word.withdraw()
