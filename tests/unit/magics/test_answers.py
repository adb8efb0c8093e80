"""The list of a notebook's answers: what a kernel keeps, and what it takes from an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbengine.magics.answers.kept import Answers, kept_answer, merged, selected
from nbengine.magics.generation.result import GenerationResult
from nbengine.outputs import CompletionOutput, RequestOutput
from tests.unit.magics.kept_answers import kept


def make_result(request_id: str, num_tokens: int) -> GenerationResult:
    result = GenerationResult(request_id, "why?")
    completion = CompletionOutput(0, "", [1] * num_tokens, finish_reason="stop")
    result.absorb(RequestOutput(request_id, None, [1], [completion], True))
    return result


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30))
def test_the_kernel_keeps_the_latest_within_bounds_and_all_that_still_run(history) -> None:
    answers = Answers(max_answers=5, max_tokens=60)
    begun = []
    for number, (num_tokens, ends) in enumerate(history):
        answer = answers.begin(str(number), make_result(str(number), num_tokens), "e")
        begun.append(answer)
        if ends:
            answers.end(answer)
    found = answers.newest_first()
    assert [answer for answer in begun[::-1] if answer.ended is None] == [a for a in found if a.ended is None]
    ended = [answer for answer in begun[:-1] if answer.ended is not None]
    left = [answer for answer in ended if answer in found]
    # What is left are the latest, and one more would not have fitted.
    assert left == ended[len(ended) - len(left) :]
    running = [answer for answer in begun if answer.ended is None or answer is begun[-1]]
    if left:
        assert len(left) + len(running) <= 5
        assert sum(a.num_tokens for a in left + running) <= 60
    if len(left) < len(ended):
        more = ended[len(ended) - len(left) - 1 :] + running
        assert len(more) > 5 or sum(a.num_tokens for a in more) > 60


def test_an_answer_that_both_have_is_the_kernels_unless_the_engine_has_more() -> None:
    answers = Answers()
    own = answers.begin("r", make_result("r", 5), "e")
    for length, running, expected in ((5, False, own), (6, True, own), (4, False, own), (6, False, None)):
        own.ended = None if running else 1.0
        theirs = kept_answer(kept("r", "x" * length), "e")
        assert merged([own], [theirs]) == [expected or theirs]


def test_a_number_counts_from_the_latest_and_an_id_is_exact() -> None:
    found = [kept_answer(kept(request_id, "x"), "e") for request_id in ("7", "2", "abc")]
    assert selected(found, "1") is found[0]
    assert selected(found, "2") is found[1]
    assert selected(found, "7") is found[0]
    assert selected(found, "abc") is found[2]
    assert selected(found, "ab") is None
    assert selected(found, "²") is None
