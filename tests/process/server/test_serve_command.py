"""`nbengine serve`: an engine and its server in one command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, wait_for

from nbengine.client.engines.directory import list_engines

KEY = "a-very-secret-key"
PROMPT = "what nobody else is to read"


def wait_for_port(process: subprocess.Popen[bytes]) -> int:
    """The port at which a server listens, once it does."""

    def ports() -> list[int]:
        connections = psutil.Process(process.pid).net_connections("tcp")
        return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]

    wait_for(ports, "the server to listen")
    (port,) = ports()
    return port


@pytest.fixture
def options() -> list[str]:
    """Options of a test's engine."""
    return []


@pytest.fixture
def command(
    no_leftovers: None, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """`nbengine serve` with a key, at a port that it has found free, with its output in a file."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    output = tmp_path / "output"
    arguments = ["serve", "random-tiny", "--port", "0", "--served-model-name", "mine", "--log-requests"]
    arguments += options
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments, "--api-key", KEY],
            stdout=stream,
            stderr=stream,
        )
    try:
        yield process, wait_for_port(process), output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


START = "import sys; from nbengine.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def status(command: tuple[subprocess.Popen[bytes], int, Path]) -> Iterator[Callable[[str], int]]:
    """The status with which a path of the server answers; 0 while nothing listens."""
    # Each client of its own would read all certificates.
    with httpx2.Client(base_url=f"http://127.0.0.1:{command[1]}") as http:

        def status(path: str) -> int:
            try:
                return http.get(path).status_code
            except httpx2.ConnectError:
                return 0

        yield status


@pytest.mark.timeout(300)
def test_it_serves_until_it_is_told_to_end_and_takes_its_engine_with_it(
    command: tuple[subprocess.Popen[bytes], int, Path], status: Callable[[str], int]
) -> None:
    import openai

    process, port, output = command
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: status("/health") == 200, "the server to listen", deadline=60)
    seen = {status("/ready")}
    wait_for(lambda: status("/ready") == 200, "the engine to be ready", deadline=120)
    assert seen <= {200, 503}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        answer = client.completions.create(model="mine", prompt=PROMPT, max_tokens=3)
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
    [line] = [line for line in said.splitlines() if f"request {answer.id}: " in line]
    assert f"{len(PROMPT)} prompt tokens, 3 tokens" in line
    assert PROMPT not in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [["--distributed-executor-backend", FAKE_EXECUTOR]], ids=["no model"])
def test_it_ends_with_a_clear_line_when_its_engine_dies(
    command: tuple[subprocess.Popen[bytes], int, Path], status: Callable[[str], int]
) -> None:
    process, _, output = command
    wait_for(lambda: status("/ready") == 200, "the engine to be ready", deadline=120)
    [engine] = list_engines()
    os.kill(engine.info.host_pid, signal.SIGKILL)
    assert process.wait(60) == 1
    assert "the server ends, because its engine has ended: " in output.read_text().splitlines()[-1]


@pytest.mark.timeout(300)
def test_a_stop_while_the_engine_starts_leaves_nothing_and_a_key_of_the_environment_is_not_seen(
    no_leftovers: None,
) -> None:
    arguments = ["serve", "random-tiny", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *arguments], env={**os.environ, "NBENGINE_API_KEY": KEY}
    )
    try:
        port = wait_for_port(process)
        assert httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}).status_code == 401
        serving = psutil.Process(process.pid)
        wait_for(lambda: serving.children(), "the engine's host to be started")
        for one in (serving, *serving.children(recursive=True)):
            # Processes come and go while an engine starts.
            with contextlib.suppress(psutil.NoSuchProcess):
                assert not any(KEY in word for word in (*one.cmdline(), *one.environ().values()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
