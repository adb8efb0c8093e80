"""EngineCore, the inner loop: it schedules a step, has the model executed, and takes in the outcome."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from nbengine.config import CacheConfig, EngineConfig, SchedulerConfig
from nbengine.engine.core.control import EngineControl
from nbengine.engine.core.kv_cache_start import initialize_kv_cache
from nbengine.engine.core.step_in_flight import StepInFlight, describe_step
from nbengine.engine.core.step_pace import StepPace
from nbengine.engine.core.structured import StructuredOutputManager
from nbengine.engine.core.transcripts import ALL_ABORTED, CLIENT_LEFT, TranscriptKeeper
from nbengine.errors import EngineUnavailableError, RequestError, UtilityError
from nbengine.ipc.control_messages import EngineReady, Progress
from nbengine.ipc.liveness import machine_id, this_process
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.ipc.utilities import QueuePlace
from nbengine.kv_cache.events import KVEventStream
from nbengine.metrics.stats import SchedulerStats
from nbengine.models.configs.description import describe_model
from nbengine.sampling.logits_processor import check_params, load_logits_processors
from nbengine.sampling_params import PoolingParams, SamplingParams
from nbengine.scheduler.grammar import Grammar
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import SchedulerOutput
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.trace_stream import TraceStream

if TYPE_CHECKING:
    from nbengine.executor.base import Executor
    from nbengine.runtime.executor_files import ExecutorFiles
    from nbengine.runtime.progress import ProgressCallback

logger = logging.getLogger(__name__)

_DEFAULT_TASKS = ("generate",)
"""Tasks of an executor that names no others."""


class EngineCore:
    """The executor, KV cache and scheduler of an engine core, for one thread but `preprocess_add_request`.

    Raises:
        EngineStartError: the KV cache has no room for what was asked, or a logits processor cannot be loaded.
        NBEngineError: the model cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        progress: ProgressCallback | None = None,
        engine_index: int = 0,
        files: ExecutorFiles | None = None,
    ) -> None:
        self.config = config
        self.engine_index = engine_index
        self._report = progress or _log_progress
        self._logits_processors = load_logits_processors(config.model.logits_processors)
        self.model_executor = executor_class(config, progress, files)
        try:
            self.model_info = self.model_executor.model_info()
            start = initialize_kv_cache(config, self.model_executor, self.model_info, self._report)
            self.num_blocks, self.max_model_len = start.num_blocks, start.max_model_len
            self.num_state_slots = start.num_slots
            self.workers = self.model_executor.worker_info()
            self.supported_tasks = tuple(self.model_info.get("supported_tasks", _DEFAULT_TASKS))
        except BaseException:
            self.model_executor.shutdown()
            raise
        self._vocab_size: int = self.model_info["vocab_size"]
        self._structured_outputs = StructuredOutputManager(
            config.model, self._vocab_size, config.scheduler.max_num_seqs
        )
        self.scheduler = Scheduler(
            *self._scheduling_config(),
            self.num_blocks,
            self.max_model_len,
            engine_index,
            options=SchedulerOptions(
                async_scheduling=self.model_executor.async_scheduling,
                num_stages=config.parallel.pipeline_parallel_size,
                max_concurrent_steps=self.model_executor.max_concurrent_batches,
                groups=start.groups,
                num_state_slots=start.num_slots,
                state_tokens=start.state_tokens,
            ),
            grammar_masks=self._structured_outputs,
        )
        self._block_hasher = self.scheduler.kv_cache_manager.block_hasher
        self.aborts_queue: SimpleQueue[tuple[int, list[str] | None, Collection[str]]] = SimpleQueue()
        """Arguments of `abort_for_client` that arrive while a step is executed, from any thread."""
        self.batch_queue_size = self.model_executor.max_concurrent_batches
        self.batch_queue: deque[StepInFlight] = deque()
        """Steps in flight, the oldest first."""
        self.step_fn: Callable[[], tuple[dict[int, EngineCoreOutputs], bool]] = (
            self.step if self.batch_queue_size == 1 else self.step_with_batch_queue
        )
        self._pace = StepPace(self.model_executor.most_steps)
        self.kv_events = KVEventStream(
            self.scheduler.kv_cache_manager.block_pool,
            config.cache.block_size,
            engine_index,
            start.groups.num_tables,
        )
        self.trace = TraceStream(self.scheduler)
        self.control = EngineControl(
            self.scheduler, self.model_executor, lambda: self.num_steps_in_flight, self.abort_all
        )
        self.transcripts = TranscriptKeeper(self.scheduler, engine_index)
        self._unsent: list[tuple[int, EngineCoreOutputs]] = []
        self._utilities: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: list(self.supported_tasks),
            "stats": self.stats,
            "queue_place": self.queue_place,
            "check_health": self.model_executor.check_health,
            "ping": lambda: "pong",
            "describe_model": lambda: describe_model(self.config.model),
            "kv_cache_snapshot": lambda: self.kv_events.snapshot(time.time()),
            **self.control.utilities,
            **self.transcripts.utilities,
        }

    # Requests.

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """Check a request and prepare it for the scheduler; return it and its wave. Safe on any thread.

        Raises:
            RequestError: the request is refused; the message says why.
        """
        received_at = self.scheduler.clock()
        embeds_bytes = None
        if request.prompt_token_ids is not None:
            self._check_vocabulary("prompt_token_ids", request.prompt_token_ids)
            if request.prompt_embeds is not None:
                raise RequestError("a prompt has either prompt_token_ids or prompt_embeds, not both")
        else:
            embeds_bytes = self._prepare_embeds(request)
        self._check_task(request.pooling_params)
        params, grammar = request.sampling_params, None
        if params is not None:
            self._check_vocabulary("stop_token_ids", params.stop_token_ids)
            self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
            self._check_vocabulary("logit_bias", params.logit_bias or ())
            for token_ids in params.bad_words_token_ids or ():
                self._check_vocabulary("bad_words", token_ids)
            check_params(self._logits_processors, params)
            grammar = self._grammar_of(request, params)
            if params.structured_outputs is not None and params.min_tokens:
                # The grammar holds the end back itself, because only it knows where nothing else can follow.
                request.sampling_params = msgspec.structs.replace(params, min_tokens=0)
        # The blocks are hashed here, on the input thread, so that the busy loop need not.
        prepared = Request.from_engine_core_request(request, self._block_hasher, embeds_bytes, received_at)
        prepared.grammar = grammar
        self.scheduler.validate_request(prepared)
        return prepared, request.current_wave

    def _grammar_of(self, request: EngineCoreRequest, params: SamplingParams) -> Grammar | None:
        marks, written = request.reasoning, None
        if marks is not None:
            for token_ids in (*marks.openings, *marks.endings, marks.closing, *marks.gaps):
                self._check_vocabulary("reasoning", token_ids)
            if marks.num_written and request.prompt_token_ids is not None:
                written = request.prompt_token_ids[-marks.num_written :]
        return self._structured_outputs.compile(params, marks, written or ())

    def _check_task(self, params: PoolingParams | None) -> None:
        task = "generate" if params is None else params.task
        # Without a classification head, the frontend makes scores from embeddings.
        is_composed = task == "score" and "classify" not in self.supported_tasks
        if task not in self.supported_tasks or is_composed:
            raise RequestError(
                f"the model cannot be asked to {task}; supported are {', '.join(self.supported_tasks)}"
            )
        if params is None:
            return
        if params.pooling is None and task != "encode":
            raise RequestError(f"pooling is None; the task {task} needs a kind of pooling")
        size: int = self.model_info["hidden_size"]
        if params.dimensions is not None and params.dimensions > size:
            raise RequestError(f"dimensions={params.dimensions} exceeds the model's hidden size {size}")

    def _prepare_embeds(self, request: EngineCoreRequest) -> memoryview:
        from nbengine.engine.core.prompt_embeds import bytes_of, prepare_prompt_embeds

        params = request.sampling_params
        if params is not None and params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs must be None for prompts given as embeddings")
        if not self._has_kv_cache:
            raise RequestError("prompt_embeds cannot be given to an encoder")
        info = self.model_info
        if not info.get("takes_prompt_embeds", True):
            raise RequestError(
                "prompt_embeds cannot be given to this model: each of its layers has embeddings of token ids of its own"
            )
        embeds = prepare_prompt_embeds(request.prompt_embeds, info["hidden_size"], info["dtype"])
        request.prompt_embeds = embeds
        return bytes_of(embeds)

    def _check_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} has the token id {token_id}, "
                    f"the model's vocabulary is 0 to {self._vocab_size - 1}"
                )

    def add_request(self, request: Request, request_wave: int = 0) -> None:  # noqa: ARG002
        """Queue a preprocessed request; `request_wave` matters to data-parallel engines only.

        Raises:
            RequestError: there is an unfinished request of this id, or (`EngineUnavailableError`) the engine is
                kept asleep.
        """
        if self.control.refuses_requests:
            raise EngineUnavailableError(
                f"request {request.request_id}: the engine is kept asleep, and takes no requests "
                "until it is woken up"
            )
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str], stopped: Collection[str] = ()) -> None:
        """Abort requests at the wish of their client; ids that are unknown or finished are ignored. The client
        has found a stop string in those that are `stopped`, too."""
        for request_id in stopped:
            if request_id in self.scheduler.requests:
                self.scheduler.requests[request_id].has_stop_string = True
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED, tell_client=False)
        self.transcripts.take_ended()

    def abort_for_client(
        self, client_index: int, request_ids: list[str] | None, stopped: Collection[str] = ()
    ) -> None:
        """Abort requests of one client, all of them if `request_ids` is None; those of others go on. The client
        has found a stop string in those that are `stopped`, too."""
        if request_ids is None:
            self.scheduler.abort_client(client_index)
            self.transcripts.take_ended(CLIENT_LEFT)
            return
        requests = self.scheduler.requests
        its_own = [
            request_id
            for request_id in request_ids
            if request_id in requests and requests[request_id].client_index == client_index
        ]
        self.abort_requests(its_own, [request_id for request_id in its_own if request_id in stopped])

    def abort_all(self, reason: str = ALL_ABORTED) -> None:
        """Abort every request; `take_unsent_outputs` then has the ends that tell their clients the reason."""
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request in self.scheduler.requests.values():
            aborted = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT, error=reason)
            outputs[request.client_index].append(request.with_held(aborted))
        self.scheduler.finish_requests(
            list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED, tell_client=False
        )
        self.transcripts.take_ended(ALL_ABORTED)
        for client_index, client_outputs in outputs.items():
            ends = EngineCoreOutputs(self.engine_index, client_outputs, timestamp=time.monotonic())
            self._unsent.append((client_index, ends))

    def take_unsent_outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        """Return outputs, by client index, that belong to no step, and forget them."""
        unsent, self._unsent = self._unsent, []
        return unsent

    # A step.

    @property
    def num_steps_in_flight(self) -> int:
        """Count the steps that have been planned and whose outcome has not been taken in."""
        return len(self.batch_queue)

    def has_work(self) -> bool:
        """Tell whether `step_fn` has anything to do."""
        return bool(self.batch_queue) or self.scheduler.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedule and execute a step, or several at once; return their outputs by client index, and whether the model
        ran."""
        if not self.scheduler.has_requests():
            return {}, False
        began = time.perf_counter()
        scheduler_output = self.scheduler.schedule(self._pace.allowed)
        try:
            future = self.model_executor.execute_model(scheduler_output, non_block=True)
            grammar_output = self.scheduler.get_grammar_bitmask(scheduler_output)
            model_output = future.result()
            if model_output is None:
                model_output = self.model_executor.sample_tokens(grammar_output)
        except Exception:
            logger.error("step %s failed", describe_step(scheduler_output))
            raise
        # A request aborted during the execution must not be given the token that the execution sampled.
        self._process_aborts_queue()
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        model_executed = scheduler_output.total_num_scheduled_tokens > 0
        if model_executed:
            self._pace.took(time.perf_counter() - began, self.scheduler.step_counter - scheduler_output.step)
        return outputs, model_executed

    def step_with_batch_queue(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        """Schedule and start a step, then wait for the oldest one in flight and make its outputs.

        While there is room for further steps and none has ended, the method does not wait: the next call
        schedules ahead of the steps in flight. Where requests are scheduled ahead of their own tokens, a step
        that needs masks is executed like any other, but sampled only when the outputs of all earlier steps
        have been taken in.

        Returns:
            The outputs by client index, and whether a step with tokens was started.
        """
        queue = self.batch_queue
        started = False
        # Workers sample the latest step that they have executed, so no other may come in between.
        if self.scheduler.has_requests() and not (queue and queue[-1].awaits_sampling):
            plan = self.scheduler.schedule()
            step = self._start(plan)
            queue.append(step)
            started = plan.total_num_scheduled_tokens > 0
            needs_masks = plan.has_structured_output_requests and self.model_executor.async_scheduling
            if not (needs_masks and len(queue) > 1):
                self._sample(step)
                if started and len(queue) < self.batch_queue_size and not queue[0].is_done:
                    return {}, True
        return (self._finish_oldest() if queue else {}), started

    def _finish_oldest(self) -> dict[int, EngineCoreOutputs]:
        """Wait for the oldest step in flight, and return its outputs by client index."""
        oldest = self.batch_queue.popleft()
        try:
            model_output = oldest.result()
        except Exception:
            logger.error("step %s failed", describe_step(oldest.plan))
            raise
        self._process_aborts_queue()
        outputs = self.scheduler.update_from_output(oldest.plan, model_output)
        # This step may have waited for its masks, which depend on the outcome just taken in.
        if len(self.batch_queue) == 1:
            self._sample(self.batch_queue[0])
        return outputs

    def _start(self, plan: SchedulerOutput) -> StepInFlight:
        # With pipeline parallelism there is often nothing to plan until a step in flight has ended.
        if plan.is_blank:
            return StepInFlight.of_blank(plan)
        return StepInFlight(plan, self.model_executor.execute_model(plan, non_block=True))

    def _sample(self, step: StepInFlight) -> None:
        if step.awaits_sampling:
            grammar_output = self.scheduler.get_grammar_bitmask(step.plan)
            step.sampled = self.model_executor.sample_tokens(grammar_output, non_block=True)

    def post_step(self, model_executed: bool) -> None:
        """Take in the effects of a step; every driver of the engine calls this after each step."""
        del model_executed
        self.transcripts.take_ended()
        self.control.advance()

    def _process_aborts_queue(self) -> None:
        aborts = self.aborts_queue
        # Nobody else takes items out. To find that there is none by an exception takes longer.
        while not aborts.empty():
            self.abort_for_client(*aborts.get_nowait())

    # Everything else.

    def call_utility(self, method: str, args: list[Any]) -> Any:
        """Call a utility method by name; a `Future` that it returns is done after some later step.

        Raises:
            UtilityError: there is no such method.
        """
        function = self._utilities.get(method)
        if function is None:
            raise UtilityError(f"no utility method {method!r}; there are " + ", ".join(self._utilities))
        return function(*args)

    def stats(self) -> SchedulerStats:
        """Return the state of scheduler, KV cache and workers, and what requests have taken."""
        stats = self.step_stats()
        stats.requests = self.scheduler.meter.stats.copy()
        return stats

    def queue_place(self, request_ids: list[str]) -> QueuePlace | None:
        """Return the place of the first of these requests in the queue; None if none of them waits here."""
        num_ahead = self.scheduler.num_ahead_of(request_ids)
        return None if num_ahead is None else QueuePlace(self.engine_index, num_ahead)

    def step_stats(self) -> SchedulerStats:
        """Return what changes with each step: `stats` without `requests`."""
        stats = self.control.describe(self.scheduler.make_stats())
        stats.workers = self.model_executor.worker_stats()
        return stats

    def ready_message(self, rank: int) -> EngineReady:
        """Return the message that the frontends get once the engine takes requests."""
        return EngineReady(
            rank=rank,
            num_blocks=self.num_blocks,
            block_size=self.config.cache.block_size,
            max_model_len=self.max_model_len,
            kv_cache_bytes=sum(worker.kv_cache_bytes for worker in self.workers),
            weights_bytes=sum(worker.weights_bytes for worker in self.workers),
            device=self.model_info["device"],
            dtype=self.model_info["dtype"],
            supported_tasks=list(self.supported_tasks),
            pid=os.getpid(),
            workers=self.workers,
            machine=machine_id(),
            started=this_process().started,
            num_state_slots=self.num_state_slots,
        )

    def shutdown(self) -> None:
        """Release the executor and its workers."""
        self._structured_outputs.shutdown()
        self.model_executor.shutdown()

    # Start.

    @property
    def _has_kv_cache(self) -> bool:
        return bool(self.num_blocks or self.num_state_slots)

    def _scheduling_config(self) -> tuple[SchedulerConfig, CacheConfig]:
        """Return the configuration that fits the model: without a KV cache a prompt must take one step."""
        scheduler, cache = self.config.scheduler, self.config.cache
        if self._has_kv_cache:
            return scheduler, cache
        budget = max(scheduler.max_num_batched_tokens, self.max_model_len)
        return (
            dataclasses.replace(scheduler, enable_chunked_prefill=False, max_num_batched_tokens=budget),
            dataclasses.replace(cache, enable_prefix_caching=False),
        )


def _log_progress(progress: Progress) -> None:
    logger.debug("%s: %s", progress.stage, progress.detail)
