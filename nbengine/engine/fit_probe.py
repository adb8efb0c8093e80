"""The child process of `nbengine.frontend.fit`, which computes whether engines of given sizes fit on this
machine.

It runs as `python -m nbengine.engine.fit_probe`, reads `FitQuestions` in JSON from its input and writes
`FitAnswers`. It is a separate process so that the one that asks stays free of torch. It computes the same
numbers as a start, with the same functions, but loads nothing of the model. On a GPU it measures the
activations on one layer without weights.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.distributed.communicator import SINGLE
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.engine.core.kv_cache_start import choose_max_model_len
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.ipc.fit import FitAnswer, FitAnswers, FitQuestion, FitQuestions, MemoryPlace, SizePlan
from nbengine.kv_cache.sizing import cache_size
from nbengine.models.checkpoints.loader import check_checkpoint
from nbengine.models.configs.encoder_config import is_encoder
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.configs.pooling_config import advised_model_len, longest_model_len
from nbengine.models.division import check_parallel
from nbengine.models.loading import make_model, resolve_device, resolve_dtype, resolve_precision
from nbengine.models.registry import decoder_config
from nbengine.worker.decode_graphs import graph_recorder
from nbengine.worker.memory.budget import (
    GPUProfile,
    asked_kv_cache_bytes,
    cpu_kv_cache_bytes,
    free_memory,
    profile_gpu,
    uncounted_extras,
)
from nbengine.worker.memory.footprint import Footprint, num_cores_here
from nbengine.worker.memory.limits import check_kv_cache_fits, check_weights_fit, gpu_kv_budget
from nbengine.worker.model_runner import ModelRunner

_READ_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
_READS = 8
"""The number of times that memory is read; the first time also makes it ready."""


class Prober:
    """A prober that answers for one model on this machine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._hf = load_hf_config(config.model)
        self.device = resolve_device(config.model)
        self.dtype = resolve_dtype(config.model, self._hf, self.device)
        self._is_encoder = is_encoder(self._hf)
        # The engine's processes will import torch, too: this one shows how much memory that takes.
        self._process_bytes = psutil.Process().memory_full_info().uss if self.device.type == "cpu" else 0
        self._profiles: dict[tuple[torch.dtype, int, bool], GPUProfile] = {}

    def check_files(self) -> None:
        """Compare the weight files with the configuration, by their headers.

        Raises:
            ModelLoadError: the model cannot be loaded.
        """
        paths = tuple(map(Path, self._config.model.weights))
        if not self._is_encoder:
            config = decoder_config(self._hf)
            if paths:
                check_checkpoint(config, paths, self.dtype)

    def context_limit(self) -> int:
        """Return the most tokens that the model was made for."""
        return longest_model_len(self._hf)

    def places(self) -> list[MemoryPlace]:
        """List the memory of the machine, or of each GPU."""
        return places_of(self.device)

    def plan(self, config: EngineConfig) -> SizePlan:
        """Plan an engine with this configuration: its memory and limits, or the problem that prevents it."""
        parallel = config.parallel
        plan = SizePlan(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, config.cache.block_size
        )
        try:
            check_parallel(self._hf, parallel)
            precision = resolve_precision(config.model, config.cache, self._hf, self.device)
            plan.dtype = str(precision.dtype).removeprefix("torch.")
            ranks = list(layouts(parallel))
            footprints = [Footprint(config, self._hf, self.device, precision, rank) for rank in ranks]
            plan.weights_bytes = sum(footprint.weights_bytes for footprint in footprints)
            plan.page_bytes = sum(footprint.kv_cache_spec.page_size_bytes for footprint in footprints)
            plan.slot_bytes = sum(footprint.kv_cache_spec.slot_bytes for footprint in footprints)
            if not self._is_encoder:
                rules = decoder_config(self._hf).cache_rules()
                plan.rules = [(rule.kind, rule.size) for rule in rules]
            self._check_devices(parallel)
            self._place(config, plan, ranks, footprints, precision.dtype)
        except NBEngineError as error:
            plan.problem = str(error)
        return plan

    def _check_devices(self, parallel: ParallelConfig) -> None:
        if self.device.type == "cpu" or parallel.distributed_executor_backend == "ray":
            return
        shares = parallel.data_parallel_size > 1 and parallel.data_parallel_backend != "ray"
        needed = parallel.world_size * (parallel.data_parallel_size if shares else 1)
        if needed > torch.cuda.device_count():
            raise EngineStartError(f"it needs {needed} GPUs, and there are {torch.cuda.device_count()}")

    def _place(
        self,
        config: EngineConfig,
        plan: SizePlan,
        ranks: list[RankLayout],
        footprints: list[Footprint],
        dtype: torch.dtype,
    ) -> None:
        specs = [footprint.kv_cache_spec for footprint in footprints]
        if self._is_encoder:
            free = free_memory(self.device)
            check_weights_fit(config.model.model, plan.weights_bytes, free, footprints[0].place)
            available = [0] * len(ranks)
        elif self.device.type == "cpu":
            free, available = self._on_cpu(config, footprints)
        else:
            free, available = self._on_gpus(config, ranks, footprints, dtype)
        plan.num_blocks, plan.num_state_slots = cache_size(
            specs, config.cache, available, config.scheduler.max_num_seqs
        )
        plan.max_model_len = choose_max_model_len(config, specs, self._model_info(config), plan.num_blocks)
        for footprint in footprints:
            extras = uncounted_extras(config, footprint, self._asked_len(config), plan.num_blocks)
            page_bytes, state_bytes = (
                footprint.shared_page_size_bytes,
                plan.num_state_slots * footprint.shared_slot_bytes,
            )
            check_kv_cache_fits(plan.num_blocks, page_bytes, free, footprint.place, extras, state_bytes)

    def _on_cpu(self, config: EngineConfig, footprints: list[Footprint]) -> tuple[int, list[int]]:
        """Return the bytes that are free when the weights are loaded, and those of each rank's KV cache."""
        footprint, num_cores = footprints[0], num_cores_here(config)
        num_workers = config.parallel.world_size if config.parallel.world_size > 1 else 0
        free = free_memory(self.device) - (num_cores * (1 + num_workers) - 1) * self._process_bytes
        check_weights_fit(config.model.model, footprint.shared_weights_bytes, free, footprint.place)
        free -= footprint.shared_weights_bytes * (1 if config.lock_step else num_cores)
        available = []
        for each in footprints:
            asked = asked_kv_cache_bytes(config, each)
            default = cpu_kv_cache_bytes(config, each, self._asked_len(config), free)
            available.append(default if asked is None else asked)
        return free, available

    def _on_gpus(
        self, config: EngineConfig, ranks: list[RankLayout], footprints: list[Footprint], dtype: torch.dtype
    ) -> tuple[int, list[int]]:
        """Return the free bytes of the fullest GPU after the weights, and those of each rank's KV cache."""
        profile = self._profile(config, dtype)
        left, available = [], []
        for rank, footprint in zip(ranks, footprints, strict=True):
            free, total = torch.cuda.mem_get_info(rank.number)
            others = profile.others if rank.number == 0 else max(profile.others, total - free)
            check_weights_fit(config.model.model, footprint.weights_bytes, total - others, footprint.place)
            left.append(total - others - footprint.weights_bytes)
            asked = asked_kv_cache_bytes(config, footprint)
            if asked is None:
                peak = footprint.weights_bytes + profile.peak
                budget = gpu_kv_budget(total, config.cache.gpu_memory_utilization, peak, others)
                asked = footprint.kv_cache_part(budget)
            available.append(asked)
        return min(left), available

    def _profile(self, config: EngineConfig, dtype: torch.dtype) -> GPUProfile:
        """Measure the largest step's memory without weights, with a model of one layer on one GPU."""
        is_recorded = config.parallel.world_size == 1 and not config.lock_step
        kind = dtype, self._asked_len(config), is_recorded
        if kind not in self._profiles:
            overrides = {**config.model.hf_overrides, "num_hidden_layers": 1}
            model_config = replace(config.model, hf_overrides=overrides)
            one = replace(config, model=model_config, parallel=ParallelConfig())
            model = make_model(model_config, self.device, dtype)
            recorder = None
            if is_recorded:
                recorder = graph_recorder(self.device, enforce_eager=model_config.enforce_eager)
            runner = ModelRunner(one, model, self.device, dtype, None, SINGLE, recorder)
            found = profile_gpu(one, str(self.device), runner, self.device, kind[1])
            self._profiles[kind] = replace(found, peak=found.peak - model.weights_bytes)
            del model, runner
            torch.cuda.empty_cache()
        return self._profiles[kind]

    def _asked_len(self, config: EngineConfig) -> int:
        asked = config.model.max_model_len
        return advised_model_len(config.model.directory, self._hf) if asked is None else asked

    def _model_info(self, config: EngineConfig) -> Mapping[str, Any]:
        return {
            "device": self.device.type,
            "max_position_embeddings": longest_model_len(self._hf),
            "advised_max_model_len": advised_model_len(config.model.directory, self._hf),
        }


def places_of(device: torch.device) -> list[MemoryPlace]:
    """List the memory of the machine, or of each GPU."""
    if device.type == "cpu":
        return [MemoryPlace("CPU memory", psutil.virtual_memory().total, free_memory(device))]
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        found.append(MemoryPlace(name, total, free))
    return found


def read_speed(device: torch.device) -> float:
    """Measure how many bytes of its memory a device reads in a second: a sum over more than caches hold."""
    num_bytes = min(_READ_BYTES[device.type], max(1 << 20, free_memory(device) // 8))
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = math.inf
    for _ in range(_READS):
        began = time.perf_counter()
        numbers.sum().item()  # The number is there when the device has ended.
        best = min(best, time.perf_counter() - began)
    return numbers.nbytes / best


def answer(question: FitQuestion) -> FitAnswer:
    """Answer a question: plan an engine for each of its configurations, which are of one model."""
    first, *_ = question.configs
    try:
        prober = Prober(first)
        found = FitAnswer(device=prober.device.type, places=prober.places())
        prober.check_files()
        found.context_limit = prober.context_limit()
        found.plans = [prober.plan(config) for config in question.configs]
    except NBEngineError as error:
        return FitAnswer(problem=str(error))
    return found


def answers(asked: FitQuestions) -> FitAnswers:
    """Answer several questions, one after the other, so that what is free is free for each."""
    device = resolve_device(ModelConfig())
    found = FitAnswers([], device.type, places_of(device))
    if asked.measures:
        found.bytes_per_second = read_speed(device)
    found.answers = [answer(question) for question in asked.questions]
    return found


def main() -> None:
    """Answer the questions on standard input."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=FitQuestions)
    sys.stdout.buffer.write(msgspec.json.encode(answers(asked)))


if __name__ == "__main__":
    main()
