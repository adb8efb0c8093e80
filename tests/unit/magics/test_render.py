"""Quantities, tables and answers as they are shown."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.magics.generation.render import CARET, answer_bundle, answers_bundle, footer_of, indented_json
from nbengine.magics.generation.result import GenerationResult
from nbengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nbengine.units import size
from nbengine.widgets.words import count, seconds, table


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.0841, "84 ms"),
        (1.26, "1.3 s"),
        (125, "2 min 5 s"),
        (600, "10 min"),
        (3840, "1 h 4 min"),
        (7200, "2 h"),
    ],
)
def test_seconds_are_put_into_words(duration: float, text: str) -> None:
    assert seconds(duration) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (512, "512 B"),
        (2048, "2 KiB"),
        (98.4 * 2**20, "98.4 MiB"),
        (600 * 2**20, "600 MiB"),
        (5 << 28, "1.25 GiB"),
    ],
)
def test_sizes_are_put_into_words(number: float, text: str) -> None:
    assert size(number) == text


def test_counts_are_put_into_words() -> None:
    assert [count(1, "token"), count(2000, "token"), count(2, "process", "processes")] == [
        "1 token",
        "2,000 tokens",
        "2 processes",
    ]


def test_tables_align_in_text_and_escape_in_html() -> None:
    plain, html = table([["a", "<b>"], ["long", "c"]], ["X", "Y"])
    assert plain == "X     Y\na     <b>\nlong  c"
    assert '<th style="text-align:left">X</th>' in html
    assert "&lt;b&gt;" in html


def result_of(
    *finish_reasons: str, metrics: RequestMetrics | None = None, cached: int = 0, num_tokens: int = 3
) -> GenerationResult:
    result = GenerationResult("r", "p")
    completions = [
        CompletionOutput(index, "text", [7] * num_tokens, finish_reason=reason)
        for index, reason in enumerate(finish_reasons)
    ]
    output = RequestOutput("r", "p", [0] * 20, completions, True, None, cached, metrics or RequestMetrics())
    result.absorb(output)
    return result


def test_the_footer_says_speed_reuse_and_why_it_ended_early() -> None:
    metrics = RequestMetrics(10.0, None, 10.2, 11.2, None, 2, 3)
    assert footer_of(result_of("length", metrics=metrics, cached=16)) == (
        "stopped at the limit · 3 tokens · 2.0 tok/s · first token after 200 ms · "
        "16 of 20 prompt tokens reused · preempted 2 times"
    )
    assert footer_of(result_of("stop")) == "3 tokens · finished"
    assert footer_of(result_of("abort")) == "ended early · 3 tokens"
    assert footer_of(result_of("stop", num_tokens=0)) == ""


def test_the_footer_has_the_perplexity_where_log_probabilities_were_asked_for() -> None:
    # Three tokens of one half, one quarter and one eighth: one quarter on average.
    result = result_of("stop")
    result.outputs[0].cumulative_logprob = -6 * math.log(2)
    assert footer_of(result) == "3 tokens · perplexity 4 · finished"
    result.outputs[0].cumulative_logprob = -math.inf
    assert footer_of(result) == "3 tokens · finished"
    several = result_of("stop", "stop")
    for answer in several.outputs:
        answer.cumulative_logprob = -1.0
    assert "perplexity" not in footer_of(several)


def test_the_footer_of_several_answers_counts_all_tokens_and_those_that_hit_the_limit() -> None:
    assert footer_of(result_of("stop", "stop")) == "6 tokens · finished"
    assert footer_of(result_of("stop", "length", "length")) == "2 of 3 stopped at the limit · 9 tokens"
    assert footer_of(result_of("stop", "abort")) == "ended early · 6 tokens"


@pytest.mark.parametrize(
    ("output_format", "text", "shown"),
    [
        ("json", '{"a": ', f"{{\n  &quot;a&quot;:{CARET}</pre>"),
        ("code", "```python\nx = 1", "```python\nx = 1▍\n```"),
        ("markdown", "so **far", "so **far▍"),
        ("markdown", "```\nx = 1", "```\nx = 1▍\n```"),
        ("markdown", "```\nx = 1\n```", "```\nx = 1\n```"),
        ("markdown", "text\n\n- ", "text\n\n- "),
        ("markdown", "text\n", "text\n▍"),
    ],
)
def test_an_answer_that_is_being_written_has_a_caret_in_every_format(
    output_format: str, text: str, shown: str
) -> None:
    bundle = answer_bundle(text, output_format, complete=False)
    assert "▍" not in bundle.pop("text/plain")
    ((_, rich),) = bundle.items()
    assert rich.endswith(shown)
    assert "▍" not in "".join(answer_bundle(text, output_format).values())


@pytest.mark.parametrize("output_format", ["text", "json", "markdown", "code"])
def test_several_answers_have_a_numbered_heading_each(output_format: str) -> None:
    answers = [CompletionOutput(0, '{"a": 1}', [1]), CompletionOutput(2, "<b>", [2])]
    bundle = answers_bundle(answers, output_format, "2 tokens", complete=output_format != "json")
    plain = bundle.pop("text/plain")
    first = '{\n  "a": 1\n}' if output_format == "json" else '{"a": 1}'
    assert plain == f"1.\n{first}\n\n3.\n<b>\n\n[2 tokens]"
    ((kind, rich),) = bundle.items()
    assert kind == ("text/html" if output_format in ("text", "json") else "text/markdown")
    assert (
        rich.index("1.")
        < rich.index("a&quot;" if "html" in kind else 'a"')
        < rich.index("3.")
        < rich.index("2 tokens")
    )
    assert "<b>" not in rich or output_format == "code"


def test_one_answer_has_no_heading_and_none_is_empty() -> None:
    assert answers_bundle([CompletionOutput(0, "x", [1])], "text") == answer_bundle("x", "text")
    assert answers_bundle([], "text", "waiting") == answer_bundle("", "text", "waiting")


def test_json_that_cannot_be_read_is_shown_as_it_is_with_the_reason() -> None:
    bundle = answer_bundle('{"a": ', "json", "2 tokens")
    assert bundle["text/plain"].startswith('{"a": \n\n[2 tokens · not valid JSON: Expecting value')
    assert "not valid" not in answer_bundle('{"a": ', "json", complete=False)["text/html"]
    assert answer_bundle('```json\n{"a":1}\n```', "json")["text/plain"] == '{\n  "a": 1\n}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "maximum recursion depth"),
        ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
    ],
)
def test_json_that_python_does_not_read_is_shown_as_it_is_too(text: str, reason: str) -> None:
    bundle = answer_bundle(text, "json", "2 tokens")
    assert bundle["text/plain"].startswith(f"{text}\n\n[2 tokens · not readable JSON: ")
    assert reason in bundle["text/plain"]


def test_half_a_surrogate_pair_stays_an_escape_for_it_cannot_be_sent() -> None:
    text = '{"a": "\\ud83d", "b": "\\ud83d\\ude00\\u00e9"}'
    shown = answer_bundle(text, "json")["text/plain"]
    assert shown == '{\n  "a": "\\ud83d",\n  "b": "\N{GRINNING FACE}é"\n}'
    assert json.loads(shown) == json.loads(text)


def test_deep_nesting_does_not_grow_with_the_square_of_its_length() -> None:
    text = "[" * 5000 + "1,2" + "]" * 5000
    shown = indented_json(text)
    assert "".join(shown.split()) == text
    assert len(shown) < 300 * len(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values.filter(lambda value: isinstance(value, (dict, list))), compact=st.booleans())
def test_json_that_streams_looks_as_it_will_in_the_end(value: object, compact: bool) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)
    final = json.dumps(value, ensure_ascii=False, indent=2)
    assert indented_json(text) == final
    for end in range(len(text)):
        shown = indented_json(text[:end])
        assert final.startswith(shown.rstrip()) or shown.split()[-1] in ("{", "[", ":"), shown


def test_text_that_is_no_json_streams_as_it_is() -> None:
    for text in ("", "Sure,  here", "```json\n{"):
        assert indented_json(text) == text
