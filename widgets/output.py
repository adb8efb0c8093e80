"""A cell's output that can be replaced long after the cell has ended, on any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell


class ReplaceableOutput:
    """Shows the same thing wherever it is displayed; without a shell it prints the plain text once."""

    def __init__(self) -> None:
        shell: Any = InteractiveShell.instance() if InteractiveShell.initialized() else None
        self._publisher = None if shell is None else shell.display_pub
        self._transient = {"display_id": uuid4().hex}
        self._is_shown = False

    @property
    def is_shown(self) -> bool:
        """Whether it was displayed."""
        return self._is_shown

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Display it in the cell that is running, and again in each further one."""
        self._is_shown = True
        if self._publisher is None:
            print(data["text/plain"])
        else:
            self._publisher.publish(data=dict(data), metadata=dict(metadata), transient=self._transient)

    def replace(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Put something else in its place, if it was displayed."""
        if self._is_shown and self._publisher is not None:
            self._publisher.publish(
                data=dict(data), metadata=dict(metadata or {}), transient=self._transient, update=True
            )
