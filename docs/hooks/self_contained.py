"""A hook of the site: it warns of everything that a page would load from elsewhere."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
_LINKED_ONLY = {"a", "area", "base"}
"""Elements whose address is followed when somebody clicks."""
_NAMED_ONLY = {"alternate", "author", "canonical", "license", "next", "prev"}
"""The kinds of `link` that name another page, and load nothing."""
_LOADING = ("src", "srcset", "href", "xlink:href", "data", "poster")

# The builder counts what is logged under its name.
_log = logging.getLogger("mkdocs.hooks.self_contained")


def loaded_from_elsewhere(text: str) -> list[str]:
    """List the addresses on other machines from which a page or a style sheet would load something."""
    page = _Page()
    page.feed(text)
    page.close()
    return page.found + _IN_STYLE.findall(text)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in _LINKED_ONLY or (tag == "link" and values.get("rel") in _NAMED_ONLY):
            return
        self.found += [values[name] for name in _LOADING if _ELSEWHERE.match(values.get(name, ""))]


def on_post_build(config: MkDocsConfig) -> None:
    """Look through the site."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for address in loaded_from_elsewhere(path.read_text()):
                _log.warning("%s loads %s", path.relative_to(config.site_dir), address)
