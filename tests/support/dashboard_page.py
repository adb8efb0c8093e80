"""A bare page with the dashboard's script and models that stand in for the notebook's."""

from __future__ import annotations

import base64
import json
from typing import Any

from dashboard_frames import Frame
from playwright.sync_api import Page, Route

from nbengine.widgets.scripts import STATIC, bundled, stylesheet

ADDRESS = "http://dashboard.test"
LIGHT = {"--jp-layout-color1": "#ffffff", "--jp-ui-font-color1": "rgba(0, 0, 0, 0.87)"}
DARK = {
    "--jp-layout-color1": "#111111",
    "--jp-layout-color2": "#1f1f1f",
    "--jp-ui-font-color1": "#e0e0e0",
    "--jp-ui-font-color2": "#a0a0a0",
    "--jp-border-color2": "#424242",
    "--jp-brand-color1": "#2196f3",
}
MODELS = """
class Model {
  constructor(traits) { this.traits = traits; this.listeners = []; this.sent = []; this.saved = 0; }
  get(name) { return this.traits[name]; }
  set(name, value) { this.traits[name] = value; this.emit(`change:${name}`); }
  save_changes() { this.saved += 1; }
  on(name, callback) { this.listeners.push([name, callback]); }
  off(name, callback) { this.listeners = this.listeners.filter(([n, c]) => n !== name || c !== callback); }
  send(content) { this.sent.push(structuredClone(content)); }
  emit(name, ...what) { for (const [n, callback] of [...this.listeners]) if (n === name) callback(...what); }
  deliver(content, buffers) {
    const views = buffers.map((text) => {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      return new DataView(bytes.buffer);
    });
    this.emit("msg:custom", content, views);
  }
}
window.models = [];
window.cleanups = [];
window.mount = async (traits) => {
  const el = document.createElement("div");
  document.getElementById("cells").append(el);
  const model = new Model({ snapshot: {}, interrupt_path: "", height: 0, view: {}, ...traits });
  models.push(model);
  const { default: widget } = await import(window.script);
  cleanups.push(widget.render({ model, el }));
  // A dashboard paints once the browser has told it that it can be seen. This observer is told after the dashboard's.
  await new Promise((told) => {
    const observer = new IntersectionObserver(() => told(observer.disconnect()));
    observer.observe(el);
  });
};
window.settled = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())));
window.failures = [];
window.addEventListener("error", (event) => failures.push(String(event.error?.stack ?? event.message)));
window.addEventListener("unhandledrejection", (event) => failures.push(String(event.reason?.stack ?? event.reason)));
"""


def page_text(config: dict[str, Any] | None) -> str:
    """The page, as a Jupyter server sends it if there is a `config`."""
    data = f'<script id="jupyter-config-data" type="application/json">{json.dumps(config)}</script>'
    style = "body{margin:0;padding:12px;background:var(--jp-layout-color1,#fff)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>test</title><style>{style}</style>"
        f"<style>{stylesheet('dashboard')}</style><body>{data if config else ''}<div id=cells></div>"
        f"<script>{MODELS}</script></body></html>"
    )


class DashboardPage:
    """A page with dashboards in it."""

    def __init__(
        self,
        page: Page,
        *,
        width: int = 1280,
        height: int = 1000,
        as_modules: bool = False,
        config: dict[str, Any] | None = None,
        theme: dict[str, str] = LIGHT,
    ) -> None:
        self.page = page
        self.posts: list[tuple[str, dict[str, str]]] = []
        self.answer_status = 204
        self.is_frozen = False
        """The page's time passes only when the test says so."""
        page.set_default_timeout(20_000)
        page.set_viewport_size({"width": width, "height": height})
        self._text = page_text(config)
        page.route(f"{ADDRESS}/**", self._serve)
        page.goto(f"{ADDRESS}/")
        self.set_theme(theme)
        script = (
            "'/static/dashboard/index.js'"
            if as_modules
            else f"URL.createObjectURL(new Blob([{json.dumps(bundled('dashboard'))}], {{type: 'text/javascript'}}))"
        )
        page.evaluate(f"window.script = {script}")

    def _serve(self, route: Route) -> None:
        path = route.request.url.removeprefix(ADDRESS).split("?")[0]
        if route.request.method == "POST":
            self.posts.append((path, route.request.headers))
            route.fulfill(status=self.answer_status)
        elif path.startswith("/static/"):
            file = STATIC / path.removeprefix("/static/")
            kind = "text/javascript" if file.suffix == ".js" else "text/css"
            route.fulfill(body=file.read_text(), content_type=kind)
        else:
            route.fulfill(body=self._text, content_type="text/html")

    def set_theme(self, theme: dict[str, str]) -> None:
        """Set the variables that JupyterLab's themes set."""
        script = "(theme) => { for (const [name, value] of Object.entries(theme)) document.body.style.setProperty(name, value); }"
        self.page.evaluate(script, theme)

    def mount(self, **traits: Any) -> None:
        """Show one more dashboard, and wait until it knows whether it can be seen."""
        self.page.evaluate("(traits) => mount(traits)", traits)

    def deliver(self, frame: Frame, model: int = 0) -> None:
        """Hand a message of the kernel to a dashboard and wait until it is painted."""
        content, buffers = frame
        texts = [base64.b64encode(buffer).decode() for buffer in buffers]
        self.page.evaluate(
            "async (text) => { const [at, ...rest] = JSON.parse(text); models[at].deliver(...rest); await settled(); }",
            json.dumps([model, content, texts]),
        )

    def settle(self) -> None:
        """Wait until what has changed is painted."""
        self.page.evaluate("() => settled()")

    def sent(self, kind: str, model: int = 0) -> list[dict[str, Any]]:
        """Messages that the script has sent to the kernel."""
        found: list[dict[str, Any]] = self.page.evaluate(
            "([kind, model]) => models[model].sent.filter((content) => content.kind === kind)", [kind, model]
        )
        return found

    def text(self, selector: str) -> str:
        """Read the text of an element."""
        return self.page.locator(selector).first.inner_text()

    def pixel(self, canvas: str, x: float, y: float) -> tuple[int, int, int, int]:
        """Red, green, blue and opacity of a canvas's pixel."""
        script = """([selector, x, y]) => {
            const canvas = document.querySelector(selector);
            const ratio = canvas.width / canvas.clientWidth;
            return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data];
        }"""
        red, green, blue, opacity = self.page.evaluate(script, [canvas, x, y])
        return red, green, blue, opacity

    def failures(self) -> list[str]:
        """Errors of the script that nobody caught."""
        found: list[str] = self.page.evaluate("failures")
        return found
