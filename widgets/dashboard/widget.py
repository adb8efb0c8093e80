"""The dashboard as a widget: the kernel's side of the script in the browser."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from nbengine.client.observe.process_usage import printable
from nbengine.errors import NBEngineError
from nbengine.metrics.trace import RequestAdded
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.comms import answer_at_once, interrupt_path
from nbengine.widgets.dashboard.block_lines import block_lines, token_text
from nbengine.widgets.dashboard.chrome_trace import chrome_trace, history_of
from nbengine.widgets.dashboard.frames import FrameBuilder
from nbengine.widgets.dashboard.labels import last_words, tail
from nbengine.widgets.dashboard.open_dashboards import BYTES_PER_SECOND, LINE, OPEN, num_watched
from nbengine.widgets.dashboard.past import LASTS, answer, refusal
from nbengine.widgets.dashboard.request_frames import cut
from nbengine.widgets.dashboard.still import Still
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed, Subscribe
from nbengine.widgets.following.feed_answers import abort, decode, go_on, history
from nbengine.widgets.following.ownership import SPOKEN, Owner
from nbengine.widgets.idle import IdleClock
from nbengine.widgets.live import LiveDisplay, in_kernel
from nbengine.widgets.pictures.html import static_bundle
from nbengine.widgets.scripts import bundled, stylesheet

if TYPE_CHECKING:
    from nbengine.widgets.dashboard.plain import PlainDashboard

FRAME_INTERVAL = 0.2
"""The least seconds between two frames."""
SILENCE = 15.0
"""Seconds without a sign of life from the script after which nothing is sent."""
HIDDEN_SILENCE = 150.0
"""The same while the script is out of sight: browsers let a hidden page act once a minute."""
HIDDEN_INTERVAL = 2.0
"""The least seconds between two frames while the script is out of sight."""
QUIET = 2.0
"""Seconds since the last frame after which a sign of life is answered."""
SNAPSHOT_INTERVAL = 5.0
"""The least seconds between two snapshots."""
SNAPSHOT_BYTES_PER_SECOND = 30_000
"""The rate of the snapshots of all dashboards together."""
LOADING_SECONDS = 10.0
"""Seconds of an idle kernel after which a script that has not said anything is taken to be missing."""

_PREVIEW_TOKENS = 64


class Dashboard(anywidget.AnyWidget):
    """A live view of an engine, which changes nothing except that it can end this notebook's own requests.

    Its script gets frames (`nbengine.widgets.dashboard.frames`) while it gives signs of life. When the engine
    ends, a script that was heard keeps what it knows, and can export it; otherwise, and with `close`, a picture of
    the last state takes the widget's place. Usable from any thread.

    A `Still` below it is what a saved notebook shows.

    Args:
        info: the engine.
        owner: the client of this process that has it, if there is one.
        height: in pixels; 0: as high as its content.
        falls_back: take the plain widget instead if the script cannot be loaded.
        subscribe: the source of messages; the coordinator's publish socket if None.
    """

    _esm = bundled("dashboard")
    _css = stylesheet("dashboard")

    snapshot = traitlets.Dict().tag(sync=True)
    interrupt_path = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(0).tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    _is_closed = True
    _snapshots: ClassVar[Throttle] = Throttle(0.0, SNAPSHOT_BYTES_PER_SECOND, 0.0)
    """The part of the line to the browser that snapshots have.

    They are sent one after the other, or frames would have to wait for all of them.
    """

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
        shell: Any = get_ipython()
        self.info = info
        self._output = LiveDisplay(shell)
        self._plain: PlainDashboard | None = None
        self._idle = IdleClock.of(shell) if falls_back and in_kernel(shell) else None
        self._heard_at: float | None = None
        """The time of the script's last sign of life, on `time.monotonic()`."""
        self._is_seen = True
        """The script can be seen, as far as it has said."""
        self._still = Still(shell)
        self._last: DashboardState | None = None
        """The state at the end of the engine, while the script keeps it."""
        self._sent_at = 0.0
        self._snapshot_due = time.monotonic() + SNAPSHOT_INTERVAL
        self._snapshot_of = 0.0
        self._throttle = Throttle(FRAME_INTERVAL, BYTES_PER_SECOND, FRAME_INTERVAL / 4)
        self._builder = FrameBuilder(self._preview, output=self._newest_words)
        self._spoken: Mapping[str, tuple[str, str]] = {}
        """The prompts and answers of this process's requests, as of the latest frame."""
        self._asks_history = threading.Lock()
        self._final: Mapping[str, str] | None = None
        self._is_closed = False
        OPEN.add(self)
        answer_at_once(self.comm)
        self.on_msg(self._on_message)
        self._feed = EngineFeed.listen(info, self, owner, subscribe)

    @property
    def is_closed(self) -> bool:
        """Return whether the view does not change any more."""
        return self._is_closed if self._plain is None else self._plain.is_closed

    @property
    def is_watched(self) -> bool:
        """Return whether the script gives signs of life and is kept up to date."""
        silence = SILENCE if self._is_seen else HIDDEN_SILENCE
        return (
            self._last is None and self._heard_at is not None and time.monotonic() - self._heard_at < silence
        )

    def close(self) -> None:
        """Stop following the engine and keep the last state; a second call does nothing."""
        if self._last is not None:
            self._finish(self._last)
        elif self._plain is None and not self._is_closed:
            # If nobody has looked for a while, the known state is old.
            self._feed.wait_until_known()
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
        """Render the present state, or the last one after the end, by MIME type, without a script."""
        if self._final is not None:
            return dict(self._final)
        self._feed.wait_until_known()
        with self._feed.state() as state:
            return static_bundle(state)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        static = self.static()
        if self._is_closed:
            return static, {}
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/plain": f"dashboard of engine {self.info.name!r}"}, metadata

    def _ipython_display_(self, **kwargs: Any) -> None:
        if not self._is_closed:
            OPEN.add(self)
        OPEN.close_superfluous()
        # The widget is displayed by hand: a cell's value has no display id and could not be replaced later.
        self._output.show(*self._repr_mimebundle_(**kwargs), again=True)
        if not self._is_closed:
            with self._feed.state() as state:
                self._still.show(self._last or state)

    # The feed calls these, with its lock held.

    @property
    def follows(self) -> bool:
        """Return whether states are needed: by a script, which may still be loading, or for saved outputs."""
        return self._heard_at is None or self.is_watched

    def on_state(self, state: DashboardState) -> None:
        """Send what is new."""
        if self._is_closed:
            return
        if state.state == "ended":
            self._keep_last(state)
            return
        if self.is_watched:
            self._renew_snapshot(state)
            self._still.renew(state)
            self._send_frame(state)
        elif self._must_fall_back:
            self._fall_back(state)

    @property
    def _must_fall_back(self) -> bool:
        if self._heard_at is not None or self._idle is None or not self._output.shown:
            return False
        return self._idle.idle_seconds > LOADING_SECONDS

    def _send_frame(self, state: DashboardState, *, force: bool = False) -> None:
        if not (self._throttle.is_due and LINE.is_due):
            return
        if not (self._is_seen or force) and time.monotonic() - self._sent_at < HIDDEN_INTERVAL:
            return
        self._spoken = SPOKEN.words()
        frame = self._builder.build(state, force=force)
        if frame is not None:
            self.send(frame.content, frame.buffers)
            # The widget's own pause leaves the line to the others.
            LINE.sent(frame.size)
            self._throttle.sent(frame.size * num_watched())
            self._sent_at = time.monotonic()

    def _renew_snapshot(self, state: DashboardState, *, at_once: bool = False) -> None:
        now = time.monotonic()
        is_due = now >= self._snapshot_due and self._snapshots.is_due and LINE.is_due
        if not at_once and (not is_due or state.time == self._snapshot_of):
            return
        self._spoken = SPOKEN.words()
        frame = FrameBuilder(self._preview, output=self._newest_words).snapshot(state)
        buffers = [base64.b64encode(buffer).decode() for buffer in frame.buffers]
        self.snapshot = {**frame.content, "buffers": buffers}
        size = frame.size + sum(map(len, buffers)) - sum(map(len, frame.buffers))
        LINE.sent(size)
        self._snapshots.sent(size)
        self._snapshot_of = state.time
        share = num_watched() * size / SNAPSHOT_BYTES_PER_SECOND
        self._snapshot_due = now + max(SNAPSHOT_INTERVAL, share)

    def _keep_last(self, state: DashboardState) -> None:
        """Let the script keep the state with which the engine has ended; without a script, show a picture of it."""
        if self._heard_at is None:
            self._finish(state)
            return
        self._last = state
        self._renew_snapshot(state, at_once=True)
        self._still.renew(state, at_once=True)
        self._send_last(state)

    def _send_last(self, state: DashboardState) -> None:
        """Send all that has not been sent, whatever the pace: nothing comes after it."""
        while (frame := self._builder.build(state)) is not None:
            self.send(frame.content, frame.buffers)
            LINE.sent(frame.size)

    def _finish(self, state: DashboardState) -> None:
        """Replace the widget by a picture."""
        self._final = static_bundle(state)
        self._renew_snapshot(state, at_once=True)
        self._still.clear()
        if self._output.shown:
            self._output.show(self._final)
        self._end()

    def _fall_back(self, state: DashboardState) -> None:
        """Replace this widget by the plain one, since the script is missing."""
        from nbengine.widgets.dashboard.plain import PlainDashboard

        self._plain = PlainDashboard(self.info, output=self._output)
        self._still.clear()
        self._output.show(*self._plain.bundle(state))
        self._feed.leave(self)
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        OPEN.discard(self)
        super().close()

    # The script's messages arrive here, on any thread.

    def _on_message(self, widget: object, content: object, buffers: object) -> None:  # noqa: ARG002
        if not isinstance(content, dict):
            return
        with self._feed.state() as state:
            if self._is_closed:
                return
            OPEN.add(self)
            was_following, self._heard_at = self.follows, time.monotonic()
            self._is_seen = content.get("visible", self._is_seen) is not False
            kind = content.get("kind")
            if self._last is not None:
                state = self._last
            if kind == "hello":
                self._builder.reset()
                if self._last is None:
                    self._send_frame(state)
                else:
                    self._send_last(state)
            elif kind == "alive" and time.monotonic() - self._sent_at > QUIET:
                self._send_frame(state, force=True)
            elif kind == "abort":
                self._answer_abort(state, content.get("rank"), content.get("number"))
            elif kind == "block":
                self._answer_block(state, content.get("rank"), content.get("block"))
            elif kind == "go_on":
                self._answer_go_on()
        if not was_following and self._last is None:
            self._feed.look_again()
        if kind == "history" and content.get("last") in LASTS:
            # The host answers in its own time, so that nothing else may wait for it.
            arguments = (content["last"],)
            threading.Thread(target=self._answer_history, args=arguments, daemon=True).start()
        if kind == "export":
            self.send({"kind": "export", "name": f"{self.info.name}-trace.json", "text": self._trace()})

    def _trace(self) -> str:
        with self._feed.state() as state:
            history = history_of(self._last or state)
        # A long trace takes time, so it is made without the feed's lock.
        return chrome_trace(history)

    def _answer_abort(self, state: DashboardState, rank: object, number: object) -> None:
        error = None
        try:
            self._check_engine()
            abort(self._feed, state, rank, number)
        except NBEngineError as refusal:
            error = str(refusal)
        self.send({"kind": "aborted", "rank": rank, "number": number, "error": error})

    def _check_engine(self) -> None:
        if self._last is not None:
            raise NBEngineError("the engine has ended")

    def _answer_history(self, last: str) -> None:
        with self._asks_history:
            try:
                self._check_engine()
                found = answer(last, history(self._feed, last))
            except NBEngineError as refused:
                found = refusal(last, str(refused))
            if not self._is_closed:
                self.send(found)

    def _answer_go_on(self) -> None:
        error = None
        try:
            self._check_engine()
            go_on(self._feed)
        except NBEngineError as refusal:
            error = str(refusal)
        self.send({"kind": "goes_on", "error": error})

    def _answer_block(self, state: DashboardState, rank: object, block: object) -> None:
        if not isinstance(rank, int) or not isinstance(block, int):
            return
        lines = block_lines(state.mirrors.get(rank), block, self._decode, self._name)
        self.send({"kind": "block", "rank": rank, "block": block, "lines": lines})

    # Texts.

    def _preview(self, request: RequestAdded) -> str:
        """Return the end of what a request asks, or the beginning where no more is known."""
        prompt, _ = self._spoken.get(request.request_id, ("", ""))
        if prompt:
            return printable(tail(prompt))
        token_ids = request.prompt_token_ids[:_PREVIEW_TOKENS]
        if not token_ids:
            return ""
        text = token_text(token_ids, self._decode)
        if len(token_ids) < request.num_prompt_tokens:
            return f"{text} …"
        return last_words(text.replace("⏎", "\n")) or text

    def _name(self, request: RequestAdded) -> str:
        """Return the name that the script has for a request, too."""
        return f"#{request.number} {cut(self._preview(request) or printable(request.request_id))}"

    def _newest_words(self, request: RequestAdded) -> str:
        _, text = self._spoken.get(request.request_id, ("", ""))
        return printable(tail(text)) if text else ""

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        return decode(self._feed, token_ids)
