"""Other versions of the kernel, and programs that run notebooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from notebook_support.comm import Browser, model_of, subshell_of
from notebook_support.kernel import Kernel
from notebook_support.lab import write_notebook
from notebook_support.leaks import wait_until_clean
from notebook_support.paced import start_line
from notebook_support.warm_kernels import cold

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KERNELS = Path(sys.prefix) / "beside"
"""The folder to which `make` installs the versions that are not the environment's own."""
ENVIRONMENTS_OWN = version("ipykernel")
OTHER_VERSIONS = ["6.31.0", "7.3.0"]
CELLS = [
    "%load_ext nbengine",
    start_line(tokens_per_second=500),
    "%dashboard",
    "%%generate -o answer --max-tokens 26\nhi",
    "%%generate -o shaded --max-tokens 5 --logprobs 3\n<b>hi</b>",
    "print(answer.text, answer.finish_reason)",
    "%engine stop",
]


def test_papermill_runs_a_notebook(
    notebook_environment: dict[str, str], clean_afterwards: None, tmp_path: Path
) -> None:
    write_notebook(tmp_path / "in.ipynb", CELLS)
    run(notebook_environment, "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar", directory=tmp_path)
    assert_ran(tmp_path / "out.ipynb")


def test_jupyter_execute_runs_a_notebook(
    notebook_environment: dict[str, str], clean_afterwards: None, tmp_path: Path
) -> None:
    write_notebook(tmp_path / "in.ipynb", CELLS)
    run(notebook_environment, "jupyter-execute", "--output=out", "in.ipynb", directory=tmp_path)
    assert_ran(tmp_path / "out.ipynb")


@pytest.fixture(scope="module")
def kernel_of(request: pytest.FixtureRequest, notebook_environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel of some version of ipykernel, with an engine that writes 200 tokens a second; another version's is no
    fork."""
    environment = notebook_environment
    if request.param != ENVIRONMENTS_OWN:
        environment = cold(notebook_environment)
        directory = KERNELS / f"ipykernel-{request.param}"
        if not directory.is_dir():
            pytest.skip(f"ipykernel {request.param} is not in {KERNELS} (make installs it there)")
        path = os.pathsep.join([str(directory), environment["PYTHONPATH"]])
        environment = environment | {"PYTHONPATH": path}
    kernel = Kernel(environment)
    kernel.run("import time, ipykernel")
    assert kernel.value("ipykernel.__version__") == request.param
    kernel.run(start_line(tokens_per_second=200) + " -o llm")
    yield kernel
    kernel.run("%engine stop")
    kernel.close()
    wait_until_clean(Path(notebook_environment["XDG_RUNTIME_DIR"]))


in_other_versions = pytest.mark.parametrize("kernel_of", OTHER_VERSIONS, indirect=True, scope="module")
in_every_version = pytest.mark.parametrize(
    "kernel_of", [*OTHER_VERSIONS, ENVIRONMENTS_OWN], indirect=True, scope="module"
)


@in_other_versions
def test_another_ipykernel_streams_and_keeps_what_an_interrupt_leaves(kernel_of: Kernel) -> None:
    cell = kernel_of.run("%%generate -o answer --max-tokens 260\nhi\n")
    assert len(cell.outputs) == 1
    assert cell.text.startswith(ALPHABET * 2)
    cell = kernel_of.start("%%generate -o answer --max-tokens 3000\nhi\n")
    kernel_of.wait_for_text(cell, ALPHABET)
    kernel_of.pump(lambda: len(cell.updates) > 3 or cell.ended > 0, "updates of the cell")
    assert len(cell.updates) > 3
    kernel_of.interrupt()
    kernel_of.finish(cell)
    assert [output["kind"] for output in cell.outputs] == ["display_data", "error"]
    assert cell.outputs[1]["ename"] == "KeyboardInterrupt"
    text, reason = kernel_of.value("(answer.text, answer.finish_reason)")
    assert reason == "abort"
    assert text == (ALPHABET * 200)[: len(text)]


@in_other_versions
def test_in_another_ipykernel_a_background_answer_stays_in_its_cell(kernel_of: Kernel) -> None:
    cell = kernel_of.run("%generate -a -o later --max-tokens 60 hi")
    elsewhere = kernel_of.run("result = await later")
    assert not elsewhere.outputs
    kernel_of.pump(lambda: "60 tokens" in cell.text, "the answer's foot line")
    assert cell.text.startswith(ALPHABET * 2)


@in_every_version
def test_a_stop_buttons_message_ends_the_cell_where_the_kernel_takes_it_while_it_is_busy(
    kernel_of: Kernel,
) -> None:
    """As `JPY_SESSION_NAME` says, somebody has the notebook open. Where the message waits, the script interrupts."""
    subshell_id = subshell_of(kernel_of)
    kernel_of.run("import os; os.environ['JPY_SESSION_NAME'] = 'open.ipynb'")
    kernel_of.run("%%generate --max-tokens 1\nhi")
    kernel_of.run("from nbengine.magics.extension import Extension")
    stops = "Extension.loaded[get_ipython()].session.ongoing.stops"
    browser = Browser(kernel_of, kernel_of.value(f"{stops}._widget.model_id"), subshell_id)
    cell = kernel_of.start("%%generate --raw --max-tokens 3000 -o answer\nawaited")
    kernel_of.wait_for_text(cell, ALPHABET)
    (key,) = re.findall('data-nbe-stream="(\\w+)"', cell.outputs[0]["data"]["text/html"])
    browser.say(kind="stop", stream=key)
    if subshell_id is None:
        kernel_of.interrupt()
    kernel_of.finish(cell)
    assert [output["kind"] for output in cell.outputs] == ["display_data", "error"]
    assert cell.outputs[1]["ename"] == "KeyboardInterrupt"
    assert_aborted(kernel_of, "answer")
    assert kernel_of.value(f"{stops}._widget.streams") == {}
    kernel_of.run(f"{stops}.close(); del os.environ['JPY_SESSION_NAME']")


@in_every_version
def test_a_dashboards_messages_come_while_cells_are_busy_where_the_kernel_can_take_them(
    kernel_of: Kernel,
) -> None:
    subshell_id = subshell_of(kernel_of)
    takes_at_once = subshell_id is not None
    shown = kernel_of.run("%dashboard")
    browser = Browser(kernel_of, model_of(shown.outputs[0]), subshell_id)
    browser.say(kind="hello")
    browser.wait_for(lambda: browser.num_resets == 1)

    cell = kernel_of.start("%%generate --raw --max-tokens 3000 -o answer\nawaited")
    row = browser.running_row()
    browser.say(kind="abort", rank=0, number=row["number"])
    if not takes_at_once:
        # Until the cell has ended the message waits: the script interrupts the kernel.
        tokens = row["num_output_tokens"]
        browser.wait_for(lambda: browser.running_row()["num_output_tokens"] > tokens + 40)
        assert browser.answers == []
        kernel_of.interrupt()
    kernel_of.finish(cell)
    assert cell.status == ("ok" if takes_at_once else "error")
    assert_aborted(kernel_of, "answer")
    browser.wait_for(lambda: bool(browser.answers))
    assert browser.answers[0]["error"] is None or not takes_at_once

    kernel_of.run("%generate -a --raw --max-tokens 3000 -o later hi")
    row = browser.running_row(after=row["number"])
    cell = kernel_of.start("print('busy')\nwhile not later.done: time.sleep(0.01)")
    kernel_of.wait_for_text(cell, "busy")
    browser.say(kind="abort", rank=0, number=row["number"])
    if not takes_at_once:
        kernel_of.interrupt()
    kernel_of.finish(cell)
    browser.wait_for(lambda: len(browser.answers) == 2)
    assert browser.answers[1]["error"] is None
    kernel_of.run("result = later.result(60)")
    assert_aborted(kernel_of, "result")

    # A script that is loaded again gets everything.
    browser.say(kind="hello")
    browser.wait_for(lambda: browser.num_resets == 2)
    kernel_of.run("%dashboard --close")
    assert browser.closed
    assert set(shown.outputs[0]["data"]) == {"text/html", "text/plain"}


@in_every_version
def test_tokens_comparisons_conversations_and_what_is_shown_again(kernel_of: Kernel) -> None:
    shown = kernel_of.run("%%generate --raw --logprobs 3 --max-tokens 6 -o shaded\nhi")
    subshell_id = subshell_of(kernel_of)
    browser = Browser(kernel_of, model_of(shown.outputs[0]), subshell_id)
    browser.say(kind="hello")
    browser.wait_for(lambda: bool(browser.answers))
    (node,) = browser.answers[0]["nodes"]
    assert [token[1] for token in node["tokens"]] == [[["", letter]] for letter in "ABCDEF"]
    alternatives = node["tokens"][3][5]
    assert [alternative[1] for alternative in alternatives] == ["D", "E", "F"]
    waiting = "while len(shaded.tree) < 2 or not shaded.tree[1].done: time.sleep(0.01)"
    cell = kernel_of.start(waiting if subshell_id is not None else "time.sleep(0.2)")
    browser.say(kind="branch", node=0, position=3, token=alternatives[1][0])
    assert kernel_of.finish(cell).status == "ok"
    browser.wait_for(lambda: any(said.get("state") == "done" for said in browser.answers[1:]))
    assert kernel_of.value("shaded.tree[1].text") == "ABCEAB"
    assert {"kind": "select", "node": 1} in browser.answers

    grid = kernel_of.run("%%generate --seed 1,2 --max-tokens 3,5 -o grid\nhi")
    assert len(grid.outputs) == 1
    assert kernel_of.value("[answer.text for answer in grid]") == ["ABC", "ABC", "ABCDE", "ABCDE"]
    for message in ("first", "second"):
        kernel_of.run(f"%%chat --max-tokens 4 -o talk\n{message}")
    assert kernel_of.value("[turn.user for turn in talk.turns]") == ["first", "second"]
    again = kernel_of.run("%engine recover").text
    assert "> second" in again
    assert "ABCD" in again


def assert_aborted(kernel: Kernel, name: str) -> None:
    text, reason = kernel.value(f"({name}.text, {name}.finish_reason)")
    assert reason == "abort"
    assert len(text) > 5
    assert (ALPHABET * 200).startswith(text)


def run(environment: dict[str, str], program: str, *arguments: str, directory: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=directory,
        env=cold(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_ran(path: Path) -> None:
    _, _, dashboard, answer, shaded, printed, _ = [
        cell.outputs for cell in nbformat.read(path, as_version=4).cells
    ]
    assert len(answer) == 1
    assert answer[0].data["text/plain"].startswith(ALPHABET)
    assert "26 tokens" in answer[0].data["text/plain"]
    assert printed[0].text == f"{ALPHABET} length\n"
    # Nothing needs a widget any more.
    assert [set(output.data) for output in (*dashboard, *shaded)] == [{"text/html", "text/plain"}] * 3
    board, still = dashboard
    assert "ended" in board.data["text/html"]
    assert "ended" in board.data["text/plain"]
    # The picture stands in the widget's place already.
    assert still.data == {"text/html": "<div hidden></div>", "text/plain": ""}
    assert shaded[0].data["text/html"].count("<span title=") == 5
    assert shaded[0].data["text/plain"].startswith("ABCDE\n\n[stopped at the limit")
