"""`%engine history` shows what an engine did over the last time, watched or not."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.arguments import MagicParser
from nbengine.magics.session import NotebookSession
from nbengine.widgets.live import publish
from nbengine.widgets.pictures.trends_view import history_bundle


class HistoryCommand:
    """The command `history` of `%engine`."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session

    def history(self, words: Sequence[str]) -> None:
        """Show a table and charts of the last time."""
        parser = MagicParser(
            "%engine history",
            "Show tokens a second, latencies, requests, KV cache and preemptions over the last time, also of times "
            "when nobody looked. In Python `engine.metrics(last=...)` gives the figures.",
        )
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument(
            "--last", default="1h", metavar="TIME", help="how far to go back: 90s, 10m, 1h (default), 1d"
        )
        parser.add_argument("--rank", type=int, metavar="R", help="show one engine core (default: each)")
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        found = engine.client.control.metrics(parsed.last, rank=parsed.rank)
        if found.spans:
            publish(self._shell, *history_bundle(engine.name, found))
        else:
            print(f"engine {engine.name!r} has told nothing in the last {parsed.last}")
