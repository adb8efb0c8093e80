"""The requests of an engine core on their way to a dashboard's script: of each one, only the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nbengine.client.observe.trace_mirror import RequestView
from nbengine.metrics.trace import RequestAdded

MOST_TEXT = 200
"""The most characters of an id, a name or a preview."""
_NEW_BYTES, _STATUS_BYTES, _PROGRESS_BYTES, _GONE_BYTES = 150, 75, 15, 5
_TEXT_BYTES = 12

RequestRow = tuple[RequestView, bool | None]
"""A request of the table, and whether the running cell waits for it; None if another notebook sent it."""
Status = tuple[str, int, int, float | None, float | None, str | None, bool, bool]


def no_words(_: RequestAdded) -> str:
    """Know nothing of an answer."""
    return ""


@dataclass(frozen=True, slots=True)
class Requests:
    """The part of a frame about an engine core's requests; `item` is None if nothing has changed."""

    item: dict[str, list[object]] | None
    size: int
    """The size in bytes of JSON, roughly."""


@dataclass(slots=True)
class _Sent:
    added: RequestAdded
    status: Status | None = None
    progress: tuple[int, int] | None = None
    output: str = ""


class RequestEncoder:
    """A maker of an engine core's `requests` for the protocol in `nbengine.widgets.dashboard.frames`.

    Args:
        preview: the end of what a request asks, in words.
        output: the newest words of a request's answer; empty where they are not known.
    """

    def __init__(
        self, preview: Callable[[RequestAdded], str], output: Callable[[RequestAdded], str] = no_words
    ) -> None:
        self._preview = preview
        self._output = output
        self._sent: dict[int, _Sent] = {}

    def take(self, rows: Iterable[RequestRow]) -> Requests:
        """Encode what has changed, given all rows that the table has of this engine core now."""
        new: list[object] = []
        status: list[object] = []
        progress: list[object] = []
        texts: list[object] = []
        known, self._sent = self._sent, {}
        size = 0
        for view, own in rows:
            added = view.added
            sent = known.pop(added.number, None)
            # An engine core that was started again gives the same numbers again.
            if sent is None or sent.added is not added:
                sent = _Sent(added)
                row = _unchanging(added, cut(self._preview(added)))
                new.append(row)
                size += _NEW_BYTES + len(str(row["id"])) + len(str(row["preview"]))
            self._sent[added.number] = sent
            status_now, progress_now = _status(view, own), (view.num_computed_tokens, view.num_output_tokens)
            if sent.status != status_now:
                sent.status = status_now
                status.append([added.number, *_rounded(status_now)])
            if sent.progress != progress_now:
                sent.progress = progress_now
                progress += (added.number, *progress_now)
            output = self._output(added)
            if output and sent.output != (output := cut(output)):
                sent.output = output
                texts.append([added.number, output])
                size += _TEXT_BYTES + len(output)
        gone: list[object] = list(known)
        if not (gone or new or status or progress or texts):
            return Requests(None, 0)
        size += _GONE_BYTES * len(gone) + _STATUS_BYTES * len(status) + _PROGRESS_BYTES * len(progress) // 3
        item = {"gone": gone, "new": new, "status": status, "progress": progress, "texts": texts}
        return Requests(item, size)


def cut(text: str) -> str:
    """Cut a text of any length to `MOST_TEXT` characters."""
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _unchanging(added: RequestAdded, preview: str) -> dict[str, object]:
    return {
        "number": added.number,
        "id": cut(added.request_id),
        "client": added.client_index,
        "num_prompt_tokens": added.num_prompt_tokens,
        "max_total_tokens": added.max_total_tokens,
        "added_at": round(added.time, 4),
        "preview": preview,
    }


def _status(view: RequestView, own: bool | None) -> Status:
    return (
        view.state,
        view.num_cached_tokens,
        view.num_preemptions,
        view.first_token_at,
        view.ended_at,
        view.finish_reason,
        own is not None,
        own is True,
    )


def _rounded(status: Status) -> tuple[object, ...]:
    first_token_at, ended_at = status[3:5]
    return (*status[:3], _moment(first_token_at), _moment(ended_at), *status[5:])


def _moment(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
