"""The feed of an engine: one thread of this process follows the engine for any number of dashboards."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Protocol

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed_state import FeedState
from nbengine.widgets.following.ownership import Owner

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.2
"""The least seconds between two states."""
IDLE_INTERVAL = 0.5
"""Seconds after which the thread looks around even if no message comes."""
ALIVE_INTERVAL = 1.0
"""Seconds between two checks that the engine's host lives."""
FIRST_STATE_SECONDS = 5.0
"""Seconds that a picture waits for the engine to report its state."""
_MESSAGES_A_TURN = 1000


class Source(Protocol):
    """The part of `StatsSubscriber` that the feed reads."""

    @property
    def num_losses(self) -> int:
        """Count how often messages were lost."""

    def poll(self, timeout: float | None = None) -> object:
        """Return the next message, None if there is none within `timeout` seconds."""


Subscribe = Callable[[ConnectionInfo], AbstractContextManager[Source]]


class FeedListener(Protocol):
    """A listener of a feed, which is called on any thread with the feed's lock held."""

    @property
    def follows(self) -> bool:
        """Return whether states are needed now; while no listener needs any, nothing is read."""

    def on_state(self, state: DashboardState) -> None:
        """Take in a state: every `PUBLISH_INTERVAL` seconds while it changes, else every `IDLE_INTERVAL`.

        A state that says "ended" is the last.
        """


class EngineFeed:
    """A follower of one engine, while there are listeners.

    `state()` and the calls of listeners hold its lock: nothing else touches the mirrors meanwhile. A listener
    needs no own lock.
    """

    _feeds: ClassVar[dict[str, EngineFeed]] = {}
    _feeds_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, info: ConnectionInfo, subscribe: Subscribe) -> None:
        self._info = info
        self._subscribe = subscribe
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._known = threading.Event()
        """Every engine core has been heard of since the present subscription began."""
        self._num_waiting = 0
        self._started = False
        self._closed = False
        self._listeners: list[FeedListener] = []
        self._state = FeedState(info)
        self._published_at = 0.0
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"nbengine-feed-{info.name}", daemon=True)

    @classmethod
    def listen(
        cls,
        info: ConnectionInfo,
        listener: FeedListener,
        owner: Owner | None = None,
        subscribe: Subscribe | None = None,
    ) -> EngineFeed:
        """Add a listener to the one feed of this engine in this process, and return the feed.

        Args:
            owner: a client of this process, whose requests are then known as its own.
            subscribe: the source of messages for a new feed; the coordinator's publish socket if None.
        """
        while True:
            with cls._feeds_lock:
                feed = cls._feeds.get(info.run_dir)
                if feed is None:
                    feed = cls._feeds[info.run_dir] = cls(info, subscribe or _subscribe)
            if feed._add(listener, owner):
                return feed
            feed._forget()

    @classmethod
    def announce_end(cls, info: ConnectionInfo, reason: str) -> None:
        """Note that an engine has ended, as this process knows; its listeners hear of it at once."""
        with cls._feeds_lock:
            feed = cls._feeds.get(info.run_dir)
        if feed is not None:
            feed._end(reason)

    def leave(self, listener: FeedListener) -> bool:
        """Remove a listener; with the last one the thread ends. A second call does nothing.

        Returns:
            True if the thread ends now.
        """
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                self._close()
            return self._closed

    def look_again(self) -> None:
        """Wake the thread, because a listener follows again."""
        self._wake.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wait_until_known(self, timeout: float | None = None) -> bool:
        """Wait until every engine core has reported, or until the end; return False after `timeout` seconds,
        `FIRST_STATE_SECONDS` if it is None.

        Meanwhile the engine is followed even if no listener asks for it. A listener must not call this.
        """
        with self._lock:
            self._num_waiting += 1
        self._wake.set()
        try:
            return self._known.wait(FIRST_STATE_SECONDS if timeout is None else timeout)
        finally:
            with self._lock:
                self._num_waiting -= 1

    @contextmanager
    def state(self) -> Iterator[DashboardState]:
        """Yield the present state with its mirrors, which stay unchanged while the context lasts."""
        with self._lock:
            yield self._state.build(time.time())

    @property
    def owners(self) -> Sequence[Owner]:
        """Return the clients of this process that have the engine."""
        with self._lock:
            return list(self._state.owners)

    # These run on the feed's thread.

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            logger.exception("engine %s cannot be followed any more", self._info.name)
            self._end(f"this notebook cannot follow it any more: {error!r}")

    def _follow(self) -> None:
        while not self._closed:
            if not self._has_followers():
                self._rest()
                self._look_around()
                continue
            with self._lock:
                self._state.begin_subscription()
            with self._subscribe(self._info) as source:
                while not self._closed and not self._state.is_disconnected and self._has_followers():
                    self._take(source)
                    self._look_around()
                    self._let_gather()
                with self._lock:
                    if not self._closed:
                        self._known.clear()
            if self._state.is_disconnected:
                self._rest()

    def _rest(self) -> None:
        self._wake.wait(ALIVE_INTERVAL)
        self._wake.clear()

    def _has_followers(self) -> bool:
        with self._lock:
            return self._num_waiting > 0 or any(listener.follows for listener in self._listeners)

    def _take(self, source: Source) -> None:
        """Wait for messages until a state is due, and take them in."""
        due = self._published_at + (PUBLISH_INTERVAL if self._state.changed else IDLE_INTERVAL)
        message = source.poll(max(0.0, due - time.monotonic()))
        if message is None:
            return
        with self._lock:
            for _ in range(_MESSAGES_A_TURN):
                self._state.take(message)
                message = source.poll(0)
                if message is None:
                    break
            self._state.note_losses(source.num_losses)
            if self._state.is_known:
                self._known.set()

    def _let_gather(self) -> None:
        """Wait until the next state may be told: an engine may send hundreds of messages a second, and to read them
        together costs less."""
        with self._lock:
            is_awaited = self._closed or not self._state.is_known
        due = self._published_at + PUBLISH_INTERVAL
        if not is_awaited and self._wake.wait(max(0.0, due - time.monotonic())):
            # Whether anybody follows is looked at next.
            self._wake.clear()

    def _look_around(self) -> None:
        now = time.monotonic()
        reason = self._reason_of_end(now)
        if reason is not None:
            self._end(reason)
            return
        if now - self._published_at >= (PUBLISH_INTERVAL if self._state.changed else IDLE_INTERVAL):
            self._published_at = now
            with self._lock:
                # Before the first statistics there is nothing to show.
                if self._state.has_stats:
                    self._tell()

    def _reason_of_end(self, now: float) -> str | None:
        with self._lock:
            cause = self._state.cause_of_death()
        if cause is None and now - self._looked_at >= ALIVE_INTERVAL:
            self._looked_at = now
            if self._info.host_alive:
                return None
            cause = f"its host, process {self._info.host_pid}, is gone; the log is {self._info.log_path}"
        return cause

    # These run on any thread.

    def _add(self, listener: FeedListener, owner: Owner | None) -> bool:
        """Add a listener; return False if the feed has ended meanwhile."""
        with self._lock:
            if self._closed:
                return False
            self._listeners.append(listener)
            if owner is not None:
                self._state.add_owner(owner)
            if not self._started:
                self._started = True
                self._thread.start()
        self._wake.set()
        return True

    def _end(self, reason: str) -> None:
        with self._lock:
            if not self._closed:
                self._state.end(reason)
                try:
                    self._tell()
                finally:
                    self._listeners.clear()
                    self._close()

    def _tell(self) -> None:
        state = self._state.build(time.time())
        for listener in list(self._listeners):
            try:
                listener.on_state(state)
            except Exception:
                # A listener that fails must not stop the others.
                logger.exception("a dashboard of engine %s has failed, and is left alone", self._info.name)
                self._listeners.remove(listener)

    def _close(self) -> None:
        self._closed = True
        self._known.set()
        self._wake.set()
        self._forget()

    def _forget(self) -> None:
        with self._feeds_lock:
            if self._feeds.get(self._info.run_dir) is self:
                del self._feeds[self._info.run_dir]


def _subscribe(info: ConnectionInfo) -> AbstractContextManager[Source]:
    return StatsSubscriber(info, trace=True)


def _forget_after_fork() -> None:
    # A forked child has the objects but not the threads, so it begins without feeds.
    EngineFeed._feeds = {}
    EngineFeed._feeds_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
