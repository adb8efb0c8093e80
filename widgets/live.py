"""One output area of a cell, which is replaced in place while something goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
            if self._publisher is not None:
                self._publisher.publish(
                    data=dict(bundle), metadata=metadata, transient=self._transient, update=update
                )
            elif not update:
                print(bundle["text/plain"])
        return sum(map(len, bundle.values()))


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
