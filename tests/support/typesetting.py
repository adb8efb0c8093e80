"""A notebook's MathJax goes through all of a piece of HTML but what it is told to leave; this does the
same."""

from __future__ import annotations

from html.parser import HTMLParser

MATHEMATICS = r"$5 or $10, \(x\), \[y\], $$z$$, \$, \begin{align}a\end{align}"
_VOID = {"br", "hr", "img", "wbr"}
_IGNORED = {"mathjax_ignore", "tex2jax_ignore"}


class _Typeset(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self._ignored: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            classes = set((dict(attrs).get("class") or "").split())
            self._ignored.append(classes >= _IGNORED)

    def handle_endtag(self, tag: str) -> None:
        self._ignored.pop()

    def handle_data(self, data: str) -> None:
        if not any(self._ignored):
            self.text.append(data)


def typeset(html: str) -> str:
    """The text in which MathJax, of whichever version, looks for formulas."""
    parser = _Typeset()
    parser.feed(html)
    parser.close()
    return "".join(parser.text)
