"""Say where the pages of the site are in the repository, and translate links from the one to the other.

Pages link to each other by their places in the repository, where a code host follows them, too:
`../examples/01_quickstart.ipynb`, `../CONTRIBUTING.md`. In the site these are pages with other addresses.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SCRIPTS = sorted((ROOT / "examples/scripts").glob("*.py"))
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples/scripts.md": "examples/scripts",
    **{f"examples/{path.stem}.md": f"examples/{path.name}" for path in NOTEBOOKS},
}
"""The pages that are made of something outside of `docs`, each with its place in the repository."""
_PAGES = {place: page for page, place in OUTSIDE.items()}


def target(link: str, page: str) -> str | None:
    """Return the place in the repository that a link of a page leads to, None if it leads elsewhere."""
    scheme, host, path, _, _ = urlsplit(link)
    if scheme or host or not path or path.startswith("/"):
        return None
    place = OUTSIDE.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), path))


def translated(link: str, page: str) -> str | None:
    """Translate a link of a page, from places in the repository to pages of the site.

    What is in the repository and is no page, such as a source file, has no address in the site: None stands
    for a link to it. A link that leads nowhere stays as it is, and MkDocs reports it.
    """
    place = target(link, page)
    if place is None:
        return link
    if place in _PAGES:
        inside = _PAGES[place]
    elif place.startswith("docs/"):
        inside = place.removeprefix("docs/")
    else:
        return None if (ROOT / place).exists() else link
    _, _, _, query, anchor = urlsplit(link)
    return urlunsplit(("", "", posixpath.relpath(inside, posixpath.dirname(page) or "."), query, anchor))


def title(place: str) -> str:
    """Return a page's first heading."""
    with (ROOT / place).open() as lines:
        return next(line for line in lines if line.startswith("# ")).removeprefix("# ").strip()
