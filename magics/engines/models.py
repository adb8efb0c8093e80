"""`%engine models` lists the models that are here, with what they need, and those worth fetching."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.arguments import MagicParser
from nbengine.magics.config import NBEngine
from nbengine.widgets.live import publish


class ModelsCommand:
    """The command `models` of `%engine`."""

    def __init__(self, shell: InteractiveShell, config: NBEngine) -> None:
        self._shell = shell
        self._config = config

    def models(self, words: Sequence[str]) -> None:
        """Show the models of the caches and of the configured directories, or the classes that run."""
        from nbengine.frontend.catalogue import classes_table, models_report, named_directories

        parser = MagicParser(
            "%engine models",
            "List the models in the caches and in the directories of `NBEngine.model_dirs`, with what each needs and "
            "whether it fits, and small ones that are worth fetching.",
        )
        parser.add_argument(
            "--classes",
            action="store_true",
            help="list what runs instead: classes in config.json, GGUF files, and what computes them",
        )
        if parser.parse_words(words).classes:
            publish(self._shell, *classes_table())
            return
        directories = [*self._config.model_dirs, *named_directories()]
        publish(self._shell, *models_report(directories).tables())
