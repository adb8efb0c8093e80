"""Measure what the HTTP server costs: processor time a streamed token, and the way to the first token.

    python benchmarks/bench_server.py [--json PATH] [--streams 32] [--tokens 200] [--rounds 5]

In place of a model stands an executor that ends a step every 20 ms and writes the same token. Chats are streamed by
readers that count on plain sockets in this process; what is measured is the server's process. In turn with it
`AsyncLLM` in this process streams the same chats: the ratio of the two times says whether the server holds the engine
up. First tokens are those of one chat at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import median_ratio, parser, report

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams
from nbengine.server.launch import start_server, stop_server
from nbengine.server.records import ServerRecord
from nbengine.server.settings import ServerSettings

STEP_SECONDS = "0.02"
FIRST_TOKENS = 50
"""Chats a round whose first token is timed."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "How does a kettle work, and why does it sing before the water boils?"}
]
CPU_LIMIT_US, FIRST_LIMIT_MS = 60, 3


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a reader of one chat: seconds to its first token and to its end, tokens, and events."""

    first: float
    total: float
    tokens: int
    events: int = 0


class OverHttp:
    """Chats over HTTP, each on a connection of its own, since that is what the streams of many clients are."""

    def __init__(self, record: ServerRecord) -> None:
        self._host, _, port = record.url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._process = psutil.Process(record.pid)

    def cpu_seconds(self) -> float:
        """Return the processor time of the server so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def chat(self, tokens: int) -> Reading:
        """Stream a chat of that number of tokens."""
        fields: dict[str, Any] = {
            "messages": MESSAGES,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        begin = time.perf_counter()
        writer.write(head.encode() + body)
        first, events, last = 0.0, 0, b""
        async for line in reader:
            if line.startswith(b"data: {"):
                events += b'"content":"' in line and b'"content":""' not in line
                first = first or (time.perf_counter() - begin if events else 0.0)
                last = line
        writer.close()
        return Reading(
            first, time.perf_counter() - begin, json.loads(last[6:])["usage"]["completion_tokens"], events
        )


class InProcess:
    """The same chats from `AsyncLLM`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def chat(self, tokens: int) -> Reading:
        """Stream a chat of that number of tokens."""
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        first, count = 0.0, 0
        async for output in self._llm.generate(self._llm.render_chat(MESSAGES), params):
            first = first or time.perf_counter() - begin
            count += len(output.outputs[0].token_ids)
        return Reading(first, time.perf_counter() - begin, count)


async def measure(
    llm: AsyncLLM, record: ServerRecord, streams: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure both sides in turn; the first round is not counted."""
    http, inside = OverHttp(record), InProcess(llm)
    cpu, events, firsts, totals = [], [], [], ([], [])
    for number in range(rounds + 1):
        before = http.cpu_seconds()
        read = await asyncio.gather(*[http.chat(tokens) for _ in range(streams)])
        spent = http.cpu_seconds() - before
        beside = await asyncio.gather(*[inside.chat(tokens) for _ in range(streams)])
        differences = [(await http.chat(1)).first - (await inside.chat(1)).first for _ in range(FIRST_TOKENS)]
        if not number:
            continue
        produced = sum(reading.tokens for reading in read)
        if produced != streams * tokens:
            raise SystemExit(f"{produced} tokens came, and not {streams * tokens}")
        cpu.append(spent / produced * 1e6)
        events.append(sum(reading.events for reading in read) / produced)
        firsts.append(statistics.median(differences) * 1e3)
        for own, readings in zip(totals, (read, beside), strict=True):
            own.append(max(reading.total for reading in readings))
    return [
        {
            "what": f"server's CPU a token, {streams} streams, µs",
            "median": statistics.median(cpu),
            "limit": CPU_LIMIT_US,
        },
        {"what": "events a token", "median": statistics.median(events)},
        {"what": "streams over HTTP against in process, time", "median": median_ratio(*totals)},
        {
            "what": "first token over HTTP, more than in process, ms",
            "median": statistics.median(firsts),
            "limit": FIRST_LIMIT_MS,
        },
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--streams", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=200)
    options = arguments.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = STEP_SECONDS
    executor = "fake_executor:FixedRateExecutor"
    llm = AsyncLLM(
        "random-tiny", distributed_executor_backend=executor, chat_template=TEMPLATE, max_model_len=1024
    )
    try:
        record = start_server(llm.connection, ServerSettings(port=0))
        try:
            rows = asyncio.run(measure(llm, record, options.streams, options.tokens, options.rounds))
        finally:
            stop_server(record, drain_timeout=0)
    finally:
        llm.shutdown()
    report("server", rows, options.json)


if __name__ == "__main__":
    main()
