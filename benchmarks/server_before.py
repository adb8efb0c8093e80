"""Measure what the server spends on a streamed token beside the server of another checkout, for one engine, in turn.

    python benchmarks/server_before.py --before DIR [--json PATH] [--routes chat/completions …]
        [--streams 32] [--tokens 200] [--rounds 5]

The engine and its readers are those of `bench_server.py`. DIR has the other checkout; its server must understand
this engine. Both run all the time, and the ratio is the median of those of neighbouring rounds: it says what a change
is worth on a machine where each figure alone drifts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_server import CHAT, OTHERS, STEP_SECONDS, TEMPLATE, OverHttp
from common import median_ratio, parser, report

from nbengine import AsyncLLM
from nbengine.server.launch import start_server, stop_server
from nbengine.server.settings import ServerSettings

ROUTES = {route.path.removeprefix("/v1/"): route for route in (CHAT, *OTHERS)}


@contextlib.contextmanager
def served_from(llm: AsyncLLM, checkout: Path) -> Iterator[OverHttp]:
    """Start the server of a checkout for an engine; end it behind the block."""
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = str(checkout.resolve())
    try:
        record = start_server(llm.connection, ServerSettings(port=0, output_interval=0))
    finally:
        os.environ["PYTHONPATH"] = before
    try:
        yield OverHttp(record)
    finally:
        stop_server(record, drain_timeout=0)


async def measure(
    ours: OverHttp, before: OverHttp, names: list[str], streams: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Have both answer in turn; the first round is not counted."""
    costs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    for number in range(rounds + 1):
        for name, found in costs.items():
            for side, own in zip((ours, before), found, strict=True):
                _, spent = await side.streams(streams, tokens, ROUTES[name])
                if number:
                    own.append(spent * 1e6)
    return [
        {
            "server's CPU a token, µs": f"/v1/{name}",
            "median": statistics.median(own),
            "before": statistics.median(other),
            "ratio": median_ratio(own, other),
        }
        for name, (own, other) in costs.items()
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--before", type=Path, required=True, help="the other checkout")
    arguments.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    arguments.add_argument("--streams", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=200)
    options = arguments.parse_args()
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = STEP_SECONDS
    llm = AsyncLLM(
        "random-tiny",
        distributed_executor_backend="fake_executor:FixedRateExecutor",
        chat_template=TEMPLATE,
        max_model_len=1024,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(llm.shutdown)
        ours, before = (
            stack.enter_context(served_from(llm, checkout)) for checkout in (here.parent, options.before)
        )
        rows = asyncio.run(
            measure(ours, before, options.routes, options.streams, options.tokens, options.rounds)
        )
    report("server_before", rows, options.json)


if __name__ == "__main__":
    main()
