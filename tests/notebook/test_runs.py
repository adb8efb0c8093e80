"""The next kernel finds what was asked in the one before, compares it and asks it again."""

from __future__ import annotations

from collections.abc import Callable

from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

StartKernel = Callable[[], Kernel]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def test_runs_outlive_kernels_and_are_asked_again(start_kernel: StartKernel) -> None:
    first = start_kernel()
    first.run(start_line(tokens_per_second=200))
    first.run("%%generate --max-tokens 5 -o one\nthe first question")
    first.run("%%generate --max-tokens 3,6\nthe second question")
    cell = first.start("%%generate --max-tokens 3000 --seed 5\nthe third question")
    first.wait_for_text(cell, ALPHABET)
    first.interrupt()
    first.finish(cell)
    first.run("%config NBEngine.keep_runs = False")
    first.run("%generate --max-tokens 5 a secret")
    # What has ended is written beside the cells.
    assert first.value("len(__import__('nbengine').runs(find='the third question'))") == 1
    # It is killed, and the engine goes on with another kernel.
    first.restart(now=True)
    first.run("import nbengine")
    numbers = first.value("[row['run'] for row in nbengine.runs(find='question')][-4:]")
    kept = first.value(
        "[(r['prompt'], r['text'][:6], r['finish_reason'], r['max_tokens'])"
        " for r in nbengine.runs(find='question', last=4)]"
    )
    assert kept == [
        ("the first question", "ABCDE", "length", 5),
        ("the second question", "ABC", "length", 3),
        ("the second question", "ABCDEF", "length", 6),
        ("the third question", "ABCDEF", "abort", 3000),
    ]
    assert first.value("len(nbengine.runs(find='a secret'))") == 0
    shown = first.run("%runs --last 4").text
    assert shown.index("the third question") < shown.index("the first question")
    first.run("%engine attach")
    again = first.run(f"%runs rerun {numbers[0]} --max-tokens 8 --diff -o again")
    assert first.value("again.text") == "ABCDEFGH"
    assert "{+" in again.text
    assert "max_tokens 5 → 3" in first.run(f"%runs diff {numbers[0]} {numbers[1]}").text
    # A rerun is awaited: an interrupt keeps what has been written.
    cell = first.start(f"%runs rerun {numbers[3]}")
    first.wait_for_text(cell, ALPHABET)
    first.interrupt()
    assert first.finish(cell).status == "error"
    last = first.value("[(r['prompt'], r['finish_reason'], r['seed']) for r in nbengine.runs(last=1)]")
    assert last == [("the third question", "abort", 5)]
    first.run("%engine stop")


def test_kept_prompts_outlive_kernels_and_are_those_of_all_notebooks(start_kernel: StartKernel) -> None:
    first = start_kernel()
    first.run(start_line(tokens_per_second=200))
    first.run("%%prompt sky\nsystem:\nBe {tone}.\nuser:\n>>> Why is {thing} blue?  \n")
    first.run("%generate --max-tokens 5 @sky tone=brief thing='the sky'")
    # It is killed right behind the version that it has kept, and another kernel writes at once.
    first.run("%%prompt sky\nWhy is {thing} not red?\n")
    second = start_kernel()
    second.run("%load_ext nbengine")
    first.restart(now=True)
    first.run("import nbengine")
    second.run("%%prompt sky\nWhy is {thing} green?\n")
    # Other notebooks keep prompts, too.
    versions = first.value(
        "[(p['version'], p['current'], p['runs']) for p in nbengine.prompts().rows() if p['name'] == 'sky']"
    )
    assert versions == [
        (1, False, 1),
        (2, False, 0),
        (3, True, 0),
    ]
    first.run("%load_ext nbengine\n%engine attach")
    first.run("answer = %generate --max-tokens 3 @sky:1 tone=brief --each thing=water,ice")
    kept = first.value(
        "[(r['prompt'], r['text'], r['prompt_version']) for r in nbengine.runs(prompt_name='sky')]"
    )
    assert kept == [
        (">>> Why is the sky blue?  ", "ABCDE", 1),
        (">>> Why is water blue?  ", "ABC", 1),
        (">>> Why is ice blue?  ", "ABC", 1),
    ]
    assert "Why is {thing} green?" in first.run("%prompts").text
    first.run("%engine stop")
