"""A person who opens JupyterLab in a browser sees a cell stream, and stops it with the toolbar's button."""

from __future__ import annotations

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import POLL_MS, output_of, run_command, wait_for_prompt
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

pytestmark = [
    needs_chromium,
    # Chromium and the lab's server take their time on two cores.
    pytest.mark.timeout(180),
]


def test_a_cell_streams_and_the_stop_button_ends_it(open_lab: OpenLab) -> None:
    cells = [
        "%load_ext nbengine",
        start_line(tokens_per_second=100),
        "%%generate -o answer --max-tokens 3000\nhi",
        "answer.finish_reason, answer.text[:26]",
        "%%generate --max-tokens 26\nhi",
        "%engine stop",
    ]
    page = open_lab("demo.ipynb", cells, width=1100)
    for _ in range(3):
        run_command(page, "notebook:run-cell-and-select-next")
    page.wait_for_function("() => document.body.innerText.includes('" + ALPHABET * 3 + "')", polling=POLL_MS)
    assert "✓ ready" in output_of(page, 1)
    page.click('[data-jp-item-name="interrupt"]')
    wait_for_prompt(page, 2)
    stopped = output_of(page, 2)
    assert stopped.startswith(ALPHABET * 3)
    assert "interrupted" in stopped
    for _ in range(3):
        run_command(page, "notebook:run-cell-and-select-next")
    wait_for_prompt(page, 5)
    assert output_of(page, 3).strip().endswith(f"('abort', '{ALPHABET}')")
    assert output_of(page, 4).startswith(ALPHABET)
    assert "26 tokens" in output_of(page, 4)
    assert "2 processes are gone" in output_of(page, 5)
