"""A hook of the site: it adds pages that are made of files outside of `docs`, and translates links."""

from __future__ import annotations

import importlib
import posixpath
import re
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from commonmark import spaced
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import File, Files
from notebooks import notebook_page, scripts_page
from places import NOTEBOOKS, OUTSIDE, ROOT, SCRIPTS, target, title, translated

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_HELP = re.compile(r"<!-- help: ([\w.]+):(\w+) -->")


class RepositoryLinks(Extension):
    """Translates the links of the page that is being rendered.

    It does so after Markdown has found them, so that code stays as it is, and before MkDocs checks them, so
    that a wrong one is still an error.
    """

    page = ""
    """The name of the page within the site, such as `guide.md`."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Stand between Markdown's search for links (priority 20) and the check of MkDocs (0)."""
        md.treeprocessors.register(_Translation(md, self), "repository_links", 10)


class _Translation(Treeprocessor):
    def __init__(self, md: Markdown, links: RepositoryLinks) -> None:
        super().__init__(md)
        self._links = links

    def run(self, root: Element) -> None:
        for element in root.iter():
            key = {"a": "href", "img": "src"}.get(element.tag)
            if key is not None:
                self._translate(element, key)

    def _translate(self, element: Element, key: str) -> None:
        link = element.get(key, "")
        place, address = target(link, self._links.page), translated(link, self._links.page)
        if address is None:
            element.tag = "span"
            del element.attrib[key]
        else:
            element.set(key, address)
        # The name of a file says something in a repository; in the site the page has a title.
        if place and place.endswith(".md") and element.text == posixpath.basename(place):
            element.text = title(place)


_LINKS = RepositoryLinks()


def on_config(config: MkDocsConfig) -> None:
    """Add the translation of links to the extensions of Markdown."""
    config.markdown_extensions.append(_LINKS)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made of files outside of `docs`, and the notebooks for download."""
    for page, place in OUTSIDE.items():
        if place.endswith(".md"):
            files.append(File.generated(config, page, abs_src_path=str(ROOT / place)))
    for path in NOTEBOOKS:
        files.append(File.generated(config, f"examples/{path.stem}.md", content=notebook_page(path)))
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "examples/scripts.md", content=scripts_page(SCRIPTS)))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Note which page comes next, and put help texts in their places."""
    _LINKS.page = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # which would have this page alone
    if _HELP.search(markdown):
        page.meta["hide"] = ["toc"]  # A help text is as wide as a cell's output.
    if not page.file.src_uri.startswith("examples/"):
        markdown = spaced(markdown)  # The others are made for the site.
    return _HELP.sub(lambda found: f"``` {{ .text .help }}\n{_help(*found.groups())}\n```", markdown)


def _help(module: str, name: str) -> str:
    """Return the text that `-h` prints: of a parser that a function makes, or a constant's text."""
    found = getattr(importlib.import_module(module), name)
    return (found if isinstance(found, str) else found().format_help()).rstrip()
