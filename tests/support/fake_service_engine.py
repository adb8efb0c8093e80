"""An engine for a server that writes what a test says, without any process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from nbengine.errors import NBEngineError
from nbengine.frontend.outputs.output_collector import PromptCallback, RequestOutputCollector, wake
from nbengine.frontend.outputs.output_stream import OutputStream
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.metrics.history import HistoryRow, MetricsHistory, seconds_of
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.outputs import CompletionOutput, Logprob, PromptProgress, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from nbengine.server.app import make_app
from nbengine.server.service import EngineService
from nbengine.server.settings import ServerSettings

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)


class FakeTokenizer:
    """A tokenizer whose tokens are characters."""

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template
        self.backend_tokenizer = self

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def __len__(self) -> int:
        return 1 << 20

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return list(map(chr, token_ids))

    def encode(self, text: str, limit: Any = None, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))


class FakeFeed:
    """Statistics that a test sets."""

    def __init__(self) -> None:
        self.messages: list[EngineStats] = []

    def poll(self, timeout: float | None = None) -> EngineStats | None:
        return self.messages.pop(0) if self.messages else None

    def close(self) -> None:
        pass

    def sleep_level(self, level: int) -> None:
        self.messages.append(EngineStats([SchedulerStats(sleep_level=level)]))

    def pause(self, is_paused: bool) -> None:
        self.messages.append(EngineStats([SchedulerStats(is_paused=is_paused)]))


class FakeStream(OutputStream):
    """The outputs of a request to an engine that goes on once they are read."""

    writing: asyncio.Task[None]

    def __init__(self, collector: RequestOutputCollector, abort: Callable[[str], None]) -> None:
        super().__init__(collector, abort)
        self._was_read = asyncio.Event()

    async def read(self) -> None:
        """Wait until what has been written is read."""
        await self._was_read.wait()
        self._was_read.clear()

    def take(self) -> RequestOutput | None:
        output = super().take()
        self._was_read.set()
        return output

    def close(self) -> None:
        super().close()
        self.writing.cancel()


class FakeEngine:
    """An engine that writes `pieces` for every completion, one a step, as `steps` lets it."""

    def __init__(self, pieces: Sequence[str] = ("Hel", "lo"), finish_reason: str = "stop") -> None:
        self.name = "fake"
        self.pieces = list(pieces)
        self.finish_reason = finish_reason
        self.stop_reason: int | str | None = None
        self.config: Any = SimpleNamespace(model=SimpleNamespace(model="fake-model"))
        self.connection: Any = SimpleNamespace(created=1_700_000_000.0)
        self.death: NBEngineError | None = None
        self.tokenizer = FakeTokenizer()
        self.input_processor: Any = SimpleNamespace(max_model_len=256, encoder=self.tokenizer)
        self.recommended: dict[str, Any] = {}
        self.asked: list[tuple[Any, SamplingParams, str, dict[str, Any]]] = []
        self.rendered: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []
        self.reading: AnswerReading | None = None
        self.histories: list[tuple[str | float, int | None]] = []
        """The times and ranks whose history was asked for."""
        self.running = 0
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.error_at = 0
        """The step at which `error` comes instead of an output."""
        self.before_step: Callable[[int], Awaitable[None]] | None = None
        self.progress: list[PromptProgress] = []
        """The progress of each prompt before its answer begins."""

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def metrics(self, last: str | float = "1h", *, rank: int | None = None) -> MetricsHistory:
        seconds_of(last)
        self.histories.append((last, rank))
        return MetricsHistory([HistoryRow(0, 100, 1, 1000.0, generation_tokens=7)], 0.0, 101.0)

    def default_sampling_params(self) -> dict[str, Any]:
        return self.recommended

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        self.rendered.append((list(messages), options))
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        answer = {} if self.reading is None else {"answer": self.reading}
        return {"prompt": text, "prompt_token_ids": list(map(ord, text)), **answer}

    async def open_stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        output_interval: float = 0.0,
        on_prompt_progress: PromptCallback | None = None,
    ) -> OutputStream:
        assert sampling_params is not None
        assert request_id is not None
        options = {
            "priority": priority,
            "data_parallel_rank": data_parallel_rank,
            "trace_headers": trace_headers,
            "output_interval": output_interval,
        }
        self.asked.append((prompt, sampling_params, request_id, options))
        self.running += 1
        collector = RequestOutputCollector(sampling_params.output_kind, request_id, request_id)
        collector.on_prompt_progress = on_prompt_progress
        stream = FakeStream(collector, self._abort)
        stream.writing = asyncio.create_task(self._write(stream, collector, prompt, sampling_params))
        return stream

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def _write(
        self, stream: FakeStream, collector: RequestOutputCollector, prompt: Any, params: SamplingParams
    ) -> None:
        try:
            for progress in self.progress if collector.on_prompt_progress is not None else ():
                await asyncio.sleep(0)
                if (waiter := collector.report(progress)) is not None:
                    wake([waiter])
                await stream.read()
            for step, output in enumerate(self._outputs(prompt, params, collector.request_id)):
                await asyncio.sleep(0)
                if self.before_step is not None:
                    await self.before_step(step)
                if self.error is not None and step >= self.error_at:
                    raise self.error
                collector.put(output)
                await stream.read()
        except Exception as error:  # noqa: BLE001 (the reader gets it)
            collector.put_error(error)
        finally:
            self.running -= 1

    def _outputs(self, prompt: Any, params: SamplingParams, request_id: str) -> Iterator[RequestOutput]:
        text = prompt.get("prompt")
        tokens = prompt.get("prompt_token_ids") or list(map(ord, text))
        whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        pieces = ["".join(self.pieces)] if whole else self.pieces
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            completions = [
                CompletionOutput(
                    index,
                    piece,
                    list(map(ord, piece)),
                    logprobs=self._logprobs(piece, params.logprobs),
                    finish_reason=self.finish_reason if is_last else None,
                    stop_reason=self.stop_reason if is_last else None,
                )
                for index in range(params.n)
            ]
            output = RequestOutput(request_id, text, tokens, completions, is_last, num_cached_tokens=2)
            if number == 0 and params.prompt_logprobs is not None:
                entries = self._logprobs("".join(map(chr, tokens)), params.prompt_logprobs) or []
                output.prompt_logprobs = [None, *entries[1:]]
            yield output

    @staticmethod
    def _logprobs(text: str, top: int | None) -> list[dict[int, Logprob]] | None:
        if top is None:
            return None
        others = [Logprob(-2.0 - place, place + 2, f"<{place}>") for place in range(max(0, top - 1))]
        return [
            {
                ord(letter): Logprob(-0.5, 1, letter),
                **{-1 - place: other for place, other in enumerate(others)},
            }
            for letter in text
        ]


class FakeServer:
    """A server's application with a fake engine."""

    def __init__(self, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.feed = FakeFeed()
        self.service = EngineService(ServerSettings(**settings))
        self.app = make_app(self.service)

    async def start(self) -> FakeServer:
        await self.service.attach(self.engine, self.feed)
        return self
