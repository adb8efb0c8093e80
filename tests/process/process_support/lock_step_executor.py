"""Executors whose batches need a batch of every other engine core, as those of a model with experts do.

All cores of an engine share a file (`meeting` of `hf_overrides`), in which each notes its calls: a batch, a dummy one, or a
question. When their number changes, they go on in another file, all of them meeting there once. A call ends when all cores have made it; if one of them has made another kind of
call in its place, they disagree, and every one that sees it fails. Otherwise they are the models of `fake_executor`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from concurrent.futures import Future

from process_support.fake_executor import AsyncFakeExecutor, FakeExecutor

LOCK_STEP_EXECUTOR = "process_support.lock_step_executor:LockStepExecutor"
ASYNC_LOCK_STEP_EXECUTOR = "process_support.lock_step_executor:AsyncLockStepExecutor"
MAX_RANKS = 16
BATCH, QUESTION, CHANGE = 1, 2, 3
_CALL = struct.Struct("<Q")
_ROW = 64
_BATCHES = 16
"""Offset in a row of the number of batches, dummy ones included; before it the last two calls."""


class Meeting:
    """One core's row of the file, and a view of the others'."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, MAX_RANKS * _ROW)
        self._memory = mmap.mmap(file, MAX_RANKS * _ROW)
        os.close(file)
        self._rank = rank
        self._size = size
        self._number = 0
        self.is_over = False

    def meet(self, kind: int, flag: bool = False) -> bool:
        """Make a call; tells, when all have made it, whether any of them set its flag."""
        self._number += 1
        if kind == BATCH:
            self._write(_BATCHES, self.num_batches(self._rank) + 1)
        self._write(8 * (self._number % 2), self._number << 8 | kind << 1 | flag)
        answers = [self._wait_for(rank, kind) for rank in range(self._size)]
        return any(answers)

    def num_batches(self, rank: int) -> int:
        """Return how many batches a core has begun."""
        return self._read(rank, _BATCHES)

    def _wait_for(self, rank: int, kind: int) -> bool:
        while True:
            call = self._read(rank, 8 * (self._number % 2))
            if call >> 8 == self._number:
                if call >> 1 & 0x7F != kind:
                    raise RuntimeError(
                        f"call {self._number}: core {rank} does {call >> 1 & 0x7F}, this one {kind}"
                    )
                return bool(call & 1)
            if self.is_over:
                raise RuntimeError(f"shut down in call {self._number}, core {rank} is at {call >> 8}")
            time.sleep(0.0002)

    def _read(self, rank: int, offset: int) -> int:
        return _CALL.unpack_from(self._memory, rank * _ROW + offset)[0]

    def _write(self, offset: int, value: int) -> None:
        _CALL.pack_into(self._memory, self._rank * _ROW + offset, value)


class _Meets(FakeExecutor):
    def __init__(self, config, progress=None, files=None):
        super().__init__(config, progress, files)
        parallel = config.parallel
        self.rank = parallel.data_parallel_rank
        size = 1 if parallel.data_parallel_joins_later else parallel.data_parallel_size
        path = self.knobs["meeting"]
        self.meeting = Meeting(path + "-apart" * parallel.data_parallel_joins_later, self.rank, size)

    def run(self, plan):
        if plan.total_num_scheduled_tokens:
            self.meeting.meet(BATCH)
        return super().run(plan)

    def run_dummy(self) -> None:
        if self.given_back:
            raise RuntimeError(f"computing without {self.given_back}")
        self.meeting.meet(BATCH)

    def ask(self, flag: bool) -> bool:
        return self.meeting.meet(QUESTION, flag)

    def reconfigure_data_parallel(self, before, after, init_method):
        path = init_method.removeprefix("file://")
        Meeting(path, self.rank, max(before, after)).meet(CHANGE)
        self.meeting = Meeting(f"{path}-group", self.rank, after)

    def shutdown(self):
        self.meeting.is_over = True
        super().shutdown()


class LockStepExecutor(_Meets):
    """One batch at a time."""

    def execute_dummy_batch(self):
        done: Future[None] = Future()
        done.set_result(self.run_dummy())
        return done

    def all_reduce_unfinished(self, unfinished):
        return self.ask(unfinished)


class AsyncLockStepExecutor(_Meets, AsyncFakeExecutor):
    """Two batches in flight; the calls are made by a thread, in order."""

    def execute_dummy_batch(self):
        return self.thread.submit(self.run_dummy)

    def all_reduce_unfinished(self, unfinished):
        return self.thread.submit(self.ask, unfinished).result()
