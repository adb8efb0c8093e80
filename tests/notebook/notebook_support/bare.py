"""Bare pages, without a notebook: the page of one test serves the next one, too."""

from __future__ import annotations

from playwright.sync_api import Browser, Page


class BarePages:
    """Pages of a browser, each in a context of its own; to open one costs more than many a test.

    Where a test has stopped a page's clock it stays a test's to set: such a *frozen* page goes to those that want one.
    """

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._spare: dict[bool, list[Page]] = {False: [], True: []}

    def take(self, *, frozen: bool = False) -> Page:
        """A page that shows nothing, with no routes and no cookies."""
        if self._spare[frozen]:
            return self._spare[frozen].pop()
        return self.browser.new_context().new_page()

    def give_back(self, page: Page, *, frozen: bool = False) -> None:
        """Empty a page, so that another test can have it."""
        page.mouse.move(0, 0)
        page.goto("about:blank")
        page.unroute_all()
        page.emulate_media(color_scheme="light", forced_colors="null", contrast="null")
        page.context.clear_cookies()
        self._spare[frozen].append(page)

    def close(self) -> None:
        """Close those that nobody has."""
        for page in self._spare[False] + self._spare[True]:
            page.context.close()
