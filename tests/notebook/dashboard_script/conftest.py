"""Bare pages for the dashboard's script, with a model that stands in for the notebook's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_page import DashboardPage
from notebook_support.bare import BarePages
from notebook_support.dashboard_script import OpenPage, freeze


@pytest.fixture
def open_page(bare_pages: BarePages) -> Iterator[OpenPage]:
    """Open bare pages, frozen ones if that is asked for; no script may have failed on them."""
    pages: list[DashboardPage] = []

    def open_one(*, frozen: bool = False, **options: Any) -> DashboardPage:
        pages.append(DashboardPage(bare_pages.take(frozen=frozen), **options))
        if frozen:
            freeze(pages[-1])
        return pages[-1]

    yield open_one
    failures = [page.failures() for page in pages]
    for page in pages:
        bare_pages.give_back(page.page, frozen=page.is_frozen)
    assert failures == [[]] * len(pages)
