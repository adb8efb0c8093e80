"""Bare pages for the dashboard's script, with a model that stands in for the notebook's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import browser
from dashboard_page import DashboardPage
from notebook_support.dashboard_script import OpenPage
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """Open bare pages; no script may have failed on them."""
    pages: list[DashboardPage] = []
    contexts = []

    def open_one(**options: Any) -> DashboardPage:
        contexts.append(chromium.new_context())
        pages.append(DashboardPage(contexts[-1].new_page(), **options))
        return pages[-1]

    yield open_one
    for page in pages:
        assert page.failures() == []
    for context in contexts:
        context.close()
