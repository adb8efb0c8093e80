"""The memory that a worker gives back while its engine sleeps, and takes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from nbengine.models.causal_model import CausalModel
from nbengine.models.checkpoints.loader import reload_weights
from nbengine.models.encoder_model import EncoderModel
from nbengine.runtime.progress import Reporter
from nbengine.worker.encoder_runner import EncoderRunner
from nbengine.worker.memory.limits import return_freed_memory
from nbengine.worker.memory.offload import WeightsOffload
from nbengine.worker.model_runner import ModelRunner


class WorkerSleep:
    """The memory of a model and of its runner's KV cache; see `Worker.sleep`. `tick` is called while weights
    are read again."""

    def __init__(
        self,
        model: CausalModel | EncoderModel,
        model_runner: ModelRunner | EncoderRunner,
        tick: Callable[[], None],
    ) -> None:
        self._tick = tick
        self._model = model
        self._model_runner = model_runner
        self._offload: WeightsOffload | None = None

    @property
    def num_missing_bytes(self) -> int:
        """Return the bytes that the weights will take again."""
        return 0 if self._offload is None else self._offload.num_missing_bytes

    def begin(self, level: int) -> None:
        """Free the KV cache, and move the weights to host memory (level 1) or free them (level 2).

        Raises:
            RuntimeError: there is not enough host memory for the weights; nothing has changed.
        """
        if not isinstance(self._model, EncoderModel):
            self._model.forget_addresses()
            if level == 2 and self._model.kept is not None:
                self._model.kept.stop()
        offload = self._offload or WeightsOffload(self._model.parameters())
        if level == 2:
            offload.drop()
        elif self._model.device.type != "cpu":
            offload.move_to_host()
        self._offload = offload
        self._model_runner.release_kv_cache()
        return_freed_memory()
        torch.cuda.empty_cache()

    def end(self, tag: str, weights: tuple[str, ...]) -> None:
        """Restore the "weights", from the files `weights` if they were freed, or the "kv_cache".

        Raises:
            EngineStartError: the KV cache cannot be allocated any more.
            ModelLoadError: weights that were freed cannot be read again.
        """
        if tag == "kv_cache":
            self._model_runner.restore_kv_cache()
        elif self._offload is not None:
            if not self._offload.restore():
                reload_weights(
                    self._model, tuple(map(Path, weights)), Reporter(lambda _: self._tick(), "load")
                )
            self._offload = None
