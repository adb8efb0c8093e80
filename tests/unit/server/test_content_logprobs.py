"""Log probabilities of content are those of the tokens that stand in it, however the answer is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.deltas import ContentDelta, MalformedCall
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.outputs import CompletionOutput, Logprob, RequestOutput
from nbengine.server.translate.answers import AnswerReader

READING = AnswerReading(AnswerFormat("qwen3", "hermes"))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b c"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": b c}}\n</tool_call>'
WORDS = st.lists(
    st.sampled_from(["a", "b c", "think", "{", '"f"', "<b", "1 < 2", "\n"]), min_size=1, max_size=6
)
TEXTS = WORDS.map("".join).map(str.strip).filter(bool)


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[str, bool]]:
    """Draw stretches of an answer, and whether each is content."""
    stretches = [(f"<think>\n{draw(TEXTS)}\n</think>\n\n", False)] if draw(st.booleans()) else []
    stretches.append((draw(TEXTS), True))
    for number in range(draw(st.integers(0, 2))):
        stretches.append((draw(st.sampled_from([CALL, f"\n{CALL}\n"])), False))
        if not number and draw(st.booleans()):
            stretches.append((BROKEN, True))
    return stretches


def outputs(texts: list[str], sizes: list[int]) -> list[RequestOutput]:
    """Make the outputs of a request from the texts of its tokens, by numbers of tokens; one without text ends them."""
    made = []
    place = 0
    while place < len(texts):
        size = sizes[len(made) % len(sizes)]
        own = texts[place : place + size]
        entries = [{place + number: Logprob(-0.5, 1, text)} for number, text in enumerate(own)]
        place += size
        is_last = place >= len(texts)
        if is_last:
            entries.append({-1: Logprob(-0.5, 1, "<end>")})
        reason = "stop" if is_last else None
        part = CompletionOutput(0, "".join(own), list(range(len(entries))), None, entries, reason)
        made.append(RequestOutput("r", None, [1], [part], is_last))
    return made


@given(
    answers(), st.lists(st.integers(1, 9), min_size=1), st.lists(st.integers(1, 40), min_size=1, max_size=3)
)
def test_each_token_of_content_comes_with_it_and_no_other(
    answer: list[tuple[str, bool]], cuts: list[int], sizes: list[int]
) -> None:
    text = "".join(stretch for stretch, _ in answer)
    texts: list[str] = []
    while (at := sum(map(len, texts))) < len(text):
        texts.append(text[at : at + cuts[len(texts) % len(cuts)]])
    is_content = [own for stretch, own in answer for _ in stretch]
    expected = []
    at = 0
    for number, token in enumerate(texts):
        # White space around calls is left out, or comes with the content behind them.
        if any(is_content[at : at + len(token)]) and token.strip():
            expected.append(number)
        at += len(token)
    reader = AnswerReader(READING.parser, divides_logprobs=True)
    parts = [part for output in outputs(texts, sizes) for part in reader.take(0, output)]
    found = []
    for part in parts:
        assert part.content_logprobs is not None
        for delta, entries in zip(part.deltas, part.content_logprobs, strict=True):
            assert not entries or isinstance(delta, ContentDelta | MalformedCall)
            found += [token for entry in entries for token in entry if texts[token].strip()]
    assert found == expected
