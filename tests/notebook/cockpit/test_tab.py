"""Two dashboards in a tab that is closed; the folder's last file, since the next test would wait for a new page."""

from __future__ import annotations

import time

from jupyter_client.blocking import BlockingKernelClient
from notebook_support.cockpit import ENGINE, MARKS, WHOLE, OpenCockpit
from notebook_support.kernel import DEADLINE
from notebook_support.lab import WIDE, set_width
from notebook_support.paced import start_line
from playwright.sync_api import expect

from nbengine.client.engines.processes import wait_until

HASTE = """
import nbengine.widgets.dashboard.widget as module
assert "ALIVE_MS = 5000;" in module.Dashboard._esm
module.Dashboard._esm = module.Dashboard._esm.replace("ALIVE_MS = 5000;", "ALIVE_MS = 200;")
module.SILENCE = module.HIDDEN_SILENCE = 2.0
"""

pytestmark = MARKS


def test_two_dashboards_of_two_engines_and_a_tab_that_is_closed(open_cockpit: OpenCockpit) -> None:
    cockpit = open_cockpit()
    cockpit.run(start_line(name="second", tokens_per_second=150))
    # Signs of life come more often, so that their end is known sooner.
    cockpit.run(HASTE)
    cells = {}
    for name in (ENGINE, "second"):
        cells[name] = cockpit.start(f"%dashboard {name} -o {name}_board")
        cockpit.finish(cells[name])
    first, second = (cockpit.board(cell) for cell in cells.values())
    set_width(cockpit.page, WIDE, 2 * WHOLE)
    first.look()
    expect(first.state).to_have_text("idle")
    steps = first.num_steps
    cockpit.run("%%generate --raw --engine second --max-tokens 40\nWrite")
    second.expect_state(0, "length")
    assert second.wait_for_output(second.row(0), 40) == 40
    assert first.num_steps == steps
    assert "closed 1 dashboard" in cockpit.run("%dashboard second --close")
    expect(cockpit.output(cells["second"]).locator(".nbe-dash")).to_have_count(0)
    expect(cockpit.output(cells["second"]).locator("img").first).to_be_visible()
    cockpit.run(f"%%generate -a -o last --raw --engine {ENGINE} --max-tokens 3000\nWrite")
    first.wait_for_output(first.running(), 10)
    cockpit.run("last.cancel()")

    connection = cockpit.run(
        "from ipykernel.connect import get_connection_file\nprint(get_connection_file())"
    )
    client = BlockingKernelClient(connection_file=connection.strip())
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=DEADLINE)
    try:
        # A browser that gets no time gives no sign of life for a moment.
        assert wait_until(lambda: follows(client), DEADLINE)
        cockpit.page.close()
        end = time.monotonic() + DEADLINE
        while follows(client):
            assert time.monotonic() < end
        execute(client, "%engine stop second")
    finally:
        client.stop_channels()


def execute(client: BlockingKernelClient, code: str, expression: str = "None") -> str:
    """Run code in a kernel; returns how an expression is written afterwards."""
    reply = client.execute(code, user_expressions={"it": expression}, reply=True, timeout=DEADLINE)
    text: str = reply["content"]["user_expressions"]["it"]["data"]["text/plain"]
    return text


def follows(client: BlockingKernelClient) -> bool:
    """Return whether a kernel still follows the engine for its dashboard."""
    return {"True": True, "False": False}[execute(client, "", f"{ENGINE}_board.follows")]
