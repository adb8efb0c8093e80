"""Several pytests beside each other."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.side_by_side import imports_transformers, parts_of, run

FILES = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.floats(0, 100), max_size=30)


@given(FILES, st.integers(1, 5), st.sets(st.text("abcdef", min_size=1, max_size=4)))
def test_each_file_is_in_one_part_and_no_part_takes_much_longer(
    seconds: dict[str, float], number: int, together: set[str]
) -> None:
    parts = parts_of(seconds, number, together.__contains__)
    assert sorted(file for part in parts for file in part) == sorted(seconds)
    assert all(parts)
    assert len(parts) <= number
    sums = [sum(seconds[file] for file in part) for part in parts]
    # The file that made a part the longest went to the one that was the shortest.
    share = sum(seconds.values()) / number
    assert max(sums, default=0) <= share + max(seconds.values(), default=0) + 1e-6


def test_files_that_import_the_same_are_together_as_far_as_they_fit() -> None:
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 4.0, "e": 2.0}
    assert parts_of(seconds, 2, {"a", "b", "c"}.__contains__) == [["a", "b", "c"], ["d", "e"]]


def test_what_imports_transformers_is_known_by_its_source() -> None:
    assert imports_transformers("tests/unit/models/test_bert_against_transformers.py")
    assert not imports_transformers("tests/unit/test_docs.py")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_status_is_that_of_what_failed_and_all_output_is_shown(
    failing: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    programs = [f"print('part {each}'); raise SystemExit({3 * (each == failing)})" for each in range(3)]
    assert run([[sys.executable, "-c", program] for program in programs]) == 3
    # The first one's comes at once, the others' in their order.
    assert capfdbinary.readouterr().out.split(b"\n") == [b"part 0", b"part 1", b"part 2", b""]


def test_the_status_is_0_where_nothing_failed() -> None:
    assert run([[sys.executable, "-c", ""]] * 2) == 0


def test_the_status_of_a_part_is_that_of_its_pytest() -> None:
    assert run([[sys.executable, "-m", "tests.tools.one_part", "--no-such-option"]]) == 4
