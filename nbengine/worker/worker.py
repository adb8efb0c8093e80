"""One rank: its device, its part of the model and of the KV cache, and what is computed on them."""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import Any

import torch

from nbengine.config import EngineConfig
from nbengine.distributed.communicator import SINGLE
from nbengine.distributed.layout import ALONE, RankLayout
from nbengine.distributed.peer_waits import peer_waits
from nbengine.errors import UtilityError
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.ipc.utilities import ProfileReport
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.models.causal_model import CausalModel
from nbengine.models.checkpoints.packed_store import packed_store
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.pooling_config import (
    advised_model_len,
    longest_model_len,
    supported_tasks,
    takes_prompt_embeds,
)
from nbengine.models.division import check_parallel
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.loading import (
    load_encoder_model,
    load_model,
    make_model,
    resolve_precision,
)
from nbengine.models.registry import implementation_of
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.progress import ProgressCallback, Reporter
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.scheduler.output import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from nbengine.units import size
from nbengine.worker.batch.async_output import CudaTransfer
from nbengine.worker.decode_graphs import graph_recorder
from nbengine.worker.elastic import change_group, resized
from nbengine.worker.encoder_runner import EncoderRunner
from nbengine.worker.joining import choose_device, join
from nbengine.worker.kernel_store import keep_kernels, unmap_compiler
from nbengine.worker.memory.budget import free_memory, kv_cache_budget, uncounted_extras
from nbengine.worker.memory.footprint import Footprint, num_cores_here
from nbengine.worker.memory.limits import check_kv_cache_fits, check_weights_fit, return_freed_memory
from nbengine.worker.memory.sleep import WorkerSleep
from nbengine.worker.meter import WorkerMeter
from nbengine.worker.model_runner import ModelRunner
from nbengine.worker.profiler import WorkerProfiler
from nbengine.worker.threads import TorchThreads

logger = logging.getLogger(__name__)


class Worker:
    """A worker owns a device, or with the other ranks a CPU. Calls come in this order: `init_device`,
    `load_model`, `determine_available_memory`, `check_kv_cache_fits`, `initialize_kv_cache`, then
    `execute_model` and `sample_tokens` in turn. Every rank gets the same calls.

    Ranks on a CPU share one memory. They check together what they are about to take, each for all, while none
    takes any yet: that is why checking and allocating are two calls.
    """

    model: CausalModel | EncoderModel
    model_runner: ModelRunner | EncoderRunner

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        layout: RankLayout = ALONE,
        files: ExecutorFiles | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self._files = files
        self.board = _board(layout, files)
        self._row = self.board.row(layout.rank)
        self._progress = progress
        self._parallel = SINGLE
        self._threads = TorchThreads()
        self._num_blocks = self._num_slots = 0
        self._profiler: WorkerProfiler | None = None

    def init_device(self) -> None:
        """Choose device and dtype, and join the other ranks.

        Raises:
            EngineStartError: there are too few devices, or the other ranks cannot be reached.
            InvalidArgumentError: the device that was asked for is not there, or that many ranks cannot divide
                the model.
        """
        keep_kernels()
        self.hf_config = load_hf_config(self.config.model)
        check_parallel(self.hf_config, self.config.parallel)
        self.device = choose_device(self.config, self.layout, self._files)
        self.precision = resolve_precision(self.config.model, self.config.cache, self.hf_config, self.device)
        if self.layout.world_size > 1 or (self.config.lock_step and self.layout.dp_size > 1):
            Reporter(self._progress, "load")("waiting for the other ranks")
        if self.layout.world_size > 1 or self.config.lock_step:
            peer_waits.tell = self._row.set_waiting
        hidden_dtype = self.precision.hidden_dtype
        self._parallel = join(
            self.config, self.hf_config, self.layout, self._files, self.device, hidden_dtype
        )
        # All ranks are here now, and none of them has loaded anything.
        self._free_at_start = free_memory(self.device)
        self._footprint = self._count()
        self._meter = WorkerMeter(self._row, self.device)

    def load_model(self) -> None:
        """Load this rank's weights, unless it is to get them from others when it joins them.

        Raises:
            EngineStartError: the weights do not fit; nothing has been loaded then.
            ModelLoadError: the files cannot be used.
        """
        config = self.config.model
        footprint = self._footprint
        check_weights_fit(config.model, footprint.shared_weights_bytes, self._free_at_start, footprint.place)
        self._limit_threads()
        dtype = self.precision.dtype
        if is_encoder(self.hf_config):
            encoder = load_encoder_model(config, self.device, dtype, self._progress)
            self.model, self.model_runner = encoder, EncoderRunner(self.config, encoder, self.device)
        else:
            if self.config.parallel.data_parallel_joins_later:
                decoder = make_model(config, self.device, dtype, self._progress, self._parallel)
            else:
                packed, store = self.precision.packed, packed_store()
                decoder = load_model(
                    config, self.device, dtype, self._progress, self._parallel, store, packed
                )
            self.model = decoder
            overlaps = self.config.scheduler.async_scheduling and self.device.type == "cuda"
            transfer = CudaTransfer if overlaps else None
            recorder = graph_recorder(self.device, enforce_eager=config.enforce_eager)
            self.model_runner = ModelRunner(
                self.config, decoder, self.device, self.precision.kv_dtype, transfer, self._parallel, recorder
            )
        self.model.on_layers = self._row.tick
        self._sleep = WorkerSleep(self.model, self.model_runner, self._row.tick)
        self._meter.measure_memory()
        if implementation := implementation_of(self.hf_config):
            logger.info(
                "the layers are those of %s; a step takes longer than with nbengine's", implementation
            )
        if self.layout.world_size > 1:
            weights, name = size(self.model.weights_bytes), str(dtype).removeprefix("torch.")
            logger.info("%s has %s of weights on %s, %s", self.layout, weights, self.device, name)

    def worker_info(self) -> WorkerInfo:
        """Return which worker this is and what it holds."""
        layout, layers = self.layout, self.layout.stage_layers(self.model.config.num_layers)
        spec = self.get_kv_cache_spec()
        return WorkerInfo(
            rank=layout.rank,
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            pid=os.getpid(),
            device=str(self.device),
            weights_bytes=self.model.weights_bytes,
            kv_cache_bytes=self._num_blocks * spec.page_size_bytes + self._num_slots * spec.slot_bytes,
            first_layer=layers.start,
            num_layers=len(layers),
            communicator=type(self._parallel.tp).__name__ if layout.tp_size > 1 else "",
            link=type(self._parallel.previous or self._parallel.next).__name__ if layout.pp_size > 1 else "",
            kernels=self.model_runner.kernels,
            implementation=implementation_of(self.hf_config),
        )

    def model_info(self) -> dict[str, Any]:
        """Describe what was loaded, in plain values."""
        return {
            "device": str(self.device),
            "dtype": str(self.precision.dtype).removeprefix("torch."),
            "weights_bytes": self.model.weights_bytes,
            "max_position_embeddings": longest_model_len(self.hf_config),
            "advised_max_model_len": advised_model_len(self.config.model.directory, self.hf_config),
            "vocab_size": self.model.config.vocab_size,
            "hidden_size": self.model.config.hidden_size,
            "takes_prompt_embeds": takes_prompt_embeds(self.hf_config),
            "supported_tasks": list(supported_tasks(self.hf_config)),
        }

    def get_kv_cache_spec(self) -> RankCacheSpec:
        """Return what a token leaves in this rank's KV cache; the cache of an encoder has no layers."""
        return self._footprint.kv_cache_spec

    def determine_available_memory(self) -> int:
        """Return the bytes that this rank's KV cache may take, see `kv_cache_budget`; 0 for an encoder.

        Raises:
            EngineStartError: nothing is left.
        """
        if isinstance(self.model_runner, EncoderRunner):
            return 0
        return kv_cache_budget(
            self.config, self._footprint, self.model_runner, self.device, self._max_model_len()
        )

    def check_kv_cache_fits(self, num_blocks: int, num_slots: int = 0) -> None:
        """Check that the KV cache can be allocated, and leaves what a full batch may ask for beside it.

        Raises:
            EngineStartError: it does not fit; the message has the numbers and what to change.
        """
        extras = uncounted_extras(self.config, self._footprint, self._max_model_len(), num_blocks)
        self._check_kv_cache(num_blocks, num_slots, extras)

    def initialize_kv_cache(self, num_blocks: int, num_slots: int = 0) -> None:
        """Allocate all of this rank's KV cache now: nothing grows while requests run.

        Raises:
            EngineStartError: the allocation failed.
        """
        max_model_len = self._footprint.longest(num_blocks, self._max_model_len())
        self.model_runner.initialize_kv_cache(num_blocks, max_model_len, num_slots)
        self._num_blocks, self._num_slots = num_blocks, num_slots
        unmap_compiler()
        self._meter.measure_memory()

    def check_health(self) -> None:
        """Compute something on the device, and meet the other ranks of the stage; changes nothing.

        Raises:
            PeerDiedError, QueueClosedError: another rank has ended.
        """
        torch.ones(1, device=self.device).add_(1).cpu()
        self._parallel.tp.barrier()

    def sleep(self, level: int) -> None:
        """Free the KV cache and move the weights to host memory (level 1; a CPU's are there), or free both
        (level 2).

        Until both are restored no step with tokens can be executed. After level 1, level 2 may follow.

        Raises:
            RuntimeError: there is not enough host memory for the weights; nothing has changed.
        """
        self._sleep.begin(level)
        self._meter.measure_memory()

    def check_wake_up(self, tag: str) -> None:
        """Check that there is memory for what `wake_up` restores; a worker that could not fall asleep with the others
        has it.

        Raises:
            EngineStartError: there is not enough memory any more.
        """
        if tag == "kv_cache":
            if isinstance(self.model_runner, ModelRunner) and self.model_runner.has_kv_cache:
                return
            # The requests still hold the memory for which they have asked beside the cache.
            self._check_kv_cache(self._num_blocks, self._num_slots, 0)
        elif missing := self._sleep.num_missing_bytes:
            footprint = self._footprint
            missing += footprint.shared_weights_bytes - footprint.weights_bytes
            check_weights_fit(self.config.model.model, missing, free_memory(self.device), footprint.place)

    def wake_up(self, tag: str) -> None:
        """Restore the "weights" or the "kv_cache", which is empty then; weights first. What is there stays.

        Raises:
            EngineStartError: the KV cache cannot be allocated any more.
            ModelLoadError: weights that were freed cannot be read again.
        """
        self._sleep.end(tag, self.config.model.weights)
        # Reading the weights may have needed it.
        unmap_compiler()
        self._meter.measure_memory()

    def start_profile(self, directory: str, max_steps: int) -> None:
        """Record what is computed, in at most `max_steps` steps.

        Raises:
            UtilityError: a profile is being recorded, or `directory` cannot be written to.
        """
        if self._profiler is not None:
            raise UtilityError("a profile is being recorded already; stop_profile first")
        layout = self.layout
        worker = f"rank{layout.number}" if layout.world_size * layout.dp_size > 1 else ""
        self._profiler = WorkerProfiler(directory, max_steps, self.device, worker)

    def stop_profile(self) -> ProfileReport:
        """Write what has been recorded.

        Raises:
            UtilityError: no profile is being recorded, or it cannot be written.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise UtilityError("no profile is being recorded; start_profile first")
        return profiler.stop()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """See `ModelRunner.execute_model`."""
        if not scheduler_output.total_num_scheduled_tokens:
            return self.model_runner.execute_model(scheduler_output)
        if self._profiler is not None:
            self._profiler.begin_step()
        began = time.perf_counter()
        output = self.model_runner.execute_model(scheduler_output)
        self._meter.ran(began, is_over=output is not None)
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """See `ModelRunner.sample_tokens`."""
        began = time.perf_counter()
        output = self.model_runner.sample_tokens(grammar_output)
        # Where the tokens come later, no step was computed together with others.
        further = len(output.step_ends) if isinstance(output, ModelRunnerOutput) else 0
        self._meter.ran(began, is_over=True, num_steps=1 + further)
        if further and self._profiler is not None:
            self._profiler.count_further(further)
        return output

    @property
    def most_steps(self) -> int:
        """See `ModelRunner.most_steps`; to be asked when there is a KV cache.

        Engine cores in lock step compute the same number of steps, one at a time.
        """
        return 1 if self._parallel.dp.size > 1 else self.model_runner.most_steps

    def interrupt(self) -> None:
        """See `ModelRunner.interrupt`."""
        self.model_runner.interrupt()

    def execute_dummy_batch(self) -> None:
        """Take part in a step of the other engine cores without any token."""
        if isinstance(self.model_runner, ModelRunner):
            self.model_runner.execute_dummy_batch()

    def all_reduce_unfinished(self, unfinished: bool) -> bool:
        """Return whether any engine core has unfinished requests."""
        return self._parallel.dp.any(unfinished)

    def reconfigure_data_parallel(self, before: int, after: int, init_method: str) -> None:
        """Become one of `after` engine cores in lock step instead of one of `before`, from the next step on.
        Requests and KV cache stay; the experts are divided again.

        The workers of all engine cores, of those that leave or come as well, get this call between the same
        two steps; `init_method` is a place where none has met before.

        Raises:
            EngineStartError: the others cannot be reached.
            InvalidArgumentError: that many engine cores cannot divide the experts; nothing has changed.
            NBEngineError: the engine cores of this model do not work in lock step.
        """
        config = resized(self.config, after, init_method)
        self._parallel = change_group(config, self.hf_config, self.model, self._parallel, self._files, before)
        if isinstance(self.model_runner, ModelRunner):
            self.model_runner.forget_graphs()
        self.config = config
        self.layout = self._parallel.layout
        self._footprint = self._count()
        self._limit_threads()
        return_freed_memory()
        self._meter.measure_memory()

    def shutdown(self) -> None:
        """Free what has been loaded and allocated, and leave the other ranks. The worker takes no calls
        afterwards."""
        runner = vars(self).pop("model_runner", None)
        if runner is not None:
            runner.release_kv_cache()
        model = vars(self).pop("model", None)
        if model is not None and not isinstance(model, EncoderModel) and model.kept is not None:
            model.kept.abandon()
        del model
        parallel, self._parallel = self._parallel, SINGLE
        parallel.close()
        self._threads.restore()
        gc.collect()
        torch.cuda.empty_cache()

    def _count(self) -> Footprint:
        return Footprint(self.config, self.hf_config, self.device, self.precision, self.layout)

    def _check_kv_cache(self, num_blocks: int, num_slots: int, extras: int) -> None:
        footprint = self._footprint
        check_kv_cache_fits(
            num_blocks,
            footprint.shared_page_size_bytes,
            free_memory(self.device),
            footprint.place,
            extras,
            num_slots * footprint.shared_slot_bytes,
        )

    def _limit_threads(self) -> None:
        num_ranks = self.layout.world_size * num_cores_here(self.config)
        self._threads.restore()
        if self.device.type == "cpu" or num_ranks > 1:
            self._threads.limit(self._footprint.weights_bytes, num_ranks)

    def _max_model_len(self) -> int:
        configured = self.config.model.max_model_len
        advised = advised_model_len(self.config.model.directory, self.hf_config)
        return advised if configured is None else configured


def _board(layout: RankLayout, files: ExecutorFiles | None) -> WorkerBoard:
    """Return the board that the executor has made, else a private one for this worker to be asked."""
    if files is None or files.board is None:
        return WorkerBoard.private(layout.world_size)
    return WorkerBoard.attach(files.board, layout.world_size)
