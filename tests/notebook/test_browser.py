"""What a person sees: JupyterLab in a browser, a streaming cell, and its toolbar's stop button."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import needs_chromium
from notebook_support.lab import (
    jupyter_lab,
    notebook_page,
    output_of,
    run_command,
    wait_for_prompt,
    write_notebook,
)
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

pytestmark = [
    needs_chromium,
    # Chromium and the lab's server take their time on two cores.
    pytest.mark.timeout(180),
]


def test_a_cell_streams_and_the_stop_button_ends_it(
    notebook_environment: dict[str, str], clean_afterwards: None, tmp_path: Path
) -> None:
    cells = [
        "%load_ext nbengine",
        start_line(tokens_per_second=100),
        "%%generate -o answer --max-tokens 3000\nhi",
        "answer.finish_reason, answer.text[:26]",
        "%%generate --max-tokens 26\nhi",
        "%engine stop",
    ]
    write_notebook(tmp_path / "demo.ipynb", cells)
    with (
        jupyter_lab(tmp_path, notebook_environment) as address,
        notebook_page(address, "demo.ipynb", tmp_path) as page,
    ):
        for _ in range(3):
            run_command(page, "notebook:run-cell-and-select-next")
        page.wait_for_function("() => document.body.innerText.includes('" + ALPHABET * 3 + "')")
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
