"""Measure the HTTP server: its processor time a streamed token, the way to the first token, and chats a second.

    python benchmarks/bench_server.py [--json PATH] [--streams 32] [--tokens 200] [--rounds 5]
        [--python PATH] [--model smollm2-135m] [--clients 32] [--chats 32] [--threads N]

In place of a model stands an executor that ends a step every 20 ms and writes the same token. Chats are streamed by
readers that count on plain sockets in this process; what is measured is the server's process. In turn with it
`AsyncLLM` in this process streams the same chats: the ratio of the two times says whether the server holds the engine
up. First tokens are those of one chat at a time. The other routes that stream have their turns, too. Each token is an
event of its own there; one stream of the real model is measured with tokens that are sent together, and without.

Then the server of llama-cpp-python and ours answer short chats in turn, from the same file, with each other's threads;
both run all the time. The peer gets the number of threads that is best in a first round, which does not count. --python
is the interpreter that has it (`make bench-peers` installs it); without one, ours answers alone. The peer's figure
does not depend on the number of clients, since it answers one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_parsing import answers as parsed_answers
from bench_parsing import cost_of
from common import median_ratio, parser, report
from peers import llama_server, short_chats
from peers.engines import MissingPeerError, thread_choices

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model
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
CPU_LIMIT_US, FIRST_LIMIT_MS, CHATS_LIMIT, PARSING_LIMIT_US = 60, 3, 8, 10
ANSWER_TOKENS = 16
"""The most tokens of the answer to a short chat."""
CONTEXT = 512
WARM_CHATS = 8
"""Short chats that show which number of threads is best."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a reader of one chat: seconds to its first token and to its end, tokens, and events."""

    first: float
    total: float
    tokens: int
    events: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """A route that streams: its path, the fields of a body for a number of tokens, and how an event with text looks."""

    path: str
    fields: Callable[[int], dict[str, Any]]
    with_text: re.Pattern[bytes]


CHAT = Route(
    "/v1/chat/completions",
    lambda tokens: {"messages": MESSAGES, "max_tokens": tokens, "stream_options": {"include_usage": True}},
    re.compile(rb'"content":"[^"]'),
)
OTHERS = [
    Route(
        "/v1/completions",
        lambda tokens: {
            "prompt": MESSAGES[0]["content"],
            "max_tokens": tokens,
            "stream_options": {"include_usage": True},
        },
        re.compile(rb'"text":"[^"]'),
    ),
    Route(
        "/v1/responses",
        lambda tokens: {"input": MESSAGES[0]["content"], "max_output_tokens": tokens},
        re.compile(rb'"delta":"[^"]'),
    ),
    Route(
        "/v1/messages",
        lambda tokens: {"model": "random-tiny", "messages": MESSAGES, "max_tokens": tokens},
        re.compile(rb'"text_delta"'),
    ),
]


class OverHttp:
    """Chats over HTTP, each on a connection of its own, since that is what the streams of many clients are."""

    def __init__(self, record: ServerRecord) -> None:
        self._host, _, port = record.url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._process = psutil.Process(record.pid)

    async def streams(self, streams: int, tokens: int, route: Route = CHAT) -> tuple[list[Reading], float]:
        """Stream chats side by side; return what their readers found, and the server's processor seconds a token."""
        before = self._cpu_seconds()
        read = await asyncio.gather(*[self.chat(tokens, route) for _ in range(streams)])
        spent = self._cpu_seconds() - before
        produced = sum(reading.tokens for reading in read)
        if produced != streams * tokens:
            raise SystemExit(f"{produced} tokens came from {route.path}, and not {streams * tokens}")
        return read, spent / produced

    async def chat(self, tokens: int, route: Route = CHAT) -> Reading:
        """Stream a chat of that number of tokens."""
        body = json.dumps({**route.fields(tokens), "ignore_eos": True, "stream": True}).encode()
        head = (
            f"POST {route.path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        begin = time.perf_counter()
        writer.write(head.encode() + body)
        first, events, last = 0.0, 0, b""
        async for line in reader:
            if line.startswith(b"data: {"):
                events += route.with_text.search(line) is not None
                first = first or (time.perf_counter() - begin if events else 0.0)
                if b'"usage":{' in line:
                    last = line
        writer.close()
        total = time.perf_counter() - begin
        data = json.loads(last[6:])
        usage = data.get("usage") or data["response"]["usage"]
        count = usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
        return Reading(first, total, count, events)

    def _cpu_seconds(self) -> float:
        """Return the processor time of the server so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


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
    others: dict[str, list[float]] = {route.path: [] for route in OTHERS}
    for number in range(rounds + 1):
        read, spent = await http.streams(streams, tokens)
        beside = await asyncio.gather(*[inside.chat(tokens) for _ in range(streams)])
        differences = [(await http.chat(1)).first - (await inside.chat(1)).first for _ in range(FIRST_TOKENS)]
        spent_by_others = [(await http.streams(streams, tokens, route))[1] for route in OTHERS]
        if not number:
            continue
        cpu.append(spent * 1e6)
        for route, seconds in zip(OTHERS, spent_by_others, strict=True):
            others[route.path].append(seconds * 1e6)
        events.append(sum(reading.events for reading in read) / (streams * tokens))
        firsts.append(statistics.median(differences) * 1e3)
        for own, readings in zip(totals, (read, beside), strict=True):
            own.append(max(reading.total for reading in readings))
    return [
        {
            "what": f"server's CPU a token, {streams} streams, µs",
            "median": statistics.median(cpu),
            "limit": CPU_LIMIT_US,
        },
        *(
            {"what": f"the same on {path}, µs", "median": statistics.median(costs)}
            for path, costs in others.items()
        ),
        {"what": "events a token", "median": statistics.median(events)},
        {"what": "streams over HTTP against in process, time", "median": median_ratio(*totals)},
        {
            "what": "first token over HTTP, more than in process, ms",
            "median": statistics.median(firsts),
            "limit": FIRST_LIMIT_MS,
        },
    ]


def streaming(streams: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of streamed chats, over an executor without a model."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = STEP_SECONDS
    executor = "fake_executor:FixedRateExecutor"
    llm = AsyncLLM(
        "random-tiny", distributed_executor_backend=executor, chat_template=TEMPLATE, max_model_len=1024
    )
    # Each token is an event: what an event costs is measured.
    with served(llm, output_interval=0) as record:
        return asyncio.run(measure(llm, record, streams, tokens, rounds))


@contextlib.contextmanager
def serving(llm: AsyncLLM, **settings: Any) -> Iterator[ServerRecord]:
    """Start a server for an engine; end it behind the block."""
    record = start_server(llm.connection, ServerSettings(port=0, **settings))
    try:
        yield record
    finally:
        stop_server(record, drain_timeout=0)


@contextlib.contextmanager
def served(llm: AsyncLLM, **settings: Any) -> Iterator[ServerRecord]:
    """Start a server for an engine; end both behind the block."""
    try:
        with serving(llm, **settings) as record:
            yield record
    finally:
        llm.shutdown()


def told_together(model: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return the row of one stream whose tokens are sent together, beside one that has each token by itself."""
    llm = AsyncLLM(model, max_model_len=1024)
    rates: tuple[list[float], list[float]] = ([], [])
    with served(llm) as together, serving(llm, output_interval=0) as apart:
        for number in range(rounds + 1):
            for record, own in zip((together, apart), rates, strict=True):
                read = asyncio.run(OverHttp(record).chat(tokens))
                if number:
                    own.append(read.tokens / read.total)
    return [
        {
            "what": "one stream of the real model, tokens a second",
            "median": statistics.median(rates[0]),
            "each token by itself": statistics.median(rates[1]),
            "ratio": median_ratio(*rates),
        }
    ]


@dataclass(frozen=True, slots=True)
class Side:
    """A server, with the processes that it and its engine consist of."""

    url: str
    processes: tuple[psutil.Process, ...]

    @classmethod
    def of(cls, url: str, *pids: int) -> Side:
        """Return the side of these processes and of those that they have started."""
        heads = [psutil.Process(pid) for pid in pids]
        return cls(url, tuple(one for head in heads for one in (head, *head.children(recursive=True))))

    def cpu_seconds(self) -> float:
        """Return the processor time of all of them so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(one.user + one.system for one in times)


@dataclass(frozen=True, slots=True)
class Rate:
    """One server's figures of one round."""

    chats_a_second: float
    tokens_a_chat: float
    cpu_seconds_a_chat: float


class ShortChats:
    """The same short chats for one server after another; no server is asked a question twice."""

    def __init__(self, model: str, clients: int) -> None:
        self._model = model
        self._clients = clients
        self._asked = 0

    def ask(self, chats: int, *sides: Side) -> list[Rate]:
        """Have each server answer that number of chats."""
        rates = []
        for side in sides:
            before = side.cpu_seconds()
            found = asyncio.run(
                short_chats.run(side.url, self._model, self._clients, chats, ANSWER_TOKENS, self._asked)
            )
            spent = side.cpu_seconds() - before
            rates.append(Rate(chats / found.seconds, found.tokens / chats, spent / chats))
        self._asked += chats
        return rates


def beside_llama_cpp(
    python: str | None, model: str, threads: int, clients: int, chats: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the rows of short chats; without `python` they are ours alone."""
    file = Path(resolve_model(ModelConfig(model)).weights[0]).resolve()
    asking = ShortChats(model, clients)
    figures = []
    with contextlib.ExitStack() as stack:
        llm = AsyncLLM(model, max_model_len=CONTEXT)
        record = stack.enter_context(served(llm))
        sides = [Side.of(record.url, record.pid, llm.connection.host_pid)]
        extra = {}
        if python is not None:
            best = max(thread_choices(threads), key=lambda n: _warm(python, file, n, asking))
            extra = {"threads of llama.cpp": best}
            running = llama_server.running(python, file, best, CONTEXT)
            sides.append(Side.of(*stack.enter_context(running)))
        for number in range(rounds + 1):
            rates = asking.ask(chats, *sides)
            if number:
                figures.append(rates)
    return [
        _chats_row(f"short chats a second, {clients} clients", figures, "chats_a_second")
        | ({"limit": CHATS_LIMIT, **extra} if extra else {}),
        _chats_row("processor seconds a chat", figures, "cpu_seconds_a_chat"),
        _chats_row("tokens a chat", figures, "tokens_a_chat"),
    ]


def _chats_row(what: str, figures: list[list[Rate]], name: str) -> dict[str, Any]:
    ours, *peers = ([getattr(rate, name) for rate in side] for side in zip(*figures, strict=True))
    row: dict[str, Any] = {"what": what, "median": statistics.median(ours)}
    for peer in peers:
        row |= {"llama.cpp": statistics.median(peer), "ratio": median_ratio(ours, peer)}
    return row


def _warm(python: str, file: Path, threads: int, asking: ShortChats) -> float:
    with llama_server.running(python, file, threads, CONTEXT) as (url, pid):
        return asking.ask(WARM_CHATS, Side.of(url, pid))[0].chats_a_second


def parsing(rounds: int) -> list[dict[str, Any]]:
    """Return the row of the family whose answers cost the most to read."""
    costs = {
        family: cost_of(family, chosen, text, rounds) for family, (chosen, text) in parsed_answers().items()
    }
    family = max(costs, key=lambda name: costs[name])
    what = f"CPU of the parsers a token, the dearest family ({family}), µs"
    return [{"what": what, "median": costs[family], "limit": PARSING_LIMIT_US}]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--streams", type=int, default=32)
    arguments.add_argument("--tokens", type=int, default=200)
    arguments.add_argument("--python", help="the interpreter that has llama-cpp-python and its server")
    arguments.add_argument("--model", default="smollm2-135m", help="a .gguf file, or an alias")
    arguments.add_argument("--clients", type=int, default=32)
    arguments.add_argument("--chats", type=int, default=32, help="short chats a round")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = arguments.parse_args()
    peer = "none"
    if options.python is not None:
        try:
            peer = llama_server.version(options.python)
        except MissingPeerError as error:
            arguments.error(str(error))
    rows = streaming(options.streams, options.tokens, options.rounds)
    rows += told_together(options.model, options.tokens, options.rounds)
    rows += beside_llama_cpp(
        options.python, options.model, options.threads, options.clients, options.chats, options.rounds
    )
    rows += parsing(options.rounds)
    report("server", rows, options.json, llama_cpp_python=peer)


if __name__ == "__main__":
    main()
