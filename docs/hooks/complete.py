"""A hook of the site: it warns of each public name, and of each member of one, that the reference lacks."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbengine

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_ANCHOR = re.compile(r'\bid="(nbengine\.[\w.]+)"')
_ELSEWHERE = {nbengine.EngineArgs}
"""The class whose fields have a page of their own, `docs/arguments.md`."""

# The builder counts what is logged under its name.
_log = logging.getLogger("mkdocs.hooks.complete")


def on_post_build(config: MkDocsConfig) -> None:
    """Compare the anchors of the reference with what there is to be found when the code runs."""
    pages = Path(config.site_dir, "reference").rglob("*.html")
    anchors = {anchor for page in pages for anchor in _ANCHOR.findall(page.read_text())}
    for name in nbengine.__all__:
        public = getattr(nbengine, name)
        # Another name of a class refers to it.
        members = _members(public) if getattr(public, "__name__", name) == name else ()
        for path in dict.fromkeys((f"nbengine.{name}", *(f"nbengine.{name}.{member}" for member in members))):
            if path not in anchors:
                _log.warning("the reference lacks %s", path)


def _members(public: Any) -> Iterator[str]:
    """Yield the public members that a class of this project, or a base of it, defines."""
    if not inspect.isclass(public) or public in _ELSEWHERE:
        return
    for base in inspect.getmro(public):
        if base.__module__.startswith("nbengine"):
            declared = {**base.__dict__, **inspect.get_annotations(base)}
            yield from (name for name in declared if not name.startswith("_"))
