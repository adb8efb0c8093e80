"""Looking at a running engine: its processes now, what its engine cores do over time, and all of it live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbengine.client.base import EngineCoreClient
from nbengine.client.connection import ConnectionInfo
from nbengine.errors import NBEngineError
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.processes.tree import ProcessTree, read_process_tree
from nbengine.widgets.waves.recording import WaveRecording, record_for
from nbengine.widgets.waves.timeline import WaveTimeline

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.widgets.dashboard.widget import Dashboard


class Inspection(ABC):
    """What every frontend of an engine with processes of its own can show of it."""

    engine_core: EngineCoreClient
    _tokenizer: PreTrainedTokenizerFast

    @property
    @abstractmethod
    def connection(self) -> ConnectionInfo:
        """Where the engine lives.

        Raises:
            NotSupportedError: in this process.
        """

    def process_tree(self) -> ProcessTree:
        """The engine's processes as they are now, and what connects them; a notebook shows a picture of them."""
        return read_process_tree(self.connection)

    def record_waves(self) -> WaveRecording:
        """A context manager that records what each engine core does meanwhile; its `timeline` has it, a picture in a
        notebook."""
        return WaveRecording(self.connection)

    def wave_timeline(self, seconds: float = 5.0) -> WaveTimeline:
        """Record for so long, while requests of other threads or clients run."""
        return record_for(self.connection, seconds)

    def dashboard(self, *, height: int = 0) -> Dashboard:
        """A live view of scheduler, KV cache, steps and requests, as a widget of the notebook.

        Args:
            height: in pixels; 0: as high as its content.
        """
        from nbengine.widgets.dashboard.widget import Dashboard

        return Dashboard(self.connection, Owner(self), height=height)

    @property
    def client_index(self) -> int:
        """By which the engine knows this client's requests; another one after a lease was lost."""
        return self.engine_core.client_index

    @property
    def death(self) -> NBEngineError | None:
        """Why the engine has ended, as far as this client knows that it has."""
        return self.engine_core.death

    @abstractmethod
    def abort_soon(self, request_id: str) -> None:
        """End a request, given by either id, on any thread and without waiting.

        Raises:
            NotSupportedError: an `LLM` is asked; an interrupt ends what it waits for.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included; on any thread."""
        return str(self._tokenizer.decode(list(token_ids)))
