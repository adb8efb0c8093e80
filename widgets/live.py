"""One output area of a cell, which is replaced in place while something goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell

from nbengine.widgets.words import harmless

MimeBundle = Mapping[str, Any]
"""Data by MIME type: text, or what a frontend takes as JSON."""


class LiveDisplay:
    """An output of the cell that is running when the first bundle is shown; later bundles replace it.

    Usable from any thread, also long after the cell has ended. The publisher is the one in force at
    construction, so that `%%capture` around the cell captures the updates, too. Without a shell the bundle is
    printed, as text, and not replaced.
    """

    def __init__(self, shell: InteractiveShell | None) -> None:
        self._publisher = None if shell is None else shell.display_pub
        self._transient = {"display_id": uuid4().hex}
        self._lock = threading.Lock()
        self._shown = False

    @property
    def shown(self) -> bool:
        """Return whether anything has been shown."""
        return self._shown

    def show(self, bundle: MimeBundle, metadata: MimeBundle | None = None, *, again: bool = False) -> int:
        """Show or replace the output, and return the size of the bundle in characters.

        With `again` the running cell shows it, too; later bundles replace it there as well.
        """
        with self._lock:
            update, self._shown = self._shown and not again, True
            if self._publisher is not None and update and _sends_alone(self._publisher):
                self._replace(bundle, metadata)
            elif self._publisher is not None:
                self._publisher.publish(
                    data=dict(bundle), metadata=metadata, transient=self._transient, update=update
                )
            elif not update:
                print(bundle["text/plain"])
        return sum(map(len, bundle.values()))

    def _replace(self, bundle: MimeBundle, metadata: MimeBundle | None) -> None:
        """Send a replacement as the publisher would, which first waits, twice, until another thread has sent all that is
        printed: that costs more than all the rest, and what replaces an output has no place among later ones."""
        publisher: Any = self._publisher
        content = {"data": dict(bundle), "metadata": metadata or {}, "transient": self._transient}
        session, outlet = publisher.session, publisher.pub_socket
        message = session.msg("update_display_data", content, parent=publisher.parent_header)
        sheaf = getattr(_of_thread, "sheaf", None)
        if sheaf is not None and getattr(outlet, "io_thread", None) is not None:
            sheaf.io_thread, outlet = outlet.io_thread, sheaf
        session.send(outlet, message, ident=publisher.topic)


class Sheaf:
    """Replacements that a kernel sends together: its thread that sends wakes once for all of them, not for each.

    `later` calls a function once the calling thread has done what is due now.
    """

    def __init__(self, later: Callable[[Callable[[], None]], object]) -> None:
        self.io_thread: Any = None
        """The kernel's thread that sends."""
        self._later = later
        self._waiting: list[tuple[Sequence[bytes], dict[str, Any]]] = []

    def send_multipart(self, frames: Sequence[bytes], **options: Any) -> None:
        """Take in a message as a socket would."""
        if not self._waiting:
            self._later(self._send)
        self._waiting.append((frames, options))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.io_thread.schedule(partial(_send_all, self.io_thread, waiting))


def _send_all(io_thread: Any, messages: Sequence[tuple[Sequence[bytes], dict[str, Any]]]) -> None:
    if not io_thread.closed:
        for frames, options in messages:
            io_thread.socket.send_multipart(frames, **options)


_of_thread = threading.local()


def send_together(later: Callable[[Callable[[], None]], object]) -> None:
    """Have what the calling thread replaces sent together: `later` is as `Sheaf` says."""
    _of_thread.sheaf = Sheaf(later)


def _sends_alone(publisher: Any) -> bool:
    """Return whether a publisher only sends what it is given: it is a kernel's own, without hooks, and keeps nothing."""
    module = sys.modules.get("ipykernel.zmqshell")
    is_kernels = module is not None and type(publisher) is module.ZMQDisplayPublisher
    return is_kernels and not publisher.store_display_history and not publisher._hooks


def in_kernel(shell: InteractiveShell | None) -> bool:
    """Return whether outputs go to a frontend that can replace them, rather than to a terminal."""
    return getattr(shell, "kernel", None) is not None


def publish(shell: InteractiveShell, plain: str, html: str | None = None) -> None:
    """Show an output that is not going to change; a terminal gets the plain text."""
    data = {"text/plain": plain}
    if html is not None:
        data["text/html"] = html
    publish_bundle(shell, data)


def publish_bundle(shell: InteractiveShell, bundle: MimeBundle) -> None:
    """Show an output that has more forms than plain text and HTML; otherwise as `publish`."""
    if in_kernel(shell):
        shell.display_pub.publish(data=dict(bundle))
    else:
        print(harmless(bundle["text/plain"]))
