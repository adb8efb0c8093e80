"""The dashboard as a widget: what the kernel does for the script in the browser."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.connection import ConnectionInfo
from nbengine.errors import NBEngineError
from nbengine.metrics.trace import RequestAdded
from nbengine.widgets.comms import answer_at_once
from nbengine.widgets.dashboard.block_lines import block_lines, token_text
from nbengine.widgets.dashboard.chrome_trace import chrome_trace, history_of
from nbengine.widgets.dashboard.frames import FrameBuilder
from nbengine.widgets.dashboard.open_dashboards import BYTES_PER_SECOND, OPEN
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed, Subscribe
from nbengine.widgets.following.feed_answers import abort, decode
from nbengine.widgets.following.ownership import Owner
from nbengine.widgets.idle import IdleClock
from nbengine.widgets.live import in_kernel
from nbengine.widgets.output import ReplaceableOutput
from nbengine.widgets.pictures.html import static_bundle
from nbengine.widgets.scripts import bundled, stylesheet

if TYPE_CHECKING:
    from nbengine.widgets.dashboard.plain_view import PlainView

FRAME_INTERVAL = 0.2
"""Seconds between two frames at least."""
SILENCE = 15.0
"""Seconds without a sign of life from the script after which nothing is sent."""
QUIET = 2.0
"""Seconds since the last frame after which a sign of life is answered."""
FIRST_STATE_SECONDS = 1.0
"""For how long a picture waits for the engine to say how it is."""
SNAPSHOT_INTERVAL = 5.0
"""Seconds between two snapshots at least."""
SNAPSHOT_BYTES_PER_SECOND = 30_000
"""Of all dashboards, too."""
LOADING_SECONDS = 10.0
"""Seconds of an idle kernel after which a script that has not said anything is taken not to be there."""

_PREVIEW_TOKENS = 64


class Dashboard(anywidget.AnyWidget):
    """A live view of an engine, read-only but for ending this notebook's own requests.

    Its script is served with frames (`nbengine.widgets.dashboard.frames`) while it gives signs of life. With the engine's end, or
    with `close`, a picture of the last state takes its place. Usable from any thread.

    Args:
        info: the engine.
        owner: the client of this process that has it, if there is one.
        height: in pixels; 0: as high as its content.
        falls_back: take the plain widget instead if the script cannot be loaded.
        subscribe: where messages come from; the coordinator's publish socket if None.
    """

    _esm = bundled("dashboard")
    _css = stylesheet("dashboard")

    snapshot = traitlets.Dict().tag(sync=True)
    interrupt_path = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(0).tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    _is_closed = True
    _snapshots: ClassVar[Throttle] = Throttle(0.0, SNAPSHOT_BYTES_PER_SECOND, 0.0)
    """The part of the way to the browser that snapshots have: one after the other, or frames would have to wait for all
    of them."""

    def __init__(
        self,
        info: ConnectionInfo,
        owner: Owner | None = None,
        *,
        height: int = 0,
        falls_back: bool = True,
        subscribe: Subscribe | None = None,
    ) -> None:
        super().__init__(interrupt_path=interrupt_path(), height=height)
        shell: Any = InteractiveShell.instance() if InteractiveShell.initialized() else None
        self._info = info
        self._output = ReplaceableOutput()
        self._plain: PlainView | None = None
        self._idle = IdleClock.of(shell) if falls_back and shell is not None and in_kernel(shell) else None
        self._heard_at: float | None = None
        """When the script has last given a sign of life, on `time.monotonic()`."""
        self._shown_at = time.monotonic()
        self._sent_at = 0.0
        self._snapshot_due = time.monotonic() + SNAPSHOT_INTERVAL
        self._snapshot_of = 0.0
        self._throttle = Throttle(FRAME_INTERVAL, BYTES_PER_SECOND, FRAME_INTERVAL / 4)
        self._builder = FrameBuilder(self._preview)
        self._final: Mapping[str, str] | None = None
        self._is_closed = False
        OPEN.add(self)
        answer_at_once(self.comm)
        self.on_msg(self._on_message)
        self._feed = EngineFeed.listen(info, self, owner, subscribe)

    @property
    def info(self) -> ConnectionInfo:
        """The engine."""
        return self._info

    @property
    def is_closed(self) -> bool:
        """Whether what is shown does not change any more."""
        return self._is_closed if self._plain is None else self._plain.is_closed

    @property
    def is_watched(self) -> bool:
        """Whether its script gives signs of life."""
        return self._heard_at is not None and time.monotonic() - self._heard_at < SILENCE

    @property
    def looked_at(self) -> float:
        """When it was last displayed, or its script was heard."""
        return max(self._shown_at, self._heard_at or 0.0)

    def close(self) -> None:
        """Stop following the engine and show the last state for good; again does nothing."""
        if self._plain is None and not self._is_closed:
            # If nobody has looked for a while, what is known is old.
            self._feed.wait_until_known(FIRST_STATE_SECONDS)
            with self._feed.state() as state:
                if not self._is_closed:
                    self._finish(state)
            self._feed.leave(self)
        if self._plain is not None:
            self._plain.close()

    def export(self, path: str | Path) -> Path:
        """Write the steps and requests that are known as a Chrome trace, which Perfetto opens, too."""
        path = Path(path)
        path.write_text(self._trace(), "utf-8")
        return path

    def static(self) -> dict[str, str]:
        """The state as it is now, or was at the end, by MIME type, without a script."""
        if self._final is not None:
            return dict(self._final)
        self._feed.wait_until_known(FIRST_STATE_SECONDS)
        with self._feed.state() as state:
            return static_bundle(state)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        static = self.static()
        if self._is_closed:
            return static, {}
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, **static}, metadata

    def _ipython_display_(self, **kwargs: Any) -> None:
        self._shown_at = time.monotonic()
        OPEN.close_superfluous()
        # What is the value of a cell could not be replaced later: it has no display id.
        self._output.show(*self._repr_mimebundle_(**kwargs))

    # What the feed tells, with its lock held.

    @property
    def follows(self) -> bool:
        """Whether anybody looks: a script that has not been heard of yet may be loading, or saved outputs need it."""
        return self._heard_at is None or self.is_watched

    def on_state(self, state: DashboardState) -> None:
        """Send what is new."""
        if self._is_closed:
            return
        if state.state == "ended":
            self._finish(state)
            return
        if self.is_watched:
            self._renew_snapshot(state)
            self._send_frame(state)
        elif self._must_fall_back:
            self._fall_back(state)

    @property
    def _must_fall_back(self) -> bool:
        if self._heard_at is not None or self._idle is None or not self._output.is_shown:
            return False
        return self._idle.idle_seconds > LOADING_SECONDS

    def _send_frame(self, state: DashboardState, *, force: bool = False) -> None:
        if not (self._throttle.is_due and OPEN.line.is_due):
            return
        frame = self._builder.build(state, force=force)
        if frame is not None:
            self.send(frame.content, frame.buffers)
            # Its own pause leaves the line to the others.
            OPEN.line.sent(frame.size)
            self._throttle.sent(frame.size * OPEN.num_watched)
            self._sent_at = time.monotonic()

    def _renew_snapshot(self, state: DashboardState, *, at_once: bool = False) -> None:
        now = time.monotonic()
        is_due = now >= self._snapshot_due and self._snapshots.is_due and OPEN.line.is_due
        if not at_once and (not is_due or state.time == self._snapshot_of):
            return
        frame = FrameBuilder(self._preview).snapshot(state)
        buffers = [base64.b64encode(buffer).decode() for buffer in frame.buffers]
        self.snapshot = {**frame.content, "buffers": buffers}
        size = frame.size + sum(map(len, buffers)) - sum(map(len, frame.buffers))
        OPEN.line.sent(size)
        self._snapshots.sent(size)
        self._snapshot_of = state.time
        share = OPEN.num_watched * size / SNAPSHOT_BYTES_PER_SECOND
        self._snapshot_due = now + max(SNAPSHOT_INTERVAL, share)

    def _finish(self, state: DashboardState) -> None:
        """Put a picture in the widget's place."""
        self._final = static_bundle(state)
        self._renew_snapshot(state, at_once=True)
        self._output.replace(self._final)
        self._end()

    def _fall_back(self, state: DashboardState) -> None:
        """Put the plain widget in this one's place: the script is not there."""
        from nbengine.widgets.dashboard.plain_view import PlainView

        self._plain = PlainView(self._info, output=self._output)
        self._output.replace(*self._plain.bundle(state))
        self._feed.leave(self)
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        OPEN.discard(self)
        super().close()

    # What the script says, on any thread.

    def _on_message(self, widget: object, content: object, buffers: object) -> None:  # noqa: ARG002
        if self._is_closed or not isinstance(content, dict):
            return
        with self._feed.state() as state:
            was_following, self._heard_at = self.follows, time.monotonic()
            kind = content.get("kind")
            if kind == "hello":
                self._builder.reset()
                self._send_frame(state)
            elif kind == "alive" and time.monotonic() - self._sent_at > QUIET:
                self._send_frame(state, force=True)
            elif kind == "abort":
                self._answer_abort(state, content.get("rank"), content.get("number"))
            elif kind == "block":
                self._answer_block(state, content.get("rank"), content.get("block"))
        if not was_following:
            self._feed.look_again()
        if kind == "export":
            self.send({"kind": "export", "name": f"{self._info.name}-trace.json", "text": self._trace()})

    def _trace(self) -> str:
        with self._feed.state() as state:
            history = history_of(state)
        # A long one takes its time, for which the feed and the other dashboards need not wait.
        return chrome_trace(history)

    def _answer_abort(self, state: DashboardState, rank: object, number: object) -> None:
        error = None
        try:
            abort(self._feed, state, rank, number)
        except NBEngineError as refusal:
            error = str(refusal)
        self.send({"kind": "aborted", "rank": rank, "number": number, "error": error})

    def _answer_block(self, state: DashboardState, rank: object, block: object) -> None:
        if not isinstance(rank, int) or not isinstance(block, int):
            return
        lines = block_lines(state.mirrors.get(rank), block, self._decode)
        self.send({"kind": "block", "rank": rank, "block": block, "lines": lines})

    # Texts.

    def _preview(self, request: RequestAdded) -> str:
        token_ids = request.prompt_token_ids[:_PREVIEW_TOKENS]
        return token_text(token_ids, self._decode) if token_ids else ""

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        return decode(self._feed, token_ids)


def interrupt_path() -> str:
    """Where the notebook's server interrupts this kernel, `api/kernels/<id>`; empty outside of a server's kernel."""
    shell: Any = InteractiveShell.instance() if InteractiveShell.initialized() else None
    if shell is None or not in_kernel(shell):
        return ""
    from ipykernel.connect import get_connection_file

    try:
        name = Path(get_connection_file()).stem
    except RuntimeError:
        # A kernel inside another program has no connection file.
        return ""
    return f"api/kernels/{name.removeprefix('kernel-')}" if name.startswith("kernel-") else ""
