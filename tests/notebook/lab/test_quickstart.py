"""The first example in JupyterLab, in a kernel and with an engine as people have them."""

from __future__ import annotations

import pytest
from chromium import needs_chromium
from notebook_support.desk import Desk
from notebook_support.examples import NOTICE, plain, run_all_in_lab


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("with_spare_engines", "open_lab")
def test_the_quickstart_runs_and_what_it_shows_is_true(desk: Desk) -> None:
    code = run_all_in_lab(desk, "01_quickstart")
    shown = {cell.source: plain(cell) for cell in code}
    assert all(shown[name] for name in ("%engine start", "%engine status", "%engine stop"))
    generated = [cell for cell in code if cell.source.startswith("%%generate")]
    assert len(generated) == 4
    for cell in generated:
        # On a machine that does other things a cell says, too, why it waits.
        (output,) = (output for output in cell.outputs if NOTICE.sub("", output.get("text", "-")))
        assert set(output.data) == {"text/plain", "text/html"}
        assert "tokens ·" in output.data["text/plain"]
    assert "prime" in plain(generated[0])
    assert "Marseille" in plain(generated[1])
    assert "prompt tokens reused" in plain(generated[3])
    assert "processes are gone" in shown["%engine stop"]
