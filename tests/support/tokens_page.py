"""A bare page with the script that shows tokens, and the kernel's side of it."""

from __future__ import annotations

import json
import threading
from typing import Any

from dashboard_page import ADDRESS, LIGHT, MODELS
from playwright.sync_api import Page, expect

from nbengine.magics.tokens.branching import BranchTree
from nbengine.magics.tokens.feed import TokensFeed
from nbengine.widgets.scripts import bundled, stylesheet


class TokensPage:
    """A widget on a tree: what the script sends goes to a real feed, and what that answers to the script."""

    def __init__(
        self, page: Page, *, width: int = 800, height: int = 420, theme: dict[str, str] = LIGHT
    ) -> None:
        self.page = page
        self.snapshot: dict[str, Any] = {}
        self.greetings = 0
        self.rests = 0
        self.received: list[Any] = []
        self._feed: TokensFeed | None = None
        self._lock = threading.Lock()
        self._pending: list[Any] = []
        page.set_default_timeout(10_000)
        page.set_viewport_size({"width": width, "height": height})
        colours = ";".join(f"{name}:{value}" for name, value in theme.items())
        ink = theme["--jp-ui-font-color1"]
        style = f"html{{{colours};--jp-content-font-color1:{ink}}}body{{margin:12px;background:var(--jp-layout-color1)}}"
        text = (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>test</title><style>{style}</style>"
            f"<style>{stylesheet('tokens')}</style><body><div id=cells></div><script>{MODELS}</script></body></html>"
        )
        page.route(f"{ADDRESS}/**", lambda route: route.fulfill(body=text, content_type="text/html"))
        page.goto(f"{ADDRESS}/")
        page.evaluate(
            "(script) => { window.script = URL.createObjectURL(new Blob([script], { type: 'text/javascript' })); }",
            bundled("tokens"),
        )

    def mount(self, tree: BranchTree | None, *, folded: bool = False, snapshot: Any = None) -> None:
        """Show a tree, or with None only what was saved of one: nobody answers the script."""
        if tree is not None:
            self._feed = TokensFeed(tree, self, footer=True, on_hello=self._on_hello, on_rest=self._on_rest)
            tree.listeners.append(self._feed.push)
        traits = {"active": 0, "folded": folded, "snapshot": snapshot or {}}
        self.page.evaluate("(traits) => mount(traits)", traits)
        self.exchange()

    def push(self, tree: BranchTree) -> None:
        """Let the first answers' news reach the page."""
        assert self._feed is not None
        for root in tree.roots:
            self._feed.push(root)
        self.exchange()

    def send(self, content: dict[str, Any]) -> None:
        """Keep what the feed sends, on whatever thread, as JSON, which is what a comm carries."""
        with self._lock:
            self._pending.append(json.loads(json.dumps(content)))

    def exchange(self) -> list[Any]:
        """Carry messages both ways until there are none left; returns what the script has sent."""
        sent: list[Any] = []
        while True:
            with self._lock:
                pending, self._pending = self._pending, []
            news = self.page.evaluate(
                "async (messages) => { for (const message of messages) models[0].deliver(message, []);"
                " await settled(); return models[0].sent.splice(0); }",
                pending,
            )
            if not news and not self._pending:
                self.received += sent
                return sent
            for message in news:
                if self._feed is not None:
                    self._feed.receive(message)
            sent += news

    def token(self, index: int) -> Any:
        """The element of a token."""
        return self.page.locator(".nbt-token").nth(index)

    def choose(self, token: int, alternative: int) -> None:
        """Click a token and one of its alternatives."""
        self.token(token).click()
        self.exchange()
        self.page.locator(".nbt-popover button").nth(alternative).click()
        self.exchange()

    def wait_for(self, selector: str, text: str) -> None:
        """Exchange messages until an element shows some text; the kernel's threads take their time."""
        for _ in range(500):
            self.exchange()
            if text in "\n".join(self.page.locator(selector).all_inner_texts()):
                return
        expect(self.page.locator(selector)).to_contain_text(text)

    def failures(self) -> list[str]:
        """Errors of the script that nobody caught."""
        found: list[str] = self.page.evaluate("failures")
        return found

    def _on_hello(self) -> None:
        self.greetings += 1

    def _on_rest(self) -> None:
        self.rests += 1
