"""`%engine config` shows an engine's whole configuration, and where each value of it comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import EngineArgs
from nbengine.magics.arguments import MagicParser
from nbengine.magics.engines.arguments import present_arguments, values_of
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.runtime.connection import newest
from nbengine.units import size
from nbengine.widgets.live import publish
from nbengine.widgets.words import table

_DERIVED = {
    "dtype": "dtype",
    "device": "device",
    "max_model_len": "max_model_len",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}
"""Arguments that leave a choice to the engine, and the fields of `EngineReady` with what it has chosen."""


class ConfigCommand:
    """The command `config` of `%engine`."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session

    def config(self, words: Sequence[str]) -> None:
        """Show an engine's configuration."""
        parser = MagicParser(
            "%engine config",
            "Show an engine's whole configuration: what was given, chosen, configured and left as it is.",
        )
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument("--json", action="store_true", help="as a JSON object instead of a table")
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        entries = configuration(engine)
        if parsed.json:
            print(json.dumps({"engine": engine.name, "arguments": entries}, indent=2, default=list))
            return
        rows = [[name, _shown(name, entry["value"]), entry["source"]] for name, entry in entries.items()]
        publish(self._shell, *table(rows, ["ARGUMENT", "VALUE", "FROM"]))


def configuration(engine: AttachedEngine) -> dict[str, dict[str, Any]]:
    """Return each engine argument with its "value" and its "source".

    The source is "given", "chosen" by the engine, "configured" in the notebook (`NBEngine.model`), or
    "default". When an engine was started elsewhere, it is unknown whether a default value was asked for: it
    counts as "default".
    """
    present = present_arguments(engine)
    values, ready = values_of(newest(engine.client.connection).config), engine.client.ready
    found = {}
    for argument in fields(EngineArgs):
        name, value = argument.name, values[argument.name]
        chosen = getattr(ready, _DERIVED[name]) if name in _DERIVED else None
        if present.get(name) not in (None, "auto") and name not in engine.configured:
            source = "given"
        elif chosen is not None and value in (None, "auto"):
            value, source = chosen, "chosen"
        else:
            source = "configured" if name in engine.configured and value != argument.default else "default"
        found[name] = {"value": value, "source": source}
    return found


def _shown(name: str, value: object) -> str:
    if value in (None, {}, ()):
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value:,} ({size(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)
