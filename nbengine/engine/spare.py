"""The waiting of spare processes: what a spare host and a spare core do until they get their order."""

from __future__ import annotations

import os
import signal

import setproctitle

from nbengine.engine.host.launchers import start_spare_core
from nbengine.engine.start_log import begin_now
from nbengine.runtime.imports import import_for_later
from nbengine.runtime.processes import END_SIGNALS, PARENT_FD_VARIABLE, take_end_signals
from nbengine.runtime.spare import CoreOrder, HostOrder, SpareProcess, await_order

_CORE_MODULES = (
    "nbengine.engine.core.main",
    "nbengine.executor.uniproc",
    "nbengine.models.checkpoints.gguf_loader",
    "nbengine.models.checkpoints.safetensors_loader",
    "nbengine.models.families.decoder",
    "nbengine.worker.worker",
)


def wait_as_host() -> tuple[HostOrder, SpareProcess] | None:
    """Start a spare core, wait for an order, and return both; None: the parent wants no engine, or is gone."""
    line = int(os.environ[PARENT_FD_VARIABLE])
    setproctitle.setproctitle("nbengine: spare host")
    # Until there is an engine, nothing has to be removed when this process ends.
    take_end_signals()
    spare = start_spare_core()
    import_for_later(["nbengine.engine.host.main"])
    order = await_order(line, HostOrder)
    if order is None:
        spare.close()
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    if not order.bound:
        os.close(line)
        del os.environ[PARENT_FD_VARIABLE]
    begin_now()
    return order, spare


def wait_as_core(line: int) -> CoreOrder | None:
    """Import what the core of an ordinary engine needs, and wait for an order; None: the host is gone."""
    setproctitle.setproctitle("nbengine: spare core")
    import_for_later(_CORE_MODULES)
    order = await_order(line, CoreOrder)
    begin_now()
    return order
