"""The main function of an engine core's process: from its handshake with the host to its exit status."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import signal

import zmq

from nbengine.client.connection import ConnectionInfo, remove_core_files
from nbengine.config import EngineConfig
from nbengine.engine.core_proc import EngineCoreProc
from nbengine.engine.lifeline import Lifeline
from nbengine.engine.logs import describe_exception, log_tail
from nbengine.errors import EngineDeadError, EngineStartError, NBEngineError
from nbengine.executor.base import Executor
from nbengine.executor.files import ExecutorFiles
from nbengine.ipc.control_messages import EngineDead, EngineHandshakeMetadata, Progress
from nbengine.ipc.handshake import encode_control, say_hello
from nbengine.ipc.messages import engine_identity
from nbengine.ipc.sockets import make_socket

logger = logging.getLogger(__name__)

CONTROL_LINGER_MS = 1000


def run_engine_core(info: ConnectionInfo, rank: int, lifeline: Lifeline) -> int:
    """Run an engine core from its handshake to its end, and return the process's exit status."""
    name = f"engine core {rank} (pid {os.getpid()})"
    context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
    control = make_socket(
        context,
        info.address("core.sock"),
        zmq.DEALER,
        bind=False,
        identity=engine_identity(rank),
        linger=CONTROL_LINGER_MS,
    )
    last_words: EngineDead | None = None
    engine: EngineCoreProc | None = None
    try:
        handshake = say_hello(control, rank, os.getpid())
        files = ExecutorFiles(info.run_dir, info.tensor_dir or info.run_dir, info.log_path, engine=info.name)
        config = config_of_rank(info.config, rank, handshake)
        if info.keys is not None:
            config = _with_model_here(config, control)
        engine = _core_class(config)(config, executor_class(config), rank, context, control, handshake, files)
        signal.signal(signal.SIGTERM, engine.on_sigterm)
        lifeline.wake_on_signals(engine.wake)
        lifeline.notify(engine.on_host_gone)
        engine.start()
        engine.run_busy_loop()
        if engine.terminated:
            last_words = EngineDead(f"{name} was ended by SIGTERM", expected=True)
    except Exception as error:
        how = "did not start" if engine is None else "failed"
        cause = f"{name} {how}: {describe_exception(error)}"
        if isinstance(error, NBEngineError if engine is None else EngineDeadError):
            # Raised on purpose: the message says it all to whoever starts an engine.
            logger.error("%s", cause)
            logger.debug("raised here", exc_info=True)
        else:
            logger.exception("%s failed", name)
        # Read now: what is logged while the core is torn down would bury the cause.
        last_words = EngineDead(cause, log_tail(info.log_path), started=engine is not None)
    if engine is not None:
        engine.stop_io()
    # The host is told before the executor is torn down: after a failure that may hang.
    if last_words is not None:
        control.send(encode_control(last_words))
    control.close(linger=0 if lifeline.parent_gone else CONTROL_LINGER_MS)
    context.term()
    if lifeline.parent_gone:
        remove_core_files(info)
    if engine is not None:
        engine.shutdown()
    return 1 if last_words is not None and not last_words.expected else 0


def config_of_rank(config: EngineConfig, rank: int, handshake: EngineHandshakeMetadata) -> EngineConfig:
    """Return the configuration of one engine core; how many there are may have changed since it was written."""
    parallel = dataclasses.replace(
        config.parallel,
        data_parallel_rank=rank,
        data_parallel_size=handshake.data_parallel_size,
        data_parallel_joins_later=config.lock_step and handshake.joins_later,
    )
    return dataclasses.replace(config, parallel=parallel)


def _with_model_here(config: EngineConfig, control: zmq.Socket[bytes]) -> EngineConfig:
    """The configuration of a core that may be on another machine than the process that found the model."""
    from nbengine.cluster.models import with_model_here

    def report(progress: Progress) -> None:
        progress.rank = config.parallel.data_parallel_rank
        control.send(encode_control(progress))

    return with_model_here(config, report)


def _core_class(config: EngineConfig) -> type[EngineCoreProc]:
    if not config.lock_step:
        return EngineCoreProc
    from nbengine.engine.dp_core_proc import DPEngineCoreProc

    return DPEngineCoreProc


def executor_class(config: EngineConfig) -> type[Executor]:
    """Return the executor that the configuration names, which may be one of the user's own.

    Raises:
        EngineStartError: there is no such class.
    """
    module, separator, name = (config.parallel.distributed_executor_backend or "").partition(":")
    if not separator:
        return Executor.get_class(config)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineStartError(f"no executor {module}:{name}") from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise EngineStartError(f"{module}:{name} is not an Executor")
    return found
