"""`%engine fit` tells whether a model fits on this machine, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.control_messages import Progress
from nbengine.magics.config import NBEngine
from nbengine.magics.engines.arguments import parse_start
from nbengine.widgets.live import LiveDisplay, in_kernel, publish


class FitCommand:
    """The command `fit` of `%engine`."""

    def __init__(self, shell: InteractiveShell, config: NBEngine) -> None:
        self._shell = shell
        self._config = config

    def fit(self, words: Sequence[str]) -> None:
        """Show the report, and bind it to a variable if the line asks for that."""
        from nbengine.frontend.fit import fit

        options = parse_start(words, "fit")
        arguments = {"model": self._config.model, **options.arguments}
        if not in_kernel(self._shell):
            report = fit(**arguments)
            publish(self._shell, *report.tables())
        else:
            live = LiveDisplay(self._shell)

            def show(progress: Progress) -> None:
                share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
                live.show({"text/plain": f"{progress.detail}{share}"})

            report = fit(**arguments, progress=show)
            plain, html = report.tables()
            live.show({"text/plain": plain, "text/html": html})
        if options.out is not None:
            self._shell.user_ns[options.out] = report
