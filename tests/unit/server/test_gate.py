"""The gate before the routes: keys, hosts, sizes, states and headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi import call
from fake_service_engine import FakeServer

from nbengine.metrics.stats import EngineStats, SchedulerStats

KEY = "a-secret-key"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def server(**settings: Any) -> FakeServer:
    return await FakeServer(**settings).start()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
        {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    ],
)
async def test_a_caller_with_the_key_is_answered(headers: dict[str, str]) -> None:
    fake = await server(api_keys=("another-key", KEY))
    assert (await call(fake.app, PATH, CHAT, headers=headers)).status == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": KEY[:-1]}]
)
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/v1/messages", "/nowhere"])
async def test_a_caller_without_the_key_learns_nothing(headers: dict[str, str], path: str) -> None:
    fake = await server(api_keys=(KEY,))
    reply = await call(fake.app, path, CHAT, headers=headers)
    assert reply.status == 401
    assert KEY not in reply.body.decode()
    assert not fake.engine.asked


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
async def test_watchers_need_no_key(path: str) -> None:
    fake = await server(api_keys=(KEY,))
    assert (await call(fake.app, path)).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:80", "localhost:1", "mine.test:8000"])
async def test_a_server_without_a_key_answers_under_this_machines_names(host: str) -> None:
    fake = await server(allowed_hosts=("mine.test",))
    assert (await call(fake.app, PATH, CHAT, headers={"host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8000", "127.0.0.1.evil.test", ""])
async def test_a_page_of_another_site_cannot_use_it(host: str) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, CHAT, headers={"host": host})
    assert (reply.status, reply.error["code"]) == (403, "unknown_host")
    assert not fake.engine.asked


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_a_foreign_page_can_send_is_refused(kind: str) -> None:
    fake = await server()
    reply = await call(fake.app, PATH, CHAT, headers={"content-type": kind})
    assert reply.status == 415
    assert not fake.engine.asked


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused_and_not_kept(declared: bool) -> None:
    fake = await server(max_body_bytes=2000)
    parts = [b'{"prompt": "', *[b"x" * 1000] * 20, b'"}']
    headers = {"content-length": str(sum(map(len, parts)))} if declared else {}
    reply = await call(fake.app, "/v1/completions", parts, headers=headers)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert reply.headers["connection"] == "close"
    assert not fake.engine.asked
    assert fake.service.num_body_bytes == 0


async def test_a_body_of_the_largest_size_in_many_parts_is_taken() -> None:
    body = json.dumps({"prompt": "x" * 900}).encode()
    body += b" " * (1024 - len(body))
    fake = await server(max_body_bytes=1024)
    reply = await call(fake.app, "/v1/completions", [body[at : at + 1] for at in range(len(body))])
    assert reply.status == 200


async def test_a_body_that_stops_is_given_up() -> None:
    fake = await server(read_timeout=0.01)
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not started:
            started.append(True)
            return {"type": "http.request", "body": b"{", "more_body": True}
        await never.wait()
        raise AssertionError

    started: list[bool] = []
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    await fake.app(scope, receive, send)
    assert sent[0]["status"] == 408


async def test_bodies_together_have_a_limit() -> None:
    fake = await server(max_total_body_bytes=1024)
    fake.service.num_body_bytes = 1000
    reply = await call(fake.app, "/v1/completions", {"prompt": "x" * 100})
    assert (reply.status, reply.error["code"]) == (503, "too_many_bodies")
    assert "retry-after" in reply.headers


async def test_bodies_that_are_still_coming_count_among_all() -> None:
    fake = await server(max_total_body_bytes=2000)
    more = asyncio.Event()

    async def half_a_body() -> dict[str, Any]:
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": b'{"prompt": "' + b"x" * 1500, "more_body": True}
        await more.wait()
        return {"type": "http.disconnect"}

    async def ignore(message: dict[str, Any]) -> None:
        """Take what is sent to one who has left."""

    sent: list[bool] = []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    coming = asyncio.create_task(fake.app(scope, half_a_body, ignore))
    while not fake.service.num_body_bytes:
        await asyncio.sleep(0)
    reply = await call(fake.app, "/v1/completions", {"prompt": "x" * 600})
    assert (reply.status, reply.error["code"]) == (503, "too_many_bodies")
    more.set()
    await coming
    assert fake.service.num_body_bytes == 0
    assert (await call(fake.app, "/v1/completions", {"prompt": "x" * 600})).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a", "zzz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 500_000,
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"prompt": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}",
        b'{"prompt": "a"} trailing',
    ],
)
async def test_whatever_is_no_request_gets_400_and_others_go_on(body: bytes) -> None:
    fake = await server()
    reply = await call(fake.app, "/v1/completions", body)
    assert reply.status == 400, reply.body[:300]
    assert reply.error["type"] == "invalid_request_error"
    assert not fake.engine.asked
    assert (await call(fake.app, "/v1/completions", {"prompt": "a"})).status == 200


async def test_a_path_or_a_method_that_is_not_there_gets_an_error_object() -> None:
    fake = await server()
    for path, method, status in (
        ("/v1/nothing", "GET", 404),
        (PATH, "GET", 405),
        ("/v1/models", "POST", 405),
    ):
        reply = await call(fake.app, path, CHAT if method == "POST" else None, method=method)
        assert reply.status == status
        assert reply.error["type"] == "invalid_request_error"


async def test_errors_of_anthropics_route_have_its_form() -> None:
    fake = await server(api_keys=(KEY,))
    reply = await call(fake.app, "/v1/messages", CHAT)
    assert reply.json()["type"] == "error"
    assert reply.error["type"] == "authentication_error"


async def test_a_request_keeps_its_id() -> None:
    fake = await server()
    reply = await call(fake.app, PATH, CHAT, headers={"x-request-id": "my-id.1"})
    assert reply.headers["x-request-id"] == "my-id.1"
    assert reply.json()["id"] == "chatcmpl-my-id.1"
    for wrong in ("a b", "x" * 200, "<script>"):
        reply = await call(fake.app, PATH, CHAT, headers={"x-request-id": wrong})
        assert reply.headers["x-request-id"] != wrong


async def test_the_load_comes_in_the_format_that_is_asked_for() -> None:
    fake = await server()
    engines = [
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, num_blocks=10, num_free_blocks=5),
        SchedulerStats(engine_index=1, num_running_reqs=1, num_blocks=10, num_free_blocks=10),
    ]
    fake.feed.messages.append(EngineStats(engines))
    fake.service.look()
    text = await call(fake.app, "/health", headers={"endpoint-load-metrics-format": "TEXT"})
    assert text.headers["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=3, "
        "named_metrics.num_requests_waiting=1"
    )
    as_json = await call(fake.app, PATH, CHAT, headers={"endpoint-load-metrics-format": "json"})
    kind, _, value = as_json.headers["endpoint-load-metrics"].partition(" ")
    assert (kind, json.loads(value)["named_metrics"]["num_requests_waiting"]) == ("JSON", 1)
    assert "endpoint-load-metrics" not in (await call(fake.app, PATH, CHAT)).headers

    async def finish(step: int) -> None:
        fake.service.stats = EngineStats([SchedulerStats(num_waiting_reqs=7)])

    # The load is that of the answer's time.
    fake.engine.before_step = finish
    later = await call(fake.app, PATH, CHAT, headers={"endpoint-load-metrics-format": "text"})
    assert "num_requests_waiting=7" in later.headers["endpoint-load-metrics"]


async def test_a_starting_a_sleeping_a_paused_and_an_ending_server_say_when_to_come_again() -> None:
    fake = FakeServer()
    expected = {}

    async def check(state: str) -> None:
        health = await call(fake.app, "/health")
        assert (health.status, health.json()["state"]) == (200, state)
        ready = await call(fake.app, "/ready")
        reply = await call(fake.app, PATH, CHAT)
        assert (ready.status, reply.status) == ((200, 200) if state == "ready" else (503, 503))
        if state != "ready":
            assert int(reply.headers["retry-after"]) >= 1
            expected[state] = reply.error["code"]

    await check("starting")
    await fake.start()
    await check("ready")
    fake.feed.sleep_level(1)
    fake.service.look()
    await check("asleep")
    fake.feed.sleep_level(0)
    fake.service.look()
    await check("ready")
    fake.feed.pause(True)
    fake.service.look()
    await check("paused")
    fake.feed.pause(False)
    fake.service.look()
    await check("ready")
    fake.service.is_draining = True
    await check("draining")
    assert expected == {
        "starting": "engine_starting",
        "asleep": "engine_asleep",
        "paused": "engine_paused",
        "draining": "server_draining",
    }


async def test_a_trace_goes_with_its_requests() -> None:
    fake = await server()
    headers = {"traceparent": "00-aa-bb-01", "tracestate": "a=b"}
    await call(fake.app, PATH, CHAT, headers=headers)
    await call(fake.app, PATH, CHAT)
    traces = [options["trace_headers"] for *_, options in fake.engine.asked]
    assert traces == [headers, None]


async def test_the_engine_hears_for_how_long_it_may_hold_tokens() -> None:
    for settings, interval in (({}, 0.03), ({"output_interval": 0}, 0), ({"output_interval": 2.5}, 2.5)):
        fake = await server(**settings)
        await call(fake.app, PATH, CHAT)
        assert [options["output_interval"] for *_, options in fake.engine.asked] == [interval]


@pytest.mark.parametrize("is_draining", [False, True])
async def test_prometheus_gets_the_figures_of_every_rank_to_the_end(is_draining: bool) -> None:
    fake = await server()
    fake.service.is_draining = is_draining
    engines = [SchedulerStats(num_running_reqs=2), SchedulerStats(engine_index=1, num_running_reqs=3)]
    # Nobody has looked since they were published.
    fake.feed.messages.append(EngineStats(engines))
    reply = await call(fake.app, "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    for rank, number in ((0, 2.0), (1, 3.0)):
        line = f'nbengine_num_requests_running{{engine="{rank}",model_name="fake-model"}} {number}'
        assert line in reply.body.decode().splitlines()


async def test_the_history_is_answered_in_rows() -> None:
    fake = await server()
    reply = await call(fake.app, "/metrics/history")
    assert reply.status == 200
    (row,) = json.loads(reply.body)["rows"]
    assert (row["time"], row["rank"], row["tokens_per_second"], row["ttft_p95"]) == (1000.0, 0, 7.0, None)
    assert (await call(fake.app, "/metrics/history?last=10m&rank=3")).status == 200
    assert fake.engine.histories == [("1h", None), ("10m", 3)]
    for query, name in (("last=soon", "last"), ("rank=x", "rank"), ("rank=-1", "rank"), ("days=1", "query")):
        reply = await call(fake.app, f"/metrics/history?{query}")
        assert reply.status == 400
        assert name in reply.error["message"]
    assert len(fake.engine.histories) == 2


async def test_one_too_many_gets_429_and_a_time() -> None:
    fake = await server(max_concurrent_requests=1, max_queued_requests=0)
    ticket = await fake.service.limits.enter()
    reply = await call(fake.app, PATH, {**CHAT, "stream": True})
    assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
    assert int(reply.headers["retry-after"]) >= 1
    ticket.release()
    assert (await call(fake.app, PATH, CHAT)).status == 200


async def test_a_body_counts_until_its_request_is_answered() -> None:
    fake = await server()
    body = json.dumps({"prompt": "x" * 100}).encode()
    seen = []

    async def note(step: int) -> None:
        seen.append(fake.service.num_body_bytes)

    fake.engine.before_step = note
    assert (await call(fake.app, "/v1/completions", body)).status == 200
    assert seen == [len(body)]
    assert fake.service.num_body_bytes == 0
