"""The synchronous engine: requests go in, outputs come out one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from nbengine.checks import require_bool, require_callback, require_method
from nbengine.client.base import BlockingClient, EngineCoreClient
from nbengine.client.link.ownership import Owned, finalize
from nbengine.client.making import make_client
from nbengine.client.routing.core_table import checked_rank
from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import NotSupportedError
from nbengine.frontend.assembly import assemble, resolve_files
from nbengine.frontend.control import Control
from nbengine.frontend.held_back import HeldBack
from nbengine.frontend.inspection import Inspection
from nbengine.frontend.observability.request_watch import RequestObserver
from nbengine.frontend.outputs.output_collector import PromptCallback
from nbengine.frontend.parsing.reading import answer_of
from nbengine.frontend.requests.input_processor import PromptType, prompt_text
from nbengine.frontend.requests.prompting import Prompting
from nbengine.outputs import RequestOutput
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.progress import ProgressCallback
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.widgets.processes.tree import ProcessTree, read_own_process_tree


class LLMEngine(Prompting, Control, Inspection):
    """The engine on which `LLM` is built, for one thread: `add_request`, then `step` while requests are
    unfinished.

    With `n > 1` one request has n completions, which the outputs carry together.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files.
        EngineStartError: the engine did not start; the message has the reason and the end of its log.
    """

    engine_core = Owned[BlockingClient]()

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool = True,
        name: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        is_apart = require_bool("multiprocess", multiprocess)
        require_callback("progress", progress)
        self.engine_core = make_client(
            resolve_files(config, progress), multiprocess=is_apart, name=name, progress=progress
        )
        # Ends the engine when nobody refers to this object any more, and at the interpreter's exit.
        self._finalizer = finalize(self, self.engine_core.release)
        parts = assemble(self.engine_core, progress)
        self.ready = parts.ready
        self._tokenizer = parts.tokenizer
        self.input_processor = parts.input_processor
        self.output_processor = parts.output_processor
        self._errors: deque[Exception] = deque()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        multiprocess: bool = True,
        progress: ProgressCallback | None = None,
    ) -> LLMEngine:
        """Build an engine from the flat arguments; the engine ends with this process."""
        return cls(engine_args.create_engine_config(bound=True), multiprocess=multiprocess, progress=progress)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        on_prompt_progress: PromptCallback | None = None,
    ) -> str:
        """Queue a request and return its internal id (`request_id` plus 8 random characters).

        Args:
            request_id: the caller's, which the outputs carry; it need not be unique.
            prompt: a string, `{"prompt": str}`, `{"prompt_token_ids": [int]}` or `{"prompt_embeds": tensor}`,
                the dicts with `cache_salt` if wanted; a list of integers is a prompt's tokens.
            arrival_time: seconds of `time.monotonic()`, now if None.
            priority: lower goes first, with `scheduling_policy="priority"`.
            data_parallel_rank: the engine core that is to have it; None leaves the choice to the client.
            on_prompt_progress: what `step` calls with a `PromptProgress` after each step that has read a part of the
                prompt and not all of it.

        Raises:
            InvalidArgumentError, NotSupportedError: the request is not possible; nothing was queued.
            EngineDeadError, LeaseExpiredError: the engine cannot be reached.
        """
        self.engine_core.check_alive()
        data_parallel_rank = checked_rank(data_parallel_rank, self.engine_core.engine_ranks)
        require_callback("on_prompt_progress", on_prompt_progress)
        answer = answer_of(prompt)
        request = self.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        self.input_processor.assign_request_id(request)
        to_send = self.output_processor.add_request(
            request, prompt_text(prompt), answer=answer, on_prompt_progress=on_prompt_progress
        )
        try:
            for part in to_send:
                self.engine_core.add_request(part)
        except BaseException:
            self.engine_core.abort_requests(self.output_processor.discard_request(request.request_id))
            raise
        return request.request_id

    def observe_requests(self, observer: RequestObserver) -> None:
        """Tell an observer of every request that is added from now on, when it has ended."""
        require_method("observer", observer, "ended")
        self.output_processor.watch.observers.append(observer)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Wait for the next outputs of the engine core and return what they come to.

        Raises:
            RequestError: the engine refused a request, or (`RequestLostError`) the engine core that had it
                has ended; the others go on with the next `step`.
            Exception: what an `on_prompt_progress` has raised in the `step` before.
            EngineDeadError, LeaseExpiredError: all requests have failed.
        """
        if self._errors:
            raise self._errors.popleft()
        outputs = self.engine_core.get_output(self._ask_if_held_back)
        processed = self.output_processor.process_outputs(outputs.outputs, outputs.engine_index)
        if outputs.prompts_read:
            try:
                self.output_processor.process_prompts_read(outputs.prompts_read)
            except Exception as error:  # noqa: BLE001 (whatever it is, the caller gets it)
                # The outputs of other requests come first.
                self._errors.append(error)
        if processed.reqs_to_abort:
            self.engine_core.abort_requests(processed.reqs_to_abort, stopped=processed.stopped)
        # These have ended in the engine core without an output.
        if outputs.finished_requests:
            self.output_processor.abort_requests(outputs.finished_requests)
        self._errors.extend(processed.errors)
        return [*processed.request_outputs, *processed.pooling_outputs]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests, given by either id; they have no further output."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.engine_core.abort_requests(self.output_processor.abort_requests(ids))

    def abort_soon(self, request_id: str) -> None:
        """Raise an error: `abort_request` is for the thread that steps, which another one cannot reach.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            f"the code that runs waits for request {request_id}: interrupt it to end the request"
        )

    def go_on_soon(self) -> None:
        """Raise an error: utilities are for the thread that steps, which another one cannot reach.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            "only the code that has the LLM can let it go on: call wake_up or resume_generation there"
        )

    def _ask_if_held_back(self) -> None:
        HeldBack(self.connection.name, self.engine_core.submit_utility).ask()

    def abort_all(self) -> None:
        """Drop every unfinished request, and the errors of which nobody has been told."""
        self._errors.clear()
        self.abort_request(self.output_processor.unfinished_ids())

    def _engine_client(self) -> EngineCoreClient:
        return self.engine_core

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to wait for."""
        return bool(self._errors) or self.output_processor.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Count the requests that have not had their last output."""
        return self.output_processor.get_num_unfinished_requests()

    @property
    def connection(self) -> ConnectionInfo:
        """Return the engine's connection: the contents of its connection file.

        Raises:
            NotSupportedError: the engine is in this process.
        """
        connection = self.engine_core.connection
        if connection is None:
            raise NotSupportedError(
                "an engine in this process publishes nothing; leave multiprocess=False out"
            )
        return connection

    def process_tree(self) -> ProcessTree:
        """Return the engine's processes as they are now, and what connects them; a notebook shows a picture
        of them."""
        if self.engine_core.connection is None:
            return read_own_process_tree(self.config, self.ready)
        return super().process_tree()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine and wait until all its processes are gone; calling it again does nothing."""
        self.engine_core.shutdown(drain=drain)
        self._finalizer.detach()
