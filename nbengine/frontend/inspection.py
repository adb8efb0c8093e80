"""The ways to look at a running engine: its processes now, what its engine cores do over time, and all of it
live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from nbengine.checks import (
    MAX_TIMEOUT,
    checked_texts,
    checked_token_ids,
    require,
    require_method,
    require_number,
)
from nbengine.client.base import EngineCoreClient
from nbengine.client.history import DEFAULT_HISTORY_TIMEOUT, read_history
from nbengine.errors import NBEngineError, NotSupportedError
from nbengine.frontend.outputs.parallel_sampling import child_id
from nbengine.ipc.utilities import QueuePlace
from nbengine.metrics.history import MetricsHistory
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.processes.tree import ProcessTree, read_process_tree
from nbengine.widgets.waves.recording import WaveRecording

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.frontend.observability.stat_loggers import StatLogger, StatsFollower
    from nbengine.widgets.dashboard.widget import Dashboard


class Inspection(ABC):
    """The views that every frontend offers of an engine whose processes are its own."""

    engine_core: EngineCoreClient
    _tokenizer: PreTrainedTokenizerFast

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: what an engine gives is data, the engine itself is not."""
        raise NotSupportedError(
            "an engine cannot be pickled or copied; another process becomes a client of it with AsyncLLM.attach(NAME)"
        )

    @property
    @abstractmethod
    def connection(self) -> ConnectionInfo:
        """Return the engine's connection: the contents of its connection file.

        Raises:
            NotSupportedError: the engine is in this process.
        """

    def process_tree(self) -> ProcessTree:
        """Return the engine's processes as they are now, and what connects them; a notebook shows a picture
        of them."""
        return read_process_tree(self.connection)

    def record_waves(self) -> WaveRecording:
        """Return a context manager that records what each engine core does meanwhile; its `timeline` has the
        recording, a picture in a notebook."""
        return WaveRecording(self.connection)

    def dashboard(self, *, height: int = 0) -> Dashboard:
        """Make a live view of scheduler, KV cache, steps and requests, as a widget of the notebook.

        Args:
            height: in pixels; 0: as high as its content.
        """
        from nbengine.widgets.dashboard.widget import Dashboard

        return Dashboard(self.connection, Owner(self), height=height)

    def follow_stats(self, *stat_loggers: StatLogger) -> StatsFollower:
        """Give the engine's statistics to stat loggers whenever they change, on a thread of its own, until the
        result is closed or the engine has ended."""
        from nbengine.frontend.observability.stat_loggers import StatsFollower

        for stat_logger in stat_loggers:
            require_method("stat_loggers", stat_logger, "record")
        return StatsFollower(self.connection, stat_loggers)

    @property
    def client_index(self) -> int:
        """Return the number under which the engine knows this client's requests; after a lost lease there is
        another one."""
        return self.engine_core.client_index

    @property
    def death(self) -> NBEngineError | None:
        """Return the error that says why the engine has ended, None while this client does not know of an
        end."""
        return self.engine_core.death

    @property
    def stall(self) -> str | None:
        """Say in one line what makes no progress in the engine, as in "core 0: no progress for 42 s, in step
        1,234"; None if this client has been told of nothing."""
        return self.engine_core.stall

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        """Return the state of those engine cores that tell it within `timeout` seconds, and the ranks of
        those that do not."""
        stats, missing = self.engine_core.call_within(_checked_timeout(timeout), "stats")
        return stats or EngineStats(), missing

    def place_within(self, request_ids: Sequence[str], timeout: float) -> QueuePlace | None:
        """Return the place in the queue of the first of these requests, which have the engine's ids.

        None: none of them waits there, or the engine cores do not tell within `timeout` seconds.
        """
        ids = checked_texts("request_ids", request_ids, "the ids of requests")
        # Of several completions of a request the first one comes first.
        ids += [child_id(request_id, 0) for request_id in ids]
        place: QueuePlace | None
        place, _ = self.engine_core.call_within(_checked_timeout(timeout), "queue_place", ids)
        return place

    @abstractmethod
    def abort_soon(self, request_id: str) -> None:
        """End a request, given by either id, on any thread and without waiting.

        Raises:
            NotSupportedError: an `LLM` is asked; an interrupt ends what it waits for.
        """

    @abstractmethod
    def go_on_soon(self) -> None:
        """Wake the engine if it sleeps and lift a pause, on any thread and without waiting.

        Raises:
            NotSupportedError: an `LLM` is asked, whose own code does that.
        """

    def history(self, last: str) -> MetricsHistory:
        """Return what the engine's host has kept of the last time; safe on any thread but the client's own.

        Raises:
            NBEngineError: as `metrics` raises.
        """
        return read_history(self.engine_core, last, None, DEFAULT_HISTORY_TIMEOUT)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; safe on any thread."""
        tokens = checked_token_ids("token_ids", token_ids)
        known = all(0 <= token < 2**32 for token in tokens)
        require("token_ids", token_ids, known, "made of integers in [0, 2**32)")
        return str(self._tokenizer.decode(tokens))


def _checked_timeout(timeout: float) -> float:
    seconds = require_number("timeout", timeout)
    require("timeout", timeout, 0 <= seconds <= MAX_TIMEOUT, f"a number of seconds in [0, {MAX_TIMEOUT:,}]")
    return seconds
