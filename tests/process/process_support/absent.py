"""Executors of which one core, or the last worker, never gets ready: the others wait for it."""

from __future__ import annotations

import threading

from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.worker.worker import Worker

ABSENT_CORE = "process_support.absent:AbsentCore"
ABSENT_WORKER = "process_support.absent:AbsentWorkerExecutor"


class AbsentCore(UniProcExecutor):
    """The executor of a model; in the core whose rank is `absent` of `hf_overrides` it waits without end."""

    def __init__(self, config, progress=None, files=None):
        if config.parallel.data_parallel_rank == config.model.hf_overrides["absent"]:
            threading.Event().wait()
        super().__init__(config, progress, files)


class AbsentWorkerExecutor(MultiprocExecutor):
    """An executor of real workers, the last of which meets the others and waits without end."""

    worker_class = "process_support.absent:AbsentWorker"


class AbsentWorker(Worker):
    """A worker that loads nothing if it is the last."""

    def load_model(self) -> None:
        if self.layout.rank == self.layout.world_size - 1:
            threading.Event().wait()
        super().load_model()
