"""A notebook typesets nothing of what a model or a prompt says, unless Markdown was asked for."""

from __future__ import annotations

import html

import pytest
from answers import tree_of
from IPython.core.interactiveshell import InteractiveShell
from typesetting import MATHEMATICS, typeset

from nbengine.magics.answers.diff import AnswerDiff, Earlier
from nbengine.magics.conversations.answer import Answer
from nbengine.magics.conversations.conversation import Conversation, Exchange
from nbengine.magics.conversations.view import chat_bundle, conversation_bundle
from nbengine.magics.generation.render import answer_bundle, answers_bundle
from nbengine.magics.tokens.view import static_bundle
from nbengine.outputs import CompletionOutput
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher


def is_plain(shown: str, times: int = 1) -> bool:
    """Return whether nothing is typeset; check that the mathematics are there at least `times` times."""
    assert html.unescape(shown).count(MATHEMATICS) >= times
    return not {"$", "\\"} & set(typeset(shown))


def test_what_is_not_marked_is_typeset() -> None:
    assert typeset(f"<div>{MATHEMATICS}<br></div><pre class='mathjax_ignore'>$</pre>") == f"{MATHEMATICS}$"


@pytest.mark.parametrize("output_format", ["text", "json"])
@pytest.mark.parametrize("complete", [False, True])
def test_an_answer_is_not_typeset(output_format: str, complete: bool) -> None:
    bundle = answer_bundle(MATHEMATICS, output_format, MATHEMATICS, complete=complete)
    assert is_plain(bundle["text/html"], 2)
    several = [CompletionOutput(index, MATHEMATICS, [1]) for index in range(2)]
    bundle = answers_bundle(several, output_format, MATHEMATICS, complete=complete)
    assert is_plain(bundle["text/html"], 3)
    assert is_plain(chat_bundle(Answer(MATHEMATICS, MATHEMATICS), output_format)["text/html"], 2)


def test_in_markdown_formulas_stay_formulas() -> None:
    shown = answer_bundle(MATHEMATICS, "markdown")["text/markdown"]
    assert MATHEMATICS in typeset(shown)


def test_a_difference_is_not_typeset() -> None:
    old, new = (
        Earlier(f"{MATHEMATICS} a", f"a {MATHEMATICS}"),
        Earlier(f"{MATHEMATICS} b", f"b {MATHEMATICS}"),
    )
    assert is_plain(AnswerDiff(old, new).html, 2)


def test_a_conversation_is_not_typeset() -> None:
    talk = Conversation(MATHEMATICS, MATHEMATICS)
    talk.add(Exchange(MATHEMATICS, MATHEMATICS, MATHEMATICS))
    assert is_plain(conversation_bundle(talk)["text/html"], 4)
    assert is_plain(conversation_bundle(Conversation("$5"))["text/html"], 0)


@pytest.mark.parametrize("folded", [False, True])
def test_shaded_tokens_and_their_branches_are_not_typeset(folded: bool) -> None:
    tree, client = tree_of([(MATHEMATICS, 0.5, {"$a$": 0.3})], text=MATHEMATICS)
    branch = tree.branch(0, "$a$")
    client.write([(MATHEMATICS, 0.5, {})], "stop", text=f"$a${MATHEMATICS}")
    branch.result(60)
    branch.error = MATHEMATICS
    assert is_plain(static_bundle(tree, footer=True, folded=folded)["text/html"], 3)


CELLS = [
    "%%generate\n{text}",
    "%%generate --diff\n{text} again",
    "%%generate -n 2 --logprobs 1\n{text}",
    "%%generate -f json\n{text}",
    "%%generate --seed 1,2\n{text}",
    "%%generate --seed 1,2 --logprobs 1\n{text}",
    "%%generate --each texts\n{texts}",
    "%%generate --each texts --diff\nagain {texts}",
    "%%chat\n{text}",
    "%%chat --logprobs 1\n{text}",
    "%chat --show",
    "%engine recover 1",
    "%engine recover --list",
]


async def test_all_that_any_cell_shows_while_it_runs_and_in_the_end(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns["text"] = MATHEMATICS
    kernel_shell.user_ns["texts"] = [MATHEMATICS, "plain"]
    for number, cell in enumerate(CELLS):
        engine.words = [f"{number} ", MATHEMATICS, " more"]
        publisher(kernel_shell).messages.clear()
        transformed = kernel_shell.transform_cell(cell)
        (await kernel_shell.run_cell_async(cell, transformed_cell=transformed)).raise_error()
        pages = [data["text/html"] for _, data, _ in publisher(kernel_shell).messages]
        assert is_plain("".join(pages)), cell
