"""`%dashboard`: a live view of an engine."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from nbengine.client.engines.directory import find_engine
from nbengine.errors import NBEngineError, NotSupportedError
from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.arguments import HelpRequested, split_words
from nbengine.magics.config import NBEngine
from nbengine.magics.dashboard_arguments import dashboard_parser
from nbengine.magics.help import documented
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import NotebookSession
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following.ownership import SPOKEN, WAITING, Owner
from nbengine.widgets.live import LiveDisplay, in_kernel, publish_bundle
from nbengine.widgets.side import SidePanel, side_panel
from nbengine.widgets.words import count

if TYPE_CHECKING:
    from nbengine.widgets.dashboard.glance import Glance
    from nbengine.widgets.dashboard.plain import PlainDashboard
    from nbengine.widgets.dashboard.widget import Dashboard


@magics_class
class DashboardMagics(Magics):
    """The magic `%dashboard`, which shows what an engine's scheduler and KV cache are doing."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: NotebookSession, config: NBEngine) -> None:
        super().__init__(shell)
        self._session = session
        self._config = config
        self._shown: list[Dashboard | PlainDashboard] = []
        self._panels: dict[int, SidePanel] = {}
        """The panels of views beside the notebook, by the views' `id`."""
        WAITING.add(session.ongoing.snapshot)
        SPOKEN.add(session.ongoing.words)
        session.on_engine_end.append(self._on_engine_end)
        session.on_close.append(self._leave)

    @no_var_expand
    @line_magic
    @documented(dashboard_parser)
    def dashboard(self, line: str) -> None:
        """Show what an engine does, live."""
        namespace = prompt_namespace(self.shell)
        words = [interpolate(word, namespace) for word in split_words(line, "%dashboard")]
        try:
            parsed = dashboard_parser().parse_words(words)
        except HelpRequested as request:
            print(request)
            return
        form = self._form(parsed)
        if parsed.close:
            self._close(parsed.name)
            return
        info, owner = self._engine(parsed.name)
        if form == "text":
            self._show_text(info, owner, parsed.watch)
        else:
            self._show_widget(info, owner, form, parsed)

    def _form(self, parsed: argparse.Namespace) -> str:
        """Choose the form: "auto", "widget", "plain" or "text"."""
        if parsed.plain and parsed.text:
            raise UsageError("%dashboard: --plain and --text are two forms; give one of them")
        form: str = "text" if parsed.text else "plain" if parsed.plain else self._config.dashboard
        if not in_kernel(self.shell) or parsed.watch is not None:
            form = "text"
        if form == "text" and parsed.out is not None:
            raise UsageError("%dashboard: -o NAME is for a widget, and this is text")
        if form == "text" and parsed.side:
            raise UsageError("%dashboard: --side is for a widget, and this is text")
        return form

    def _engine(self, name: str | None) -> tuple[ConnectionInfo, Owner | None]:
        """Find the engine, and this notebook's client of it if it has one."""
        engine = self._session.find(name) if name else self._session.get()
        if engine is not None:
            return engine.client.connection, Owner(engine.client)
        try:
            return find_engine(name or ""), None
        except NBEngineError as error:
            raise UsageError(f"%dashboard: {error}") from None

    def _show_widget(
        self, info: ConnectionInfo, owner: Owner | None, form: str, parsed: argparse.Namespace
    ) -> None:
        from nbengine.widgets.dashboard.plain import PlainDashboard
        from nbengine.widgets.dashboard.widget import Dashboard

        view: Dashboard | PlainDashboard
        if form == "plain":
            view = PlainDashboard(info, owner)
        else:
            view = Dashboard(info, owner, height=parsed.height, falls_back=form == "auto")
        self._forget_closed()
        self._shown.append(view)
        if parsed.side:
            self._show_aside(view)
        else:
            view._ipython_display_()
        if parsed.out is not None:
            self.shell.user_ns[parsed.out] = view

    def _show_aside(self, view: Dashboard | PlainDashboard) -> None:
        """Show a view beside the notebook."""
        try:
            panel = side_panel(f"engine {view.info.name}")
        except NotSupportedError:
            view.close()
            raise
        self._panels[id(view)] = panel
        with panel:
            view._ipython_display_()
        print(f"the dashboard of engine {view.info.name!r} is beside the notebook")

    def _forget_closed(self) -> None:
        """Forget the views that are closed, and close their panels."""
        for view in self._shown:
            if view.is_closed and (panel := self._panels.pop(id(view), None)) is not None:
                panel.close()
        self._shown = [view for view in self._shown if not view.is_closed]

    def _show_text(self, info: ConnectionInfo, owner: Owner | None, interval: float | None) -> None:
        from nbengine.widgets.dashboard.glance import Glance

        with Glance(info, owner) as glance:
            if interval is None:
                publish_bundle(self.shell, glance.bundle())
                return
            try:
                self._watch(glance, interval)
            except KeyboardInterrupt:
                # The interrupt ends the watching, and the last text stays in the cell.
                return

    def _watch(self, glance: Glance, interval: float) -> None:
        """Show the text every `interval` seconds until the engine ends, in place where that is possible."""
        live = LiveDisplay(self.shell) if in_kernel(self.shell) else None
        num_lines = 0
        while True:
            has_ended, bundle = glance.has_ended, glance.bundle()
            if live is not None:
                live.show(bundle)
            else:
                text = bundle["text/plain"]
                if num_lines and sys.stdout.isatty():
                    # Move the cursor up to where the previous text began, and erase that text.
                    print(f"\x1b[{num_lines}A\x1b[J", end="")
                print(text, flush=True)
                num_lines = text.count("\n") + 1
            if has_ended:
                return
            time.sleep(interval)

    def _close(self, name: str | None) -> None:
        closing = [view for view in self._shown if not view.is_closed and name in (None, view.info.name)]
        for view in closing:
            view.close()
        self._forget_closed()
        print(f"closed {count(len(closing), 'dashboard')}")

    def _on_engine_end(self, info: ConnectionInfo) -> None:
        if self._shown:
            from nbengine.widgets.following.feed import EngineFeed

            EngineFeed.announce_end(info, "the engine was stopped")

    def _leave(self) -> None:
        for view in self._shown:
            view.close()
        self._forget_closed()
        WAITING.remove(self._session.ongoing.snapshot)
        SPOKEN.remove(self._session.ongoing.words)
        idle: Any = sys.modules.get("nbengine.widgets.idle")
        if idle is not None:
            idle.IdleClock.forget(self.shell)
