"""The pages of a KV cache on the CPU: taken when a step needs them, and meanwhile in the background.

Taking a page means that the system clears it, which for a cache of gigabytes lasts seconds where memory has
never been used. No request waits for that, yet soon after a start the memory is the engine's: others that ask
what is free do not count on it.

All of them are huge, but those of the first 2 MiB of each half of a layer's cache: a step that comes before the
background takes ordinary pages there, which the background makes huge. The first prompt after a start would wait for
the clearing of 2 MiB for each half to write a few KiB, and a virtual machine that gets the memory from its host takes
5 ms for each.

Steps go first, and the lowest priority does not see to that alone: a step's threads yield where they wait for
each other, and each time the system may clear a whole page in between.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from nbengine.kernels.cpu.huge_pages import HUGE_PAGE, ask_for_small_pages, take_huge_pages
from nbengine.units import size

logger = logging.getLogger(__name__)

_PIECE = HUGE_PAGE
"""The bytes that are taken at a time. `stop` waits for one piece, and so does a step that maps or frees memory."""
_LOWEST_PRIORITY = 19
PAUSES = 20
"""The pause behind a piece while a step is computed, as a multiple of the processor time of its clearing, which is
a twentieth of a core then."""


class KVPages:
    """A thread that takes the pages of `caches`, each [2, num_blocks, ...], whose low blocks are used first.

    A step is computed in its context: `with pages: ...`.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._caches = list(caches)
        for cache in self._caches:
            for half in cache:
                _begin_with_small_pages(cache, half.data_ptr())
        self._is_stopped = threading.Event()
        self._is_held_back = False
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        """Take a piece now and then only."""
        self._is_held_back = True

    def __exit__(self, *failure: object) -> None:
        """Go on with all pieces."""
        self._is_held_back = False

    def stop(self) -> None:
        """Take no more; the caches may be freed afterwards."""
        self._is_stopped.set()
        self._thread.join()
        self._caches = []

    def join(self) -> None:
        """Wait until all pages are taken, or one could not be."""
        self._thread.join()

    def _run(self) -> None:
        # Steps go first: on Linux each thread has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        spent = 0.0
        for address, num_bytes in itertools.chain.from_iterable(self._rounds()):
            if self._is_held_back:
                self._is_stopped.wait(PAUSES * spent)
            if self._is_stopped.is_set():
                return
            began = time.thread_time()
            if not take_huge_pages(address, num_bytes):
                total = sum(cache.nbytes for cache in self._caches)
                logger.warning("memory is short: the KV cache of %s is taken as it is needed", size(total))
                return
            spent = time.thread_time() - began

    def _rounds(self) -> Iterator[list[tuple[int, int]]]:
        """Yield address and bytes of the next piece of each half of all caches, from low blocks to high ones.

        A piece is a huge page, which may hold the end of one half and the begin of the other.
        """
        runs = []
        for cache in self._caches:
            first, end = cache.data_ptr(), cache.data_ptr() + cache.nbytes
            starts = sorted({half.data_ptr() // _PIECE * _PIECE for half in cache})
            runs += [
                [(max(place, first), min(place + _PIECE, end)) for place in range(*ends, _PIECE)]
                for ends in itertools.pairwise([*starts, end])
            ]
        for pieces in itertools.zip_longest(*runs):
            yield [(first, end - first) for first, end in filter(None, pieces)]


def _begin_with_small_pages(cache: Tensor, half: int) -> None:
    """Have the huge pages in which the first 2 MiB of a half of a cache lie taken as small ones by those who use them."""
    begin, end = cache.data_ptr(), cache.data_ptr() + cache.nbytes
    first, stop = half // HUGE_PAGE * HUGE_PAGE, -(-(half + HUGE_PAGE) // HUGE_PAGE) * HUGE_PAGE
    ask_for_small_pages(max(first, begin), min(stop, end) - max(first, begin))
