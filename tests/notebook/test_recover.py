"""No written text is lost when a kernel is killed; `lab/test_recover_page.py` loads a page again."""

from __future__ import annotations

from collections.abc import Callable

from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

StartKernel = Callable[[], Kernel]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_alphabet(text: str, at_least: int) -> bool:
    """Return whether a text of `at_least` characters is the beginning of what the paced engine writes."""
    return len(text) >= at_least and (ALPHABET * 200).startswith(text)


def test_a_kernel_killed_in_the_middle_of_an_answer_finds_it_after_its_restart(
    start_kernel: StartKernel,
) -> None:
    kernel = start_kernel()
    kernel.run(start_line(tokens_per_second=200))
    kernel.run("%%generate -a -n 2 --max-tokens 3000\nin the background")
    cell = kernel.start("%%generate --max-tokens 3000\nin the cell")
    kernel.wait_for_text(cell, ALPHABET)
    kernel.restart(now=True)
    # Without `%engine attach`: it joins its own engine by itself.
    shown = kernel.run("%engine recover -o newest")
    assert "attached to engine 'random-tiny'" in shown.text
    assert shown.text.index("> in the cell") < shown.text.index("> in the background")
    assert shown.text.count("ended early: the client that had asked left the engine") >= 2
    text, prompt, tokens, reason = kernel.value(
        "(newest.text, newest.prompt, newest.token_ids, newest.finish_reason)"
    )
    assert is_alphabet(text, at_least=26)
    assert (prompt, reason, len(tokens)) == ("in the cell", "abort", len(text))
    listing = kernel.run("%engine recover -l").text.splitlines()
    assert [line.split()[0] for line in listing if "in the" in line] == ["1", "2"]
    assert "new" not in "".join(listing[1:]).split()
    kernel.run("%engine recover 2 -o both")
    both = kernel.value("[answer.text for answer in both.outputs]")
    assert len(both) == 2
    assert all(is_alphabet(answer, at_least=26) for answer in both)
    # The new kernel's answers and the old one's are one list, and what goes on in the background streams on.
    kernel.run("%%generate -a -o handle --max-tokens 150\nnow")
    shown = kernel.run("%engine recover")
    assert "> now" in shown.text
    assert (ALPHABET * 6)[:150] in shown.text
    assert "150 tokens" in shown.text
    assert kernel.value("handle.result().text") == (ALPHABET * 6)[:150]
    assert "3 answers forgotten" in kernel.run("%engine recover --clear").text
    assert "no answer of this notebook is kept" in kernel.run("%engine recover").text
    kernel.run("%engine stop")
    assert "is gone with it" in kernel.run("%engine recover").text
