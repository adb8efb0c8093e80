"""A real IPython shell, isolated, and engines that answer from a script."""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import NBEngineError
from nbengine.frontend.control import Control, ControlOf
from nbengine.frontend.outputs.divided_text import DividedText
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.transcripts import Transcript
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.frontend.parsing.reading import answer_of
from nbengine.frontend.parsing.reasoning.families import Qwen3ReasoningParser
from nbengine.frontend.requests.output_interval import FOR_READERS
from nbengine.frontend.requests.reasoning import reasoning_marks
from nbengine.ipc.control_messages import EngineReady, HistoryPage, Progress, ReadHistory
from nbengine.ipc.liveness import this_process
from nbengine.ipc.utilities import QueuePlace
from nbengine.magics.extension import load, unload
from nbengine.magics.generation.background import Background
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nbengine.runtime.connection import (
    ConnectionInfo,
    connection_file,
    log_dir,
    read_connection,
    runtime_dir,
    write_connection,
)
from nbengine.sampling_params import RequestOutputKind, SamplingParams

FORMAT = AnswerFormat("qwen3")
MARKS = reasoning_marks(Qwen3ReasoningParser, "")


def make_ready(rank: int) -> EngineReady:
    """Make the message of an engine core that is ready."""
    return EngineReady(
        rank=rank,
        num_blocks=64,
        block_size=16,
        max_model_len=1024,
        kv_cache_bytes=1 << 20,
        weights_bytes=1 << 20,
        device="cpu",
        dtype="float32",
        supported_tasks=["generate"],
        pid=os.getpid(),
    )


def written_call(call: Mapping[str, Any]) -> str:
    """Write a call of a tool as it stands in a prompt."""
    return f"({call['function']['name']} {call['function']['arguments']})"


class FakeClient:
    """An engine in this process: each request is answered by `words`, or by hand through `collectors`."""

    def __init__(self, name: str, config: EngineConfig, session: str) -> None:
        log = log_dir() / f"{name}.log"
        log.write_text("line one\nline two\nline three\n")
        cores = [make_ready(rank) for rank in range(config.parallel.data_parallel_size)]
        self.ready = cores[0]
        self.connection = ConnectionInfo(
            name=name,
            run_dir=str(runtime_dir() / f"run-{name}"),
            log_path=str(log),
            host_pid=os.getpid(),
            host_started=this_process().started,
            config=config,
            ready=cores,
        )
        Path(self.connection.run_dir).mkdir(0o700, exist_ok=True)
        write_connection(self.connection)
        self.name = name
        self.config = config
        self.session = session
        self.has_chat_template = True
        self.engine_ranks = list(range(config.parallel.data_parallel_size))
        self.divided: dict[tuple[str, int], DividedText] = {}
        self.tools: list[Any] = []
        """The schemas of tools of each call of `render_chat`."""
        self.turns: list[list[str]] = []
        """The words of the next answers, before `words` answers all others."""
        self.template_variables: list[dict[str, Any]] = []
        """The variables of each call of `render_chat`."""
        self.words: list[str] | None = ["Hello", " wor", "ld"]
        self.defaults: dict[str, Any] = {"temperature": 0.5}
        self.refusal: NBEngineError | None = None
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.collectors: list[RequestOutputCollector] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.utilities: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.engine_stats = [make_stats(rank) for rank in self.engine_ranks]
        self.asked_ranks: list[int | None] = []
        self.labels: list[str | None] = []
        self.kept: dict[str | None, list[Transcript]] = {}
        """By session; None is the notebook's own."""
        self.read: list[tuple[str | None, list[str]]] = []
        self.unread_sessions: dict[str, int] = {}
        self.written: list[list[int]] = []
        self.history = HistoryPage([], 0.0)
        """The answer to `metrics`, unless `answers` has an error."""
        self.asked_history: list[ReadHistory] = []

    @property
    def stats(self) -> SchedulerStats:
        """Return the statistics of the first engine core."""
        return self.engine_stats[0]

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        data_parallel_rank: int | None = None,
        transcript: str | None = None,
        written: Sequence[int] = (),
        output_interval: float = 0.0,
    ) -> RequestOutputCollector:
        assert output_interval == FOR_READERS
        if self.refusal is not None:
            raise self.refusal
        self.labels.append(transcript)
        self.requests.append((prompt, sampling_params))
        self.asked_ranks.append(data_parallel_rank)
        self.written.append(list(written))
        request_id = f"{self.name}-{len(self.requests)}"
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request_id, request_id)
        self.collectors.append(collector)
        words = self.turns.pop(0) if self.turns else self.words
        if words is not None:
            for completion in range(sampling_params.n):
                for index, word in enumerate(words):
                    last = index == len(words) - 1
                    self.emit(word, "stop" if last else None, completion=completion)
        return collector

    def emit(
        self, word: str, finish_reason: str | None = None, index: int = -1, *, completion: int = 0
    ) -> None:
        """Let a request produce one token; it ends with its last completion."""
        now = time.monotonic()
        metrics = RequestMetrics(now - 1, None, now - 0.5, now, None, 0, 3, (self.asked_ranks[index] or 0,))
        params = self.requests[index][1]
        logprobs = None if params.logprobs is None else [{len(word): Logprob(-0.5, 1, word)}]
        delta = CompletionOutput(completion, word, [len(word)], None, logprobs, finish_reason)
        collector = self.collectors[index]
        reading = answer_of(self.requests[index][0])
        if reading is not None:
            key = collector.request_id, completion
            self.divided.setdefault(key, DividedText(reading)).divide(delta)
        collector.put(
            RequestOutput(
                collector.request_id,
                None,
                [1, 2, 3, 4],
                [delta],
                finish_reason is not None and completion == params.n - 1,
                None,
                2,
                metrics,
            )
        )

    def transcripts_blocking(self, session: str | None = None) -> list[Transcript]:
        if isinstance(error := self.answers.get("transcripts"), Exception):
            raise error
        return list(self.kept.get(session, ()))

    def read_transcripts(self, request_ids: Iterable[str], session: str | None = None) -> None:
        if isinstance(error := self.answers.get("read_transcripts"), Exception):
            raise error
        self.read.append((session, list(request_ids)))

    def forget_transcripts_blocking(
        self, request_ids: Iterable[str] | None = None, session: str | None = None
    ) -> int:
        assert request_ids is None
        if isinstance(error := self.answers.get("forget_transcripts"), Exception):
            raise error
        return len(self.kept.pop(session, ()))

    def transcript_sessions_blocking(self) -> dict[str, int]:
        if isinstance(error := self.answers.get("transcript_sessions"), Exception):
            raise error
        return self.unread_sessions

    def abort_soon(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def go_on_soon(self) -> None:
        self.calls.append("go on")

    client_index = 1
    death: NBEngineError | None = None

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    thinks: str | None = None
    """"always", or "switch" where the template can be told not to."""

    calls_tools = True
    """The chat template says how the model calls tools."""

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(backend_tokenizer=SimpleNamespace(get_added_tokens_decoder=dict))

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_parser: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        prompt = "".join(
            f"<{m['role']}>{m['content']}" + "".join(map(written_call, m.get("tool_calls", ())))
            for m in messages
        )
        self.tools.append(tools)
        if tools and self.calls_tools:
            name = "hermes" if tool_parser == "auto" else tool_parser
            return {"prompt": prompt, "answer": AnswerReading(AnswerFormat(None, name), tuple(tools))}
        self.template_variables.append(dict(chat_template_kwargs or {}))
        if self.thinks is None:
            return {"prompt": prompt}
        is_off = self.thinks == "switch" and (chat_template_kwargs or {}).get("enable_thinking") is False
        prompt += "<think>\n\n</think>\n\n" if is_off else "<think>\n"
        reading = AnswerReading(FORMAT, prompt_opens_reasoning=FORMAT.is_opened_by(prompt))
        return {"prompt": prompt, "reasoning": MARKS.behind(prompt), "answer": reading}

    def default_sampling_params(self) -> dict[str, Any]:
        return dict(self.defaults)

    stall: str | None = None
    silent: Sequence[int] = ()
    """Engine cores that do not answer."""

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        assert 0 < timeout < 5
        engines = [stats for stats in self.engine_stats if stats.engine_index not in self.silent]
        return EngineStats(engines=engines), list(self.silent)

    num_ahead: int | None = 0
    """The requests that are before those of this client."""

    def place_within(self, request_ids: Sequence[str], timeout: float) -> QueuePlace | None:
        known = {collector.engine_request_id for collector in self.collectors}
        assert known.issuperset(request_ids)
        return None if self.num_ahead is None or not request_ids else QueuePlace(0, self.num_ahead)

    @property
    def control(self) -> Control:
        return ControlOf(self)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Note a utility call; `answers` has the results, or errors to raise."""
        self.utilities.append((method, *args))
        answer = self.answers.get(method)
        future: Future[Any] = Future()
        if isinstance(answer, NBEngineError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    def check_alive(self) -> None: ...

    def describe_silence(self, missing: Sequence[Future[Any]]) -> str:
        return "the host"

    def submit_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        self.asked_history.append(asked)
        future: Future[HistoryPage] = Future()
        if isinstance(error := self.answers.get("metrics"), NBEngineError):
            future.set_exception(error)
        else:
            rows = [row for row in self.history.rows if asked.rank in (None, row.rank)]
            future.set_result(HistoryPage(rows, self.history.now))
        return future

    def scale_blocking(
        self,
        data_parallel_size: int,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> int:
        if isinstance(answer := self.answers.get("scale"), BaseException):
            raise answer
        for rank in range(len(self.engine_ranks), data_parallel_size):
            if progress is not None:
                progress(Progress("load", "weights", 1.0, 0.5, rank))
        self.engine_ranks = list(range(data_parallel_size))
        self.connection.ready = [make_ready(rank) for rank in self.engine_ranks]
        # As a host does it: clients keep the configuration that they came with.
        parallel = replace(self.config.parallel, data_parallel_size=data_parallel_size)
        config = replace(self.config, parallel=parallel)
        write_connection(msgspec.structs.replace(self.connection, config=config))
        return data_parallel_size

    def detach(self) -> None:
        self.calls.append("detach")

    def shutdown(self, *, drain: bool = False) -> None:
        self.calls.append(f"shutdown drain={drain}")
        connection_file(self.name).unlink(missing_ok=True)

    def die(self) -> None:
        """Make the engine look dead."""
        self.connection.host_started -= 1
        write_connection(self.connection)


def make_stats(rank: int) -> SchedulerStats:
    """The state of a busy engine core."""
    return SchedulerStats(
        engine_index=rank,
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_blocks=64,
        num_free_blocks=48,
        num_cached_blocks=7,
        prefix_cache_queries=200,
        prefix_cache_hits=50,
        step_counter=1234,
    )


class FakeBackend:
    """Starts `FakeClient`s and keeps them; `on_start` runs inside each start."""

    def __init__(self) -> None:
        self.clients: dict[str, FakeClient] = {}
        self.attached: list[str] = []
        self.on_start: Callable[[], None] = lambda: None
        self.started: list[dict[str, Any]] = []
        self.on_prepare: Callable[[], None] = lambda: None
        self.has_spare = False

    def keep_spare(self) -> None:
        self.has_spare = True

    def drop_spare(self) -> None:
        self.has_spare = False

    def prepare(self, arguments: Mapping[str, Any], *, progress: Callable[[Progress], None]) -> None:
        self.on_prepare()

    def start(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str | None,
        session: str,
        progress: Callable[[Progress], None],
    ) -> FakeClient:
        for stage in ("fetch", "load", "profile", "kv", "ready"):
            progress(Progress(stage, detail=f"{stage} detail", seconds=0.1))
        self.started.append(dict(arguments))
        self.on_start()
        config = EngineArgs.from_kwargs(arguments).create_engine_config(bound=False)
        client = FakeClient(name or arguments["model"], config, session)
        self.clients[client.name] = client
        return client

    def attach(
        self, name_or_file: str | Path, *, session: str, progress: Callable[[Progress], None]
    ) -> FakeClient:
        name = read_connection(connection_file(str(name_or_file))).name
        self.attached.append(name)
        return self.clients[name]


class RecordingPublisher(DisplayPublisher):
    """Keeps what a frontend would have received."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[bool, dict[str, Any], str | None]] = []
        self.changed = threading.Condition()

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        with self.changed:
            self.messages.append((update, dict(data), (transient or {}).get("display_id")))
            self.changed.notify_all()

    def outputs(self) -> list[dict[str, Any]]:
        """The outputs of the cell as they stand in the end."""
        shown: dict[object, dict[str, Any]] = {}
        for _, data, display_id in self.messages:
            shown[display_id or object()] = data
        return list(shown.values())

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until some output holds `text`."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: any(text in data.get("text/plain", "") for _, data, _ in self.messages), timeout
            )
        assert found, f"{text!r} never appeared"


async def _is_left(background: Background) -> bool:
    # One that has ended is still to be taken from the set.
    return bool(background._tasks) and bool((await asyncio.wait(list(background._tasks), timeout=10))[1])


@pytest.fixture(autouse=True)
def no_stream_is_left() -> Iterator[None]:
    """A stream of the background that a test leaves would look at its engine in the tests that follow."""
    yield
    background = Background._shared
    if background is not None:
        is_left = asyncio.run_coroutine_threadsafe(_is_left(background), background._thread.loop)
        assert not is_left.result(60), "the test leaves a stream in the background"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, private_runtime_dir: Path
) -> Iterator[InteractiveShell]:
    """A terminal-like shell with the extension loaded."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # The paths of tests may be too long for sockets.
    monkeypatch.setenv("NBENGINE_RUNTIME_DIR", tempfile.mkdtemp(prefix="", dir=private_runtime_dir))
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    load(shell, backend)
    yield shell
    unload(shell)
    InteractiveShell.clear_instance()
    # Or each shell stays until the interpreter ends, and looks for garbage among all that is there then.
    atexit.unregister(shell.atexit_operations)


@pytest.fixture
def kernel_shell(shell: InteractiveShell) -> InteractiveShell:
    """The same shell, taken for a kernel's: it publishes to a `RecordingPublisher` and cells can await."""
    shell.kernel = object()
    shell.display_pub = RecordingPublisher()
    return shell


@pytest.fixture
def engine(shell: InteractiveShell, backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> FakeClient:
    """A started engine, the default one."""
    shell.run_cell("%engine start random-tiny").raise_error()
    capsys.readouterr()
    if isinstance(shell.display_pub, RecordingPublisher):
        shell.display_pub.messages.clear()
    return backend.clients["random-tiny"]
