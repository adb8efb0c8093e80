"""Child process of `nbengine.frontend.fit`: what engines of given sizes would take of this machine, and whether they fit.

Run as `python -m nbengine.engine.fit_probe`, with a `FitQuestion` in JSON at its input; a `FitAnswer` comes back. It is a
process of its own so that whoever asks stays free of torch. What it computes is what a start computes, by the same functions;
of the model itself nothing is loaded. On a GPU the activations are measured on one layer without weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.engine.kv_cache_start import choose_max_model_len
from nbengine.errors import EngineStartError, NBEngineError
from nbengine.ipc.fit import FitAnswer, FitQuestion, MemoryPlace, SizePlan
from nbengine.kv_cache.sizing import num_blocks_for
from nbengine.models.decoder_config import decoder_config
from nbengine.models.encoder_config import is_encoder
from nbengine.models.hf_config import load_hf_config
from nbengine.models.loader import check_checkpoint
from nbengine.models.pooling_config import advised_model_len, longest_model_len
from nbengine.models.registry import make_model, resolve_device, resolve_dtype
from nbengine.models.sharding import check_parallel
from nbengine.worker.budget import (
    GPUProfile,
    asked_kv_cache_bytes,
    cpu_kv_cache_bytes,
    free_memory,
    profile_gpu,
)
from nbengine.worker.footprint import Footprint, num_cores_here
from nbengine.worker.memory import check_kv_cache_fits, check_weights_fit, gpu_kv_budget
from nbengine.worker.model_runner import ModelRunner


class Prober:
    """Answers for one model on this machine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._hf = load_hf_config(config.model)
        self.device = resolve_device(config.model)
        self.dtype = resolve_dtype(config.model, self._hf, self.device)
        self._is_encoder = is_encoder(self._hf)
        # What a process takes that has torch in it, which others than this one will be.
        self._process_bytes = psutil.Process().memory_full_info().uss if self.device.type == "cpu" else 0
        self._profiles: dict[torch.dtype, GPUProfile] = {}

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
        """The most tokens that the model was made for."""
        return longest_model_len(self._hf)

    def places(self) -> list[MemoryPlace]:
        """The memory there is: that of the machine, or of each GPU."""
        if self.device.type == "cpu":
            return [MemoryPlace("CPU memory", psutil.virtual_memory().total, free_memory(self.device))]
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
            found.append(MemoryPlace(name, total, free))
        return found

    def plan(self, config: EngineConfig) -> SizePlan:
        """How an engine with this configuration would come out."""
        parallel = config.parallel
        plan = SizePlan(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, config.cache.block_size
        )
        try:
            check_parallel(self._hf, parallel)
            dtype = resolve_dtype(config.model, self._hf, self.device)
            plan.dtype = str(dtype).removeprefix("torch.")
            ranks = list(layouts(parallel))
            footprints = [Footprint(config, self._hf, self.device, dtype, rank) for rank in ranks]
            plan.weights_bytes = sum(footprint.weights_bytes for footprint in footprints)
            plan.page_bytes = sum(footprint.kv_cache_spec.page_size_bytes for footprint in footprints)
            self._check_devices(parallel)
            self._place(config, plan, ranks, footprints, dtype)
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
        plan.num_blocks = min(
            num_blocks_for(spec, config.cache, num_bytes)
            for spec, num_bytes in zip(specs, available, strict=True)
        )
        plan.max_model_len = choose_max_model_len(config, specs, self._model_info(config), plan.num_blocks)
        check_kv_cache_fits(plan.num_blocks, footprints[0].shared_page_size_bytes, free, footprints[0].place)

    def _on_cpu(self, config: EngineConfig, footprints: list[Footprint]) -> tuple[int, list[int]]:
        """What is free when the weights are loaded, and the KV cache of each rank."""
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
        """What is free on the fullest GPU when the weights are loaded, and the KV cache of each rank."""
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
                asked = gpu_kv_budget(total, config.cache.gpu_memory_utilization, peak, others)
            available.append(asked)
        return min(left), available

    def _profile(self, config: EngineConfig, dtype: torch.dtype) -> GPUProfile:
        """The largest step's use of memory, without weights: that of a model of one layer, on one GPU."""
        if dtype not in self._profiles:
            overrides = {**config.model.hf_overrides, "num_hidden_layers": 1}
            model_config = replace(config.model, hf_overrides=overrides)
            one = replace(config, model=model_config, parallel=ParallelConfig())
            model = make_model(model_config, self.device, dtype)
            runner = ModelRunner(one, model, self.device, dtype)
            found = profile_gpu(one, str(self.device), runner, self.device)
            self._profiles[dtype] = replace(found, peak=found.peak - model.weights_bytes)
            del model, runner
            torch.cuda.empty_cache()
        return self._profiles[dtype]

    def _asked_len(self, config: EngineConfig) -> int:
        asked = config.model.max_model_len
        return longest_model_len(self._hf) if asked is None else asked

    def _model_info(self, config: EngineConfig) -> Mapping[str, Any]:
        return {
            "device": self.device.type,
            "max_position_embeddings": longest_model_len(self._hf),
            "advised_max_model_len": advised_model_len(config.model.directory, self._hf),
        }


def answer(question: FitQuestion) -> FitAnswer:
    """What comes out for each of the configurations, which are of one model."""
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


def main() -> None:
    """Answer the question at the standard input."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=FitQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()
