"""A panel beside the notebook, for what is watched while one works: it needs the extra `side`."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from nbengine.errors import NotSupportedError


class SidePanel(Protocol):
    """A panel; what is displayed inside `with panel:` is shown in it."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> Any: ...

    def close(self) -> None:
        """Close the panel, with all that it shows."""


def side_panel(title: str) -> SidePanel:
    """Open a panel at the right of the notebook.

    Raises:
        NotSupportedError: sidecar is not installed.
    """
    try:
        module = importlib.import_module("sidecar")
    except ModuleNotFoundError as error:
        if error.name != "sidecar":
            raise
        raise NotSupportedError(
            "a view beside the notebook needs sidecar: pip install 'nbengine[side]', then start JupyterLab again"
        ) from None
    return cast("SidePanel", module.Sidecar(title=title, anchor="split-right"))
