"""The families' answers are read as they were meant, however their text is cut."""

from __future__ import annotations

import pytest

from tests.unit.frontend.parsing.answers import (
    EXAMPLES,
    Example,
    deltas_of,
    found_in,
    parser_of,
    parts_of,
    wanted_of,
)


def _name(example: Example) -> str:
    return example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_an_answer_has_the_parts_that_were_meant(example: Example) -> None:
    assert found_in(example) == wanted_of(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_single_characters_bring_what_the_whole_brings(example: Example) -> None:
    whole = parts_of(deltas_of(parser_of(example), [example.text]))
    assert parts_of(deltas_of(parser_of(example), list(example.text))) == whole
