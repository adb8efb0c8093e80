"""The process of a server: it listens, starts or joins an engine, and ends with it or when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import uvicorn

from nbengine.client.threads.loop_thread import LoopThread
from nbengine.errors import EngineDeadError, NBEngineError, shown
from nbengine.frontend.async_llm import AsyncLLM
from nbengine.frontend.observability.request_log import RequestLog
from nbengine.frontend.observability.request_log import logger as request_logger
from nbengine.frontend.observability.request_watch import RequestObserver
from nbengine.frontend.observability.tracing import RequestTracer, otlp_provider
from nbengine.runtime.processes import take_end_signals
from nbengine.server.app import make_app
from nbengine.server.connections import Sweeper, sweep_forever
from nbengine.server.http_protocol import HttpProtocol
from nbengine.server.records import ServerOrder, ServerRecord, StartFailure, url_of, written_record
from nbengine.server.service import EngineService
from nbengine.server.settings import ServerSettings

logger = logging.getLogger(__name__)

BACKLOG = 1024
LAST_WORDS = 3.0
"""Seconds for the error events of streams whose engine has ended."""
KEEP_ALIVE = 15
"""Seconds for which a connection waits for another request."""
COLLECTOR_THRESHOLDS = 10_000, 10, 10
"""The garbage collector's. A step of many streams makes hundreds of objects, which go without it: connections, requests
and outputs are in no cycles."""


class _Server(uvicorn.Server):  # type: ignore[misc]
    """A server that leaves signals to `Serving`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Serving:
    """One run of a server.

    Args:
        settings: where it listens, and for whom.
        make_engine: starts or joins the engine; it is called on another thread, while requests get 503.
        on_ready: called with the record of the server when requests are answered.
        ends_engine: the engine ends with the server.
    """

    def __init__(
        self,
        settings: ServerSettings,
        make_engine: Callable[[], AsyncLLM],
        on_ready: Callable[[ServerRecord], None],
        *,
        ends_engine: bool,
    ) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._on_ready = on_ready
        self._ends_engine = ends_engine
        self._stops = 0
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or the engine's end.

        Raises:
            NBEngineError: the engine did not start, or has ended.
        """
        service = EngineService(self._settings)
        server = _Server(_config(make_app(service), self._settings))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # The one who started this process has held them back.
        take_end_signals()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        sweeper = Sweeper(self._settings.read_timeout, self._settings.write_timeout)
        sweeping = asyncio.create_task(sweep_forever(sweeper, server.server_state.connections))
        try:
            await self._serve(service, serving, listener)
        finally:
            server.should_exit = True
            sweeping.cancel()
            await asyncio.gather(serving, sweeping, return_exceptions=True)
            service.close()

    async def _serve(
        self, service: EngineService, serving: asyncio.Task[None], listener: socket.socket
    ) -> None:
        stop = asyncio.create_task(self._stop_asked.wait())
        starting = on_own_thread(self._make_engine)
        try:
            await asyncio.wait((starting, stop, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                raise NBEngineError("the server has stopped listening")
            if not starting.done():
                return
            engine = await starting
            try:
                await self._answer(service, engine, stop, listener)
            finally:
                await asyncio.to_thread(engine.shutdown if self._ends_engine else engine.detach)
        finally:
            stop.cancel()

    async def _answer(
        self, service: EngineService, engine: AsyncLLM, stop: asyncio.Task[bool], listener: socket.socket
    ) -> None:
        for observer in observers_of(self._settings, engine):
            engine.observe_requests(observer)
        await service.attach(engine)
        # All that is loaded by now stays: the collector need not look at it again while tokens wait.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECTOR_THRESHOLDS)
        watching = asyncio.create_task(service.watch())
        host, port = listener.getsockname()[:2]
        record = ServerRecord.here(url_of(host, port), service.model_names, bool(self._settings.api_keys))
        try:
            with written_record(engine.connection, record):
                self._on_ready(record)
                await asyncio.wait((watching, stop), return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    # Those who wait for outputs get an error, which they pass on.
                    await self._idle(service, LAST_WORDS)
                    raise watching.result()
                service.is_draining = True
                logger.info("ending: %d requests are being answered", service.num_active)
                if not await self._idle(service, self._settings.drain_timeout):
                    logger.warning("%d requests are given up", service.num_active)
        finally:
            watching.cancel()

    async def _idle(self, service: EngineService, timeout: float) -> bool:
        """Wait until all requests are answered, a second signal comes, or the time is up; tell whether all
        are."""
        waits = [asyncio.ensure_future(service.idle.wait()), asyncio.ensure_future(self._stop_now.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return service.idle.is_set()

    def _on_signal(self) -> None:
        self._stops += 1
        self._stop_asked.set()
        if self._stops > 1:
            self._stop_now.set()


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens where the settings say.

    Raises:
        NBEngineError: the address cannot be had; the message says why.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise NBEngineError(f"cannot listen at {shown(where)}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = (
            " (another program listens there; --port 0 takes a free port)"
            if error.errno == errno.EADDRINUSE
            else ""
        )
        raise NBEngineError(f"cannot listen at {shown(where)}: {error.strerror}{hint}") from error
    return listener


def serve(
    settings: ServerSettings,
    make_engine: Callable[[], AsyncLLM],
    on_ready: Callable[[ServerRecord], None],
    *,
    ends_engine: bool,
) -> None:
    """Run a server in this process until a signal or the engine's end; see `Serving`.

    Raises:
        NBEngineError: it cannot listen, the engine did not start, or it has ended.
    """
    listener = listen(settings)
    try:
        asyncio.run(_run(settings, make_engine, on_ready, listener, ends_engine=ends_engine))
    finally:
        listener.close()


async def _run(
    settings: ServerSettings,
    make_engine: Callable[[], AsyncLLM],
    on_ready: Callable[[ServerRecord], None],
    listener: socket.socket,
    *,
    ends_engine: bool,
) -> None:
    with LoopThread.adopted():
        await Serving(settings, make_engine, on_ready, ends_engine=ends_engine).run(listener)


def on_own_thread(work: Callable[[], AsyncLLM]) -> asyncio.Future[AsyncLLM]:
    """Return the future of `work`, done on a thread that the process's end does not wait for."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[AsyncLLM] = loop.create_future()

    def settle(result: AsyncLLM | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if result is not None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error or NBEngineError("there is no engine"))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 (the one who waits gets it)
            failure = error
        # After the end of the loop nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="nbengine-engine-start", daemon=True).start()
    return outcome


def observers_of(settings: ServerSettings, engine: AsyncLLM) -> list[RequestObserver]:
    """Return those who are told of the requests that have ended.

    Raises:
        NotSupportedError: the packages for traces are not installed.
    """
    observers: list[RequestObserver] = []
    if settings.log_requests or settings.log_prompts:
        observers.append(RequestLog(prompts=settings.log_prompts))
        # A line for each request is wanted, and the log leaves out lines of one kind that come too often.
        own = logging.StreamHandler()
        own.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        request_logger.handlers = [own]
        request_logger.setLevel(logging.INFO)
        request_logger.propagate = False
    if settings.traces_endpoint is not None:
        model = engine.config.model.model
        observers.append(RequestTracer(model, otlp_provider(settings.traces_endpoint)))
    return observers


def _config(app: Callable[..., Awaitable[None]], settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )


def tell(descriptor: int, news: ServerRecord | StartFailure) -> None:
    """Write news to the process that waits for this one, and close the pipe."""
    with contextlib.suppress(BrokenPipeError), open(descriptor, "wb") as pipe:
        pipe.write(msgspec.json.encode(news))


def end_line(error: NBEngineError) -> str:
    """Return the line with which a server ends whose engine has failed it."""
    if isinstance(error, EngineDeadError):
        return f"the server ends, because its engine has ended: {error.cause}"
    return str(error)


def main() -> int:
    """Serve the engine whose connection file and settings come over standard input, for `start_server`."""
    import setproctitle

    from nbengine.ipc.shortage import raise_file_limit
    from nbengine.runtime.logs import configure_logging
    from nbengine.runtime.stack_dumps import write_stacks_on_signal

    # An interrupt is meant for the notebook.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_file_limit()
    write_stacks_on_signal()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerOrder)
    setproctitle.setproctitle(f"nbengine: server {order.engine}")
    configure_logging("server")
    told = False

    def on_ready(record: ServerRecord) -> None:
        nonlocal told
        told = True
        tell(order.ready_fd, record)

    try:
        serve(
            order.settings,
            lambda: AsyncLLM.attach(order.connection),
            on_ready,
            ends_engine=False,
        )
    except NBEngineError as error:
        logger.error("%s", end_line(error))
        if not told:
            tell(order.ready_fd, StartFailure(str(error)))
        return 1
    return 0
