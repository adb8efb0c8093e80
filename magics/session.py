"""The engines that this notebook is attached to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines import spare
from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import did_you_mean
from nbengine.ipc.control_messages import EngineReady, Progress
from nbengine.magics.engines.ledger import Ledger
from nbengine.magics.generation.ongoing import OngoingRequests
from nbengine.magics.generation.request import RequestClient
from nbengine.runtime.connection import ConnectionInfo, list_connections
from nbengine.widgets.following.ownership import Client
from nbengine.widgets.live import in_kernel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.frontend.outputs.transcripts import Transcript

ProgressCallback = Callable[[Progress], None]


class EngineClient(RequestClient, Client, Protocol):
    """The part of `AsyncLLM` that the magics use."""

    @property
    def connection(self) -> ConnectionInfo:
        """Return the connection info of the engine."""

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""

    @property
    def ready(self) -> EngineReady:
        """Return what the engine reported when it was ready."""

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""

    def transcripts_blocking(self, session: str | None = None) -> list[Transcript]:
        """Return the answers that the engine has kept for this notebook, or for another session."""

    def read_transcripts(self, request_ids: Iterable[str], session: str | None = None) -> None:
        """Tell the engine, without waiting, that these answers have been read."""

    def forget_transcripts_blocking(
        self, request_ids: Iterable[str] | None = None, session: str | None = None
    ) -> int:
        """Drop these answers in the engine; None: all that have ended. Return their number."""

    def transcript_sessions_blocking(self) -> dict[str, int]:
        """Count the completions that nobody has read, by session."""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_parser: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Apply the chat template."""

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer."""

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the model's own defaults."""

    def scale_blocking(
        self, data_parallel_size: int, timeout: float | None = None, progress: ProgressCallback | None = None
    ) -> int:
        """Start or end engine cores until there are `data_parallel_size`, and return their number."""

    def detach(self) -> None:
        """Leave the engine running."""

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine and wait until its processes are gone."""


class Backend(Protocol):
    """The maker of engines, and of clients of engines that run."""

    def keep_spare(self) -> None:
        """Start the processes of an engine before it is asked for, so that its start is quick."""

    def drop_spare(self) -> None:
        """End them, if no engine has needed them."""

    def prepare(self, arguments: Mapping[str, Any], *, progress: ProgressCallback) -> None:
        """Find or fetch the files that a start with these arguments needs; raise if it could not begin."""

    def start(
        self, arguments: Mapping[str, Any], *, name: str | None, session: str, progress: ProgressCallback
    ) -> EngineClient:
        """Start an engine and wait until it takes requests."""

    def attach(self, name_or_file: str | Path, *, session: str, progress: ProgressCallback) -> EngineClient:
        """Become a client of an engine that runs."""


class AsyncLLMBackend:
    """A backend whose engines run in their own processes and outlive the kernel."""

    def keep_spare(self) -> None:
        """Start the processes of an engine before it is asked for, so that its start is quick."""
        # An engine can be started without them.
        with contextlib.suppress(OSError, RuntimeError):
            spare.keep_spare()

    def drop_spare(self) -> None:
        """End them, if no engine has needed them."""
        spare.drop_spare()

    def prepare(self, arguments: Mapping[str, Any], *, progress: ProgressCallback) -> None:
        """Find or fetch the files of model and tokenizer, and check that the workers can divide the model."""
        from nbengine.frontend.assembly import resolve_files

        resolve_files(EngineArgs.from_kwargs(arguments).create_engine_config(bound=False), progress)

    def start(
        self, arguments: Mapping[str, Any], *, name: str | None, session: str, progress: ProgressCallback
    ) -> EngineClient:
        """Start an engine and wait until it takes requests."""
        from nbengine.frontend.async_llm import AsyncLLM

        return AsyncLLM(name=name, bound=False, session=session, progress=progress, **arguments)

    def attach(self, name_or_file: str | Path, *, session: str, progress: ProgressCallback) -> EngineClient:
        """Become a client of an engine that runs."""
        from nbengine.frontend.async_llm import AsyncLLM

        self.drop_spare()
        return AsyncLLM.attach(name_or_file, session=session, progress=progress)


@dataclass(eq=False)
class AttachedEngine:
    """An engine of this notebook; `arguments` are those it was started with, without the defaults.

    `configured` names the arguments that come from the notebook's configuration and not from a line.
    """

    client: EngineClient
    arguments: dict[str, Any] = field(default_factory=dict)
    configured: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Return the name of the engine."""
        return self.client.name


class NotebookSession:
    """The engines that the notebook is attached to; the default is the last one that was added."""

    def __init__(self, shell: InteractiveShell, backend: Backend | None = None) -> None:
        self.key = session_key(shell)
        self.backend: Backend = backend or AsyncLLMBackend()
        self.ledger = Ledger(self.key)
        self.ongoing = OngoingRequests()
        self.on_engine_end: list[Callable[[ConnectionInfo], None]] = []
        """Functions that are called when this notebook has ended an engine, its own or not."""
        self.on_close: list[Callable[[], None]] = []
        """Functions that are called before the notebook leaves its engines."""
        self._engines: dict[str, AttachedEngine] = {}
        self._dropped: list[AttachedEngine] = []

    @property
    def engines(self) -> list[AttachedEngine]:
        """Return the attached engines, the default last; those that have died are dropped first."""
        for engine in list(self._engines.values()):
            if not engine.client.connection.host_alive:
                self.drop(engine)
        return list(self._engines.values())

    @property
    def default(self) -> AttachedEngine | None:
        """Return the engine that `%%generate` asks."""
        return next(reversed(self._engines.values()), None)

    def get(self, name: str | None = None) -> AttachedEngine:
        """Find the attached engine of that name, or the default.

        Raises:
            UsageError: there is none; the message says what to do.
        """
        if name is None:
            if self.default is None:
                raise UsageError(f"no engine is running here: `%engine start` starts one{_or_attach()}")
            return self.default
        if name in self._engines:
            return self._engines[name]
        if any(info.name == name for info in live_engines()):
            raise UsageError(f"engine {name!r} is not attached here: `%engine attach {name}` does that")
        raise UsageError(f"there is no engine {name!r}{did_you_mean(name, self._engines)}")

    def find(self, name: str) -> AttachedEngine | None:
        """Find the attached engine of that name; None if there is none."""
        return next((engine for engine in self.engines if engine.name == name), None)

    def add(self, engine: AttachedEngine) -> None:
        """Add an engine, as the default."""
        self._engines.pop(engine.name, None)
        self._engines[engine.name] = engine
        self.ledger.add(engine.client.connection)

    def drop(self, engine: AttachedEngine) -> None:
        """Forget an engine that has died or was ended elsewhere; `bury` waits until nothing is left of it."""
        if self._engines.get(engine.name) is engine:
            self._dropped.append(engine)
        self._remove(engine)

    def bury(self) -> None:
        """Wait until nothing is left of the engines that were dropped, so that their names are free again."""
        while self._dropped:
            self._dropped.pop().client.shutdown()

    def detach(self, engine: AttachedEngine) -> None:
        """Leave an engine running without this notebook."""
        engine.client.detach()
        self._remove(engine)

    def stop(self, engine: AttachedEngine, *, drain: bool = False) -> None:
        """End an engine and wait until its processes are gone."""
        try:
            engine.client.shutdown(drain=drain)
        finally:
            self._remove(engine)

    def close(self) -> list[AttachedEngine]:
        """Leave all engines running without this notebook, which may still come back, and return them."""
        while self.on_close:
            self.on_close.pop()()
        self.ongoing.views.close()
        self.bury()
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.client.detach()
        return engines

    def _remove(self, engine: AttachedEngine) -> None:
        if self._engines.get(engine.name) is engine:
            del self._engines[engine.name]
            self.ledger.remove(engine.client.connection)
            self.ongoing.views.close(engine.name)


def live_engines() -> list[ConnectionInfo]:
    """List all engines of this user on this machine whose host runs, oldest first."""
    return [info for info in list_connections() if info.host_alive]


def session_key(shell: InteractiveShell) -> str:
    """Return a name of this notebook that survives a restart of its kernel: its connection file's name."""
    if in_kernel(shell):
        from ipykernel.connect import get_connection_file

        # A kernel inside another program has no connection file.
        with contextlib.suppress(RuntimeError):
            return Path(get_connection_file()).stem
    return f"ipython-{os.getpid()}"


def _or_attach() -> str:
    names = [info.name for info in live_engines()]
    return f", `%engine attach` joins one that runs already ({', '.join(names)})" if names else ""
