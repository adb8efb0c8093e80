"""`%%generate` with lists in it, where the cell blocks: what is asked, what is left behind, what is printed."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.compare_result import ComparisonResult
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]


def test_lists_in_flags_ask_for_all_combinations(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%%generate --temperature 0,0.7 --top-p 0.5,1 -o all\nhi\n").raise_error()
    assert capsys.readouterr().out.startswith("── temperature 0 · top_p 0.5 ──\nHello world\n[3 tokens")
    result = shell.user_ns["all"]
    assert isinstance(result, ComparisonResult)
    assert [(p.temperature, p.top_p) for _, p in engine.requests] == [(0, 0.5), (0, 1), (0.7, 0.5), (0.7, 1)]
    assert result.settings[2] == {"temperature": 0.7, "top_p": 0.5}
