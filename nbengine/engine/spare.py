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

CORE_MODULES = (
    "nbengine.engine.core.main",
    "nbengine.executor.uniproc",
    "nbengine.kernels.cpu.attention_trials",
    "nbengine.kernels.cpu.backend",
    "nbengine.kernels.cpu.dense_trials",
    "nbengine.kernels.cpu.product_trials",
    "nbengine.kernels.cpu.quantized",
    "nbengine.kernels.cpu.row_calls",
    "nbengine.kernels.cpu.row_trials",
    "nbengine.kernels.cpu.step_trials",
    "nbengine.models.checkpoints.gguf_loader",
    "nbengine.models.checkpoints.safetensors_loader",
    "nbengine.models.families.decoder_classifier",
    "nbengine.models.families.llama",
    "nbengine.models.prepared.program",
    "nbengine.worker.worker",
)
"""The modules of an engine on one processor; a start that finds them imported takes a tenth of a second less."""


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
    import_for_later(CORE_MODULES)
    order = await_order(line, CoreOrder)
    begin_now()
    return order
