"""The steps of an engine core for a dashboard's script: each is sent once, with later news after it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from nbengine.client.observe.trace_mirror import StepView, TraceMirror

DECODE, PROMPT, RECOMPUTED = 0, 1, 2
MOST_LAG = 10.0
"""The most seconds that the sent steps may lie behind the known ones, once they were level."""
_STEP_BYTES = 75
_NUMBER_BYTES = 5

StepItem = list[object]


@dataclass(frozen=True, slots=True)
class Steps:
    """The part of a frame about an engine core's steps; `lost`: they do not follow the earlier ones."""

    items: list[StepItem]
    lost: bool
    size: int
    """The size in bytes of JSON, roughly."""


@dataclass(slots=True)
class _Sent:
    view: StepView
    is_timed: bool
    num_finished: int


class StepEncoder:
    """A maker of the STEP items of the protocol in `nbengine.widgets.dashboard.frames`, for one reader."""

    def __init__(self) -> None:
        self._last: StepView | None = None
        """The last step that was sent."""
        self._before: StepView | None = None
        """The last step that was sent, where the next one is connected with it."""
        self._is_plain = False
        """Each request of that step computed a token and no more."""
        self._source: tuple[int, int] | None = None
        self._open: list[_Sent] = []
        """Steps that were sent before everything was known of them."""
        self._recomputing: set[int] = set()
        self._is_level = False

    def skip_to_latest(self, mirror: TraceMirror, max_bytes: int) -> None:
        """Skip the oldest steps, so that the rest has about `max_bytes` bytes."""
        size, newer = 0, None
        for view in reversed(mirror.steps):
            if size > max_bytes:
                self._last = view
                break
            # A step that only repeats the one before is sent without entries.
            is_repeated = newer is not None and _is_same(newer, view)
            size += _STEP_BYTES + (0 if is_repeated else 4 * _NUMBER_BYTES * len(view.numbers))
            newer = view

    def take(self, mirror: TraceMirror, max_bytes: int) -> Steps:
        """Encode what is new in a mirror, up to about `max_bytes` bytes; the next call has the rest."""
        source = (mirror.incarnation, mirror.num_snapshots)
        lost = self._source is not None and source != self._source
        self._source = source
        new, is_connected = self._new_steps(mirror)
        lost = lost or not is_connected
        if lost:
            self._last, self._before = self._last if is_connected else None, None
            self._open.clear()
            self._recomputing.clear()
        items = self._completed(mirror)
        size = _STEP_BYTES * len(items)
        count = 0
        for view in new:
            if count and size > max_bytes:
                break
            item, item_size = self._item(view)
            items.append(item)
            size += item_size
            count += 1
        self._is_level = self._is_level or count == len(new)
        return Steps(items, lost, size)

    def _new_steps(self, mirror: TraceMirror) -> tuple[list[StepView], bool]:
        """Return the steps after the last one that was sent, and whether none between them is missing."""
        last = self._last
        new = list(itertools.takewhile(lambda view: view is not last, reversed(mirror.steps)))[::-1]
        is_connected = last is None or len(new) < len(mirror.steps)
        if self._is_level and new and new[-1].time - new[0].time > MOST_LAG:
            newest = new[-1].time
            return [view for view in new if newest - view.time <= MOST_LAG / 2], False
        return new, is_connected

    def _completed(self, mirror: TraceMirror) -> list[StepItem]:
        items: list[StepItem] = []
        newest = mirror.steps[-1] if mirror.steps else None
        still_open = []
        for sent in self._open:
            view = sent.view
            if (view.seconds is not None) != sent.is_timed or len(view.finished) != sent.num_finished:
                items.append([view.step, None, _seconds(view), list(view.finished) or None])
                sent.is_timed, sent.num_finished = view.seconds is not None, len(view.finished)
            if not sent.is_timed or view is newest:
                still_open.append(sent)
        self._open = still_open
        return items

    def _item(self, view: StepView) -> tuple[StepItem, int]:
        entries = self._entries(view)
        self._last = self._before = view
        self._open.append(_Sent(view, view.seconds is not None, len(view.finished)))
        preempted, finished = list(view.preempted), list(view.finished)
        item: StepItem = [
            view.step,
            round(view.time, 4),
            _seconds(view),
            view.num_running,
            view.num_waiting,
            view.num_free_blocks,
            view.num_cached_blocks,
            entries,
            preempted or None,
            finished or None,
        ]
        numbers = len(entries or ()) + len(preempted) + len(finished)
        return item, _STEP_BYTES + _NUMBER_BYTES * numbers

    def _entries(self, view: StepView) -> list[int] | None:
        """List what each request did; None if that was the same as in the step before, and a decode."""
        before = self._before
        shares = self._is_plain and before is not None and _is_same(view, before)
        self._is_plain = not view.prefills and not view.admitted and (shares or set(view.num_tokens) <= {1})
        if self._is_plain and before is not None and (shares or list(view.numbers) == list(before.numbers)):
            self._recomputing.clear()
            return None
        self._recomputing.update(view.resumed)
        prefills, admitted = set(view.prefills), set(view.admitted)
        entries: list[int] = []
        for number, tokens, computed in zip(view.numbers, view.num_tokens, view.num_computed, strict=True):
            if number not in prefills:
                kind = DECODE
                self._recomputing.discard(number)
            else:
                kind = RECOMPUTED if number in self._recomputing else PROMPT
            entries += (number, tokens, kind, computed if number in admitted else -1)
        return entries


def _is_same(view: StepView, before: StepView) -> bool:
    return view.numbers is before.numbers and view.num_tokens is before.num_tokens


def _seconds(view: StepView) -> float | None:
    return None if view.seconds is None else round(view.seconds, 6)
