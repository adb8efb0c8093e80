"""Monitoring of a real engine: Prometheus' port, stat loggers, and a count of everything once."""

from __future__ import annotations

import os
import queue
import signal
import socket
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from process_support.engine_under_test import wait_for
from prometheus_client.parser import text_string_to_metric_families as parse

from nbengine import AsyncLLM, EngineStats, SamplingParams
from nbengine.errors import EngineStartError
from nbengine.frontend.observability.request_watch import RequestRecord
from nbengine.runtime.connection import newest
from nbengine.sampling_params import RequestOutputKind

StartAsync = Callable[..., AsyncLLM]
DELTA = RequestOutputKind.DELTA


class Notes:
    def __init__(self) -> None:
        self.stats: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
        self.newest = EngineStats()
        self.records: list[RequestRecord] = []

    def record(self, stats: EngineStats) -> None:
        self.newest = stats

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)


def fetch(address: str) -> dict[tuple[str, str], float]:
    """Return the series by name and engine, those with other labels added up."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        body = answer.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in parse(body):
        for sample in family.samples:
            key = sample.name.removeprefix("nbengine_"), sample.labels["engine"]
            found[key] = found.get(key, 0.0) + sample.value
    return found


async def run(llm: AsyncLLM, rank: int | None, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, output_kind=DELTA)
    async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, data_parallel_rank=rank):
        pass


async def test_the_port_counts_every_request_of_every_client_once_and_the_stat_logger_sees_the_same(
    start_async: StartAsync,
) -> None:
    llm = start_async(metrics_port=0, data_parallel_size=2)
    notes = Notes()
    llm.observe_requests(notes)
    address = newest(llm.connection).metrics_address
    assert urlsplit(address).hostname == "127.0.0.1"
    assert fetch(address)["generation_tokens_total", "1"] == 0
    with llm.follow_stats(notes):
        for rank, max_tokens in ((0, 4), (0, 5), (1, 6)):
            await run(llm, rank, max_tokens)
        other = AsyncLLM.attach(llm.name)
        await run(other, 1, 7)
        other.detach()
        expected = {
            ("generation_tokens_total", "0"): 9,
            ("generation_tokens_total", "1"): 13,
            ("prompt_tokens_total", "0"): 6,
            ("request_success_total", "1"): 2,
            ("time_to_first_token_seconds_count", "1"): 2,
            ("inter_token_latency_seconds_count", "0"): 7,
            ("request_prompt_tokens_sum", "0"): 6,
            ("num_requests_running", "0"): 0,
        }
        wait_for(lambda: expected.items() <= fetch(address).items(), "the figures")
        wait_for(lambda: sum(e.num_generation_tokens for e in notes.newest.engines) == 22, "the same")
        wait_for(
            lambda: [e.requests.finished for e in notes.newest.engines if e.requests] == [[0, 2, 0, 0]] * 2,
            "the ends",
            10,
        )
    stats = await llm.stats()
    assert [core.requests.generation_tokens.total for core in stats.engines] == [9, 13]
    assert [len(record.finish_reasons) for record in notes.records] == [1, 1, 1]
    assert [record.metrics.num_generation_tokens for record in notes.records] == [4, 5, 6]


async def test_a_core_that_was_started_again_counts_from_nothing(start_async: StartAsync) -> None:
    llm = start_async(metrics_port=0, data_parallel_size=2)
    address = newest(llm.connection).metrics_address
    for rank in (0, 1):
        await run(llm, rank, 5)
    key = "generation_tokens_total"
    wait_for(lambda: fetch(address)[key, "1"] == 5, "the tokens")
    (pid,) = [core.pid for core in newest(llm.connection).ready if core.rank == 1]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: fetch(address)[key, "1"] == 0, "the new count")
    await run(llm, 1, 3)
    wait_for(lambda: fetch(address)[key, "1"] == 3, "the new tokens")
    assert fetch(address)[key, "0"] == 5


def test_a_port_in_use_keeps_the_engine_from_starting_and_says_why(start_async: StartAsync) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"metrics_port={port} cannot be used at 127.0.0.1"):
            start_async(metrics_port=port)


async def test_a_stop_string_counts_as_a_stop_in_the_engine(start_async: StartAsync) -> None:
    # The engine must not come to the end by itself before it hears of the stop string.
    llm = start_async(metrics_port=0, knobs={"step_seconds": 0.01, "max_position_embeddings": 100_000})
    text = llm.get_tokenizer().decode([9])
    params = SamplingParams(max_tokens=50_000, ignore_eos=True, stop=[text], output_kind=DELTA)
    async for output in llm.generate({"prompt_token_ids": [5]}, params):
        last = output
    assert last.outputs[0].finish_reason == "stop"
    address = newest(llm.connection).metrics_address

    def ended() -> bool:
        with urllib.request.urlopen(address, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return any(
            line.startswith("nbengine_request_success_total")
            and 'finished_reason="stop"' in line
            and line.endswith(" 1.0")
            for line in lines
        )

    wait_for(ended, "the end")
