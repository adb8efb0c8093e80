"""The pages that people read first are short, narrow enough to read, and lead where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbengine.models.checkpoints.files import SMOLLM2_SAMPLING

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]
MOST_README_LINES = 120
MOST_COLUMNS = 100

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_LINK_ALONE = re.compile(rf"(?:[-*] )?{_LINK.pattern}[.,;:]?")
_TERMS = (
    *("batch", "block", "block table", "bound engine", "chunk", "client", "completion", "connection file"),
    *("engine", "engine core", "frontend", "host", "incarnation", "keep-alive", "lease", "lock step"),
    *("preemption", "prefix cache", "rank", "request", "run directory", "stall", "step", "token budget"),
    *("wave", "worker"),
)


def anchors(path: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_lines_are_narrow_but_for_tables_and_links(path: Path) -> None:
    too_long = [
        f"{number}: {line}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MOST_COLUMNS and not line.startswith("|") and not _LINK_ALONE.fullmatch(line)
    ]
    assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        page = (path.parent / place).resolve() if place else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, found = set(), {ROOT / "README.md"}
    while found:
        path = found.pop()
        reached.add(path)
        links = {(path.parent / target).resolve() for target in _LINK.findall(path.read_text())}
        found |= {link for link in links if link.suffix == ".md"} - reached
    assert [str(path) for path in PAGES if path not in reached] == []


def test_the_glossary_has_the_words_in_their_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    words = [word for word, _ in rows[1:]]
    assert words == sorted(words, key=str.casefold)
    assert len(words) == len(set(words))
    assert set(_TERMS) <= set(words)


def test_the_default_model_is_said_to_babble_and_others_to_need_two_bytes_a_parameter() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    words = " ".join(page.split())
    assert "135 million parameters, and babbles" in words
    assert "135 million parameters, and babbles" in " ".join((ROOT / "README.md").read_text().split())
    temperature, top_p = SMOLLM2_SAMPLING["temperature"], SMOLLM2_SAMPLING["top_p"]
    assert f"samples at temperature {temperature} and `top_p` {top_p}" in words
    rows = re.findall(r"^\| `[\w.-]+/[\w.-]+` \| ([\d.]+) billion \| ([\d.]+) GB \|", page, re.MULTILINE)
    assert len(rows) > 5
    for parameters, memory in rows:
        assert float(memory) == pytest.approx(2 * float(parameters), abs=0.11)
