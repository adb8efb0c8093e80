"""The variables that a line or a prompt can name."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell


def prompt_namespace(shell: InteractiveShell) -> dict[str, object]:
    """The variables that a prompt can name: the notebook's, with `In` as it was typed."""
    namespace = dict(shell.user_ns)
    for name in ("exit", "quit"):
        if namespace.get(name) is shell.user_ns_hidden.get(name):
            namespace.pop(name, None)
    history = shell.history_manager
    if history is not None and namespace.get("In") is history.input_hist_parsed:
        namespace["In"] = history.input_hist_raw
    return namespace
