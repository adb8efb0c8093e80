"""Looking at a running engine: its processes now, and what its engine cores do over time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nbengine.client.connection import ConnectionInfo
from nbengine.widgets.process_tree import ProcessTree, read_process_tree
from nbengine.widgets.wave_recording import WaveRecording, record_for
from nbengine.widgets.wave_timeline import WaveTimeline


class Inspection(ABC):
    """What every frontend of an engine with processes of its own can show of it."""

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
