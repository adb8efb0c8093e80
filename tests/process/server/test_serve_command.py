"""`nbengine serve`: an engine and its server in one command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import pytest
from process_support.engine_under_test import wait_for

from nbengine.client.engines.directory import list_engines

KEY = "a-very-secret-key"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def command(no_leftovers: None, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """`nbengine serve` with a key, at a port, with its output in a file."""
    port = free_port()
    output = tmp_path / "output"
    arguments = ["serve", "random-tiny", "--port", str(port), "--served-model-name", "mine", "--log-requests"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments, "--api-key", KEY],
            stdout=stream,
            stderr=stream,
        )
    yield process, port, output
    if process.poll() is None:
        process.kill()
    process.wait()


START = "import sys; from nbengine.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.timeout(300)
def test_it_serves_until_it_is_told_to_end_and_takes_its_engine_with_it(
    command: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, output = command
    url = f"http://127.0.0.1:{port}"

    def status(path: str) -> int:
        try:
            return httpx2.get(f"{url}{path}").status_code
        except httpx2.ConnectError:
            return 0

    wait_for(lambda: status("/health") == 200, "the server to listen", deadline=60)
    seen = {status("/ready")}
    wait_for(lambda: status("/ready") == 200, "the engine to be ready", deadline=120)
    assert seen <= {200, 503}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        answer = client.completions.create(model="mine", prompt="a", max_tokens=3)
        assert answer.model == "mine"
    assert httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 401
    running = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    shown = [word for one in running for word in (*one.cmdline(), *one.environ().values())]
    assert not any(KEY in word for word in shown if word)
    [engine] = list_engines()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not engine.info.host_alive
    said = output.read_text()
    assert f"serving mine at {url}/v1 with an API key" in said
    assert KEY not in said


@pytest.mark.timeout(300)
def test_it_ends_with_a_clear_line_when_its_engine_dies(
    command: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, output = command

    def is_ready() -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx2.ConnectError:
            return False

    wait_for(is_ready, "the engine to be ready", deadline=120)
    [engine] = list_engines()
    os.kill(engine.info.host_pid, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "the server ends, because its engine has ended: " in output.read_text().splitlines()[-1]
