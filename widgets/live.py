"""One output area of a cell, replaced in place while something goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell

from nbengine.widgets.words import harmless

MimeBundle = Mapping[str, Any]
"""Text, or what a frontend takes as JSON."""


class LiveDisplay:
    """An output of the cell that is running when the first bundle is shown; later bundles replace it.

    Usable from any thread. The publisher is the one in force at construction, so that `%%capture` around the
    cell captures the updates, too.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        self._transient = {"display_id": uuid4().hex}
        self._lock = threading.Lock()
        self._shown = False

    @property
    def shown(self) -> bool:
        """Whether anything has been shown."""
        return self._shown

    def show(self, bundle: MimeBundle) -> int:
        """Show or replace; returns the size of what was sent, in characters."""
        with self._lock:
            self._publisher.publish(data=dict(bundle), transient=self._transient, update=self._shown)
            self._shown = True
        return sum(map(len, bundle.values()))


def in_kernel(shell: InteractiveShell) -> bool:
    """Whether outputs go to a frontend that can replace them, rather than to a terminal."""
    return getattr(shell, "kernel", None) is not None


def publish(shell: InteractiveShell, plain: str, html: str | None = None) -> None:
    """Show something that is not going to change; a terminal gets the plain text."""
    data = {"text/plain": plain}
    if html is not None:
        data["text/html"] = html
    publish_bundle(shell, data)


def publish_bundle(shell: InteractiveShell, bundle: MimeBundle) -> None:
    """`publish` for what has more forms than plain text and HTML."""
    if in_kernel(shell):
        shell.display_pub.publish(data=dict(bundle))
    else:
        print(harmless(bundle["text/plain"]))
