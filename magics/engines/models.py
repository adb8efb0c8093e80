"""`%engine models` lists the models that run."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.config.registered_models import registered_models
from nbengine.magics.arguments import MagicParser
from nbengine.widgets.live import publish
from nbengine.widgets.words import table


class ModelsCommand:
    """The command `models` of `%engine`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def models(self, words: Sequence[str]) -> None:
        """Show which classes run, from which GGUF files, and what computes them."""
        from nbengine.models.listing import HEADER, THROUGH_TRANSFORMERS, runnable

        description = "List the models that run: their classes in config.json, and what computes them."
        MagicParser("%engine models", description).parse_words(words)
        rows = [*runnable(registered_models()), THROUGH_TRANSFORMERS]
        lines = [line for row in rows for line in row.lines]
        publish(self._shell, *table(lines, [name.upper() for name in HEADER]))
