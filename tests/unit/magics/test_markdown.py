"""Markdown from a model."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbengine.magics.generation.markdown import closed_markdown, fenced, harmless_markdown, unfenced

OWN_TAGS = re.compile(r"</?(?:pre|code)>")
PIECES = st.sampled_from(
    [
        "<script>",
        "</b>",
        "<!--",
        "<?x",
        "`",
        "```",
        "~~~",
        "\n",
        "$",
        "$$",
        "\\",
        "  ",
        "- ",
        "> ",
        "a",
        "1 < 2",
    ]
)


@given(st.lists(PIECES, max_size=25).map("".join))
@example("$\n```\n$\n<script>")
@example("- a\n\n  ```\n<script>")
@example("\\`<script>`")
@example("```x`y\n<script>\n```")
def test_no_html_of_the_text_is_live_wherever_it_stands(text: str) -> None:
    safe = OWN_TAGS.sub("", harmless_markdown(text))
    assert re.search(r"<[A-Za-z/!?]", safe) is None


@pytest.mark.parametrize(
    "text",
    [
        "# Title\n\n- a **b** `c`\n\n```python\nif a < 1: pass\n```\n",
        "1 < 2 and $x < y$",
        "```\nunclosed",
        "",
    ],
)
def test_text_without_tags_is_untouched(text: str) -> None:
    assert harmless_markdown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a <b>c</b>", "a &lt;b>c&lt;/b>"),
        ("use `<div>` here", "use <code>&lt;div&gt;</code> here"),
        ("`a` <b", "`a` &lt;b"),
        ("$x<y$ and x<y", "$x< y$ and x&lt;y"),
        ("$$\nx<y\n$$\nx<y", "$$\nx< y\n$$\nx&lt;y"),
        ("```c\n#include <a.h>\n$x\n```\nend", "<pre><code>#include &lt;a.h&gt;\n&#36;x</code></pre>\nend"),
        ("1. x\n   ```\n   <a>\n   b\n   ```", "1. x\n   <pre><code>&lt;a&gt;\n   b</code></pre>"),
        ("```\n<a>", "<pre><code>&lt;a&gt;</code></pre>"),
        ("```<a>", "<pre><code></code></pre>"),
    ],
)
def test_tags_become_text(text: str, expected: str) -> None:
    assert harmless_markdown(text) == expected


@given(st.text(alphabet="`~a\n ", max_size=30))
def test_a_fence_is_longer_than_any_in_the_code(code: str) -> None:
    block = fenced(code, "py")
    fence = block.split("py\n", 1)[0]
    assert fence not in code
    assert block.endswith("\n" + fence)


@pytest.mark.parametrize(
    ("text", "code", "language"),
    [
        ("```python\nx = 1\n```", "x = 1", "python"),
        ("\n```\nx\n```\n", "x", ""),
        ("```python\nx = ", "x = ", "python"),
        ("```python\nx = 1\n``", "x = 1\n``", "python"),
        ("x = 1", "x = 1", ""),
        ("```a\nx\n```\nand more", "```a\nx\n```\nand more", ""),
    ],
)
def test_code_is_taken_out_of_its_fence(text: str, code: str, language: str) -> None:
    assert unfenced(text) == (code, language)


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("plain", "plain"),
        ("```py\nx", "```py\nx\n```"),
        ("```py\nx\n```", "```py\nx\n```"),
        ("a\n~~~~\n```\n~~~", "a\n~~~~\n```\n~~~\n~~~~"),
        ("- item\n  ```\n  x", "- item\n  ```\n  x\n  ```"),
        ("```\na\n```\n```\nb", "```\na\n```\n```\nb\n```"),
        ("", ""),
    ],
)
def test_an_open_fence_is_closed_before_anything_follows(text: str, closed: str) -> None:
    assert closed_markdown(text) == closed
    assert closed_markdown(closed) == closed
