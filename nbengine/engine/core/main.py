"""The main function of an engine core's process: from its handshake with the host to its exit status."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal

import zmq

from nbengine.config import EngineConfig
from nbengine.engine.core.activity import Activity, PulseThread
from nbengine.engine.core.core_proc import EngineCoreProc
from nbengine.errors import EngineDeadError, EngineEndError, NBEngineError
from nbengine.executor.choice import executor_class
from nbengine.ipc.control_messages import EngineDead, EngineHandshakeMetadata, Progress
from nbengine.ipc.handshake import encode_control, say_hello
from nbengine.ipc.messages import engine_identity
from nbengine.ipc.sockets import make_socket
from nbengine.runtime.connection import ConnectionInfo, remove_core_files
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.imports import imports_that_stay
from nbengine.runtime.lifeline import Lifeline
from nbengine.runtime.logs import describe_exception, log_tail

logger = logging.getLogger(__name__)

CONTROL_LINGER_MS = 1000


def run_engine_core(info: ConnectionInfo, rank: int, lifeline: Lifeline, secret: bytes = b"") -> int:
    """Run an engine core from its handshake to its end, and return the process's exit status.

    `secret` is the word with which the engine core proves to its host who it is.
    """
    name = f"engine core {rank} (pid {os.getpid()})"
    context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
    control = make_socket(
        context,
        info.address("core.sock"),
        zmq.DEALER,
        bind=False,
        identity=engine_identity(rank, secret),
        linger=CONTROL_LINGER_MS,
    )
    last_words: EngineDead | None = None
    engine: EngineCoreProc | None = None
    pulse: PulseThread | None = None
    activity = Activity()
    try:
        handshake = say_hello(control, rank, os.getpid())
        interval = info.config.progress_deadlines.pulse_interval
        address = info.address("core.sock")
        pulse = PulseThread(context, address, rank, handshake.incarnation, interval, activity, secret)
        pulse.start()
        files = ExecutorFiles(info.run_dir, info.tensor_dir or info.run_dir, info.log_path, engine=info.name)
        config = config_of_rank(info.config, rank, handshake)
        if info.keys is not None:
            config = _with_model_here(config, control)
        with imports_that_stay():
            executor = executor_class(config)
        engine = _core_class(config)(config, executor, rank, context, control, handshake, files, activity)
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
            # It was raised on purpose: the message is enough for people who start an engine.
            logger.error("%s", cause)
            logger.debug("raised here", exc_info=True)
        else:
            logger.exception("%s failed", name)
        # The log is read now: the lines that are logged while the core is torn down would bury the cause.
        last_words = _last_words(error, cause, info, started=engine is not None)
    if engine is not None:
        engine.stop_io()
    if pulse is not None:
        pulse.stop()
    # The host is told before the executor is torn down, because after a failure the teardown may hang.
    if last_words is not None:
        control.send(encode_control(last_words))
    control.close(linger=0 if lifeline.parent_gone else CONTROL_LINGER_MS)
    context.term()
    if lifeline.parent_gone:
        remove_core_files(info)
    if engine is not None:
        engine.shutdown()
    return 1 if last_words is not None and not last_words.expected else 0


def _last_words(error: Exception, cause: str, info: ConnectionInfo, *, started: bool) -> EngineDead:
    # What a process of the engine said at its end may be in the log alone; any other error that was raised
    # on purpose says all there is.
    explained = not started and isinstance(error, NBEngineError) and not isinstance(error, EngineEndError)
    return EngineDead(
        cause, "" if explained else log_tail(info.log_path), started=started, explained=explained
    )


def config_of_rank(config: EngineConfig, rank: int, handshake: EngineHandshakeMetadata) -> EngineConfig:
    """Return the configuration of one engine core; the number of cores may have changed since the start."""
    parallel = dataclasses.replace(
        config.parallel,
        data_parallel_rank=rank,
        data_parallel_size=handshake.data_parallel_size,
        data_parallel_joins_later=config.lock_step and handshake.joins_later,
    )
    return dataclasses.replace(config, parallel=parallel)


def _with_model_here(config: EngineConfig, control: zmq.Socket[bytes]) -> EngineConfig:
    """Return the configuration with the model's place on this machine, which may not be the launcher's."""
    from nbengine.cluster.models import with_model_here

    def report(progress: Progress) -> None:
        progress.rank = config.parallel.data_parallel_rank
        control.send(encode_control(progress))

    return with_model_here(config, report)


def _core_class(config: EngineConfig) -> type[EngineCoreProc]:
    if not config.lock_step:
        return EngineCoreProc
    from nbengine.engine.core.dp_core_proc import DPEngineCoreProc

    return DPEngineCoreProc
