"""A dashboard of a real engine in a real kernel: its messages while cells run, and the end of both."""

from __future__ import annotations

import time
from typing import Any

import pytest
from notebook_support.comm import VIEW, Browser, model_of
from notebook_support.kernel import DEADLINE, Cell, Kernel
from notebook_support.paced import start_line

from tests.unit.widgets.frame_decoder import unpacked

COMPARE = """
import time
from nbengine.widgets.following.feed import EngineFeed

class Notes:
    follows = True

    def __init__(self):
        self.seen = {}

    def on_state(self, state):
        (mirror,) = state.mirrors.values()
        running = sum(view.state == "running" for view in mirror.requests.values())
        blocks = mirror.blocks
        self.seen[mirror.stats.step_counter] = (blocks.num_free_blocks, blocks.num_cached_blocks, running)

notes = Notes()
feed = EngineFeed.listen(llm.connection, notes)
feed.wait_until_known(10)
told, compared = {}, []
end = time.monotonic() + 30
# The feed tells one state in 0.2 s, and fewer on a machine that does other things.
while (len(compared) < 4 or len({state for state, _ in compared}) < 2) and time.monotonic() < end:
    stats = llm.stats_blocking().engines[0]
    told[stats.step_counter] = (stats.num_free_blocks, stats.num_cached_blocks, stats.num_running_reqs)
    seen = notes.seen.copy()
    compared = [(told[step], seen[step]) for step in told.keys() & seen.keys()]
feed.leave(notes)
for request in busy:
    llm.abort_soon(request.engine_request_id)
"""


def test_a_dashboard_follows_and_controls_its_engine_in_a_kernel(kernel: Kernel) -> None:
    kernel.run(start_line(tokens_per_second=150, max_model_len=4096) + " -o llm")
    shown = kernel.run("%dashboard -o board")
    output, still = shown.outputs
    assert set(output["data"]) >= {VIEW, "text/plain"}
    assert set(still["data"]) == {"text/html", "text/plain"}
    browser = Browser(kernel, model_of(output))

    # While a cell is busy: frames come, and Abort ends its request alone.
    cell = kernel.start("%%generate --raw --max-tokens 3000 -o answer\n<img src=x onerror=alert(1)>")
    browser.say(kind="hello")
    row = browser.running_row()
    assert (row["own"], row["foreground"], row["preview"]) == (True, True, "<img src=x onerror=alert(1)>")
    browser.say(kind="abort", rank=0, number=row["number"])
    kernel.finish(cell)
    assert cell.status == "ok"
    assert kernel.value("answer.finish_reason") == "abort"
    assert len(kernel.value("answer.text")) >= 5
    browser.wait_for(lambda: bool(browser.answers))
    assert browser.answers == [{"kind": "aborted", "rank": 0, "number": row["number"], "error": None}]

    # The requests of another notebook are seen, and left alone; so are the children that nobody aborts.
    foreign = "from nbengine import AsyncLLM, SamplingParams\nother = AsyncLLM.attach(llm.name)\n"
    kernel.run(
        foreign + "kept = other.submit('x', SamplingParams(max_tokens=3000, ignore_eos=True), 'foreign')"
    )
    kernel.run("%%generate -a --raw -n 2 --max-tokens 600 -o pair\nHello")
    browser.wait_for(lambda: len([r for r in browser.decoder.requests if r["state"] == "running"]) == 3)
    children = [r for r in browser.decoder.requests if r["id"].startswith(("0_", "1_"))]
    assert [child["own"] for child in children] == [True, True]
    browser.say(kind="abort", rank=0, number=children[0]["number"])
    kernel.run("result = pair.result()")
    reasons = kernel.value("[completion.finish_reason for completion in result.outputs]")
    assert sorted(reasons) == ["abort", "length"]

    theirs = browser.row("foreign")
    assert theirs is not None
    assert theirs["own"] is False
    kernel.run(
        "import time\nother.abort_soon('foreign')\n"
        "while llm.stats_blocking().engines[0].num_running_reqs: time.sleep(0.01)"
    )

    compare(kernel, browser)
    end(kernel, browser, shown)


def test_the_hour_of_a_real_host_has_the_numbers_of_metrics(kernel: Kernel) -> None:
    kernel.run(start_line(tokens_per_second=150) + " -o llm")
    # Nobody looks at the engine while it works: the host has kept what the dashboard shows afterwards.
    kernel.run("%%generate --raw -n 3 --max-tokens 60 --set ignore_eos=true\nOnce")
    kernel.run("%%generate --raw --max-tokens 200 --set ignore_eos=true\nTwice")
    output, _ = kernel.run("%dashboard").outputs
    browser = Browser(kernel, model_of(output))
    browser.say(kind="hello")
    view = hour_with_tokens(browser, 3 * 60 + 200)
    rows = kernel.value("(await llm.metrics(last='1h')).rows()")
    (rank,) = view["ranks"]
    assert rank["rank"] == 0
    assert view["begin"] == pytest.approx(rows[0]["time"], abs=1e-3)
    assert len(rank["gap"]) * rank["seconds"] == pytest.approx(view["end"] - view["begin"])
    assert not any(rank["gap"])
    assert sum_of_tokens(rank) == pytest.approx(sum(row["generation_tokens"] for row in rows), abs=1.0)
    most = {
        "ttft_p50": 6,
        "ttft_p95": 6,
        "itl_p50": 6,
        "itl_p95": 6,
        "running": 0,
        "waiting": 0,
        "kv_usage": 4,
    }
    for name, digits in most.items():
        told = [row[name] for row in rows if row[name] is not None]
        assert max(value for value in rank[name] if value is not None) == round(max(told), digits), name
    assert max(rank["running"]) == 3
    assert sum(rank["preemptions"]) == sum(row["preemptions"] for row in rows)
    kernel.run("%engine stop")


def hour_with_tokens(browser: Browser, tokens: int) -> dict[str, Any]:
    """Ask for the last hour until it has all tokens: the engine's last report may be under way."""
    view: dict[str, Any] = {}

    def has_all() -> bool:
        nonlocal view
        if not browser.answers:
            return False
        view = browser.answers.pop()
        assert (view["kind"], view["last"], view["error"]) == ("history", "1h", None)
        if sum(sum_of_tokens(rank) for rank in view["ranks"]) > tokens - 1:
            return True
        browser.say(kind="history", last="1h")
        return False

    browser.say(kind="history", last="1h")
    browser.wait_for(has_all)
    return view


def sum_of_tokens(rank: dict[str, Any]) -> float:
    """Add up an engine core's tokens; each slice has its rate with two digits."""
    return rank["seconds"] * sum(value for value in rank["tokens_per_second"] if value is not None)


def compare(kernel: Kernel, browser: Browser) -> None:
    """Check that the block map says at each step what `stats()` says."""
    kernel.run(
        "busy = [llm.submit('word ' * 30 * (i + 1), SamplingParams(max_tokens=600)) for i in range(4)]"
    )
    kernel.run(COMPARE)
    compared = kernel.value("compared")
    assert len(compared) > 3
    assert all(told == seen for told, seen in compared)
    assert len({told for told, _ in compared}) > 1
    kernel.run("while llm.stats_blocking().engines[0].num_running_reqs: time.sleep(0.01)")
    browser.say(kind="alive")
    browser.wait_for(lambda: browser.decoder.frame["ranks"][0]["num_running"] == 0)
    free, cached = kernel.value(
        "(lambda s: (s.num_free_blocks, s.num_cached_blocks))(llm.stats_blocking().engines[0])"
    )
    words = [unpacked(word) for word in browser.decoder.ranks[0].words]
    assert sum(references == 0 for references, _, _ in words) == free
    assert sum(is_cached for _, is_cached, _ in words) == cached


def end(kernel: Kernel, browser: Browser, shown: Cell) -> None:
    """Check that the widget stays at the engine's end, that the picture beside it says so before the cell ends, and that
    no thread is left."""
    kernel.run("%engine stop")
    assert not browser.closed
    output, still = shown.outputs
    assert VIEW in output["data"]
    assert "the engine was s" in still["data"]["text/plain"]
    assert "<img" not in still["data"]["text/html"].replace('<img alt="', "")
    threads = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('nbengine-feed')]"
    end = time.monotonic() + DEADLINE
    while kernel.value(threads):
        assert time.monotonic() < end
