"""A widget's script in a page without a notebook: its model is a stub, the kernel's side is the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page

_MODEL = """
class StubModel {
  constructor(state) { this.state = state; this.listeners = {}; this.sent = []; }
  get(name) { return this.state[name]; }
  set(name, value) {
    const changed = this.state[name] !== value;
    this.state[name] = value;
    if (changed) this.fire(`change:${name}`);
  }
  save_changes() {}
  on(event, listener) { (this.listeners[event] ??= new Set()).add(listener); }
  off(event, listener) { this.listeners[event]?.delete(listener); }
  send(content) { this.sent.push(content); }
  fire(event, content) { for (const listener of [...(this.listeners[event] ?? [])]) listener(content); }
}
window.mount = async (script, state) => {
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const widget = (await import(url)).default;
  window.model = new StubModel(state);
  window.unmount = widget.render({ model: window.model, el: document.getElementById("widget") });
};
"""
LIGHT = {
    "--jp-layout-color1": "white",
    "--jp-content-font-color1": "#212121",
    "--jp-ui-font-color2": "#616161",
}
DARK = {"--jp-layout-color1": "#111", "--jp-content-font-color1": "#fff", "--jp-ui-font-color2": "#bdbdbd"}


class WidgetPage:
    """Mounts a script and carries messages between it and `receive`."""

    def __init__(self, page: Page, receive: Callable[[Any], None]) -> None:
        self.page = page
        self._receive = receive
        self._pending: list[dict[str, Any]] = []

    def mount(self, script: str, css: str, state: dict[str, Any], theme: dict[str, str] = LIGHT) -> None:
        """Show the widget on a page of its own."""
        colours = ";".join(f"{name}:{value}" for name, value in theme.items())
        self.page.set_content(
            f"<!doctype html><style>body{{{colours};background:var(--jp-layout-color1);margin:12px}}{css}</style>"
            '<div id="widget"></div>'
        )
        self.page.add_script_tag(content=_MODEL)
        self.page.evaluate("([script, state]) => window.mount(script, state)", [script, state])
        self.exchange()

    def send(self, content: dict[str, Any]) -> None:
        """A message from the kernel's side, which `exchange` delivers: JSON, as over a comm."""
        self._pending.append(json.loads(json.dumps(content)))

    def exchange(self) -> list[dict[str, Any]]:
        """Deliver messages both ways until nothing is left; returns what the script has sent."""
        sent: list[dict[str, Any]] = []
        while True:
            pending, self._pending = self._pending, []
            news = self.page.evaluate(
                "(messages) => { for (const m of messages) window.model.fire('msg:custom', m);"
                " return window.model.sent.splice(0); }",
                pending,
            )
            if not news and not self._pending:
                return sent
            for message in news:
                self._receive(message)
            sent += news
