"""Decode steps on a GPU as recorded graphs: the host starts a whole step at once instead of one operation after the
other, which takes several times as long as the operations themselves.

A prepared step (`nbengine.models.prepared`) is the same to a CPU.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from nbengine.config import SchedulerConfig
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.models.causal_model import CausalModel
from nbengine.models.step_output import StepOutput
from nbengine.worker.batch.static_inputs import padded_shapes
from nbengine.worker.batch.step_inputs import StepInputs

logger = logging.getLogger(__name__)

MOST_GRAPHS = 64
"""Each takes some MiB of the device's memory; the one that was not used for longest goes first."""

_LARGEST_BYTES = 12
"""An id and a float32 number, those of a row's largest logit."""

Shape = tuple[int, int]
"""The rows of a step with its padding, and the tokens for which its longest request is laid out."""


class Graph(Protocol):
    """A recorded computation, whose inputs and outcome stay where they are."""

    output: StepOutput

    def replay(self) -> None:
        """Compute it again, in the order of the stream's work."""


class GraphRecorder(Protocol):
    """A maker of graphs. They share memory: an outcome holds until the next replay of any of them."""

    def record(self, step: Callable[[], StepOutput]) -> Graph:
        """Record what `step` computes, which has been called before with the same shapes.

        Raises:
            RuntimeError: it does what cannot be recorded, or there is too little memory.
        """

    def forget(self) -> None:
        """Give up the memory that graphs share, when none of them is left."""


class CudaGraph:
    """A graph of CUDA."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: StepOutput) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """A recorder for one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, step: Callable[[], StepOutput]) -> Graph:
        """See `GraphRecorder.record`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads of this process may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = step()
            finally:
                graph.capture_end()
        return CudaGraph(graph, output)

    def forget(self) -> None:
        """See `GraphRecorder.forget`."""
        self._pool = None


def graph_recorder(device: torch.device, *, enforce_eager: bool) -> GraphRecorder | None:
    """Make the recorder of a worker's decode steps; None where they are not recorded."""
    return CudaGraphs(device) if device.type == "cuda" and not enforce_eager else None


class DecodeGraphs:
    """The graphs of a model's decode steps, by their shapes. A shape's first step is computed as always, which compiles
    what it needs, its second one is recorded."""

    def __init__(self, model: CausalModel, recorder: GraphRecorder) -> None:
        self._model = model
        self._recorder = recorder
        self._graphs: OrderedDict[Shape, Graph] = OrderedDict()
        self._met: set[Shape] = set()
        self._refused: set[Shape] = set()

    @staticmethod
    def cover(model: CausalModel) -> bool:
        """Return whether the model's steps can be recorded as it is divided now: no other worker takes part."""
        layout = model.layout
        return layout.world_size == layout.dp_size == 1 and model.is_recordable and model.has_logits

    def most_bytes(self, scheduler: SchedulerConfig, max_model_len: int, step_bytes: int) -> int:
        """Return the bytes that graphs take at most beside all other steps, of which the largest takes `step_bytes`:
        the outcome of each, and what the widest needs in between, which they share."""
        config, itemsize = self._model.config, self._model.dtype.itemsize
        row = (config.hidden_size + config.vocab_size) * itemsize + _LARGEST_BYTES
        shapes = padded_shapes(scheduler.max_num_seqs, max_model_len)
        # A new graph is there before the one that has to go for it.
        rows = sorted((count for count, _ in shapes), reverse=True)[: MOST_GRAPHS + 1]
        share = min(1.0, rows[0] / scheduler.max_num_batched_tokens)
        return row * sum(rows) + math.ceil(share * step_bytes)

    def run(self, inputs: StepInputs, kv_caches: list[Tensor]) -> StepOutput:
        """Return the outcome of a step that `StaticInputs` has laid out: hidden states, logits and the largest of them,
        of the requests without padding, until the next step."""
        shape, count = _shape(inputs), len(inputs.sampled)
        graph = self._graphs.get(shape)
        if graph is None and shape in self._met and shape not in self._refused:
            graph = self._record(shape, inputs, kv_caches)
        if graph is None:
            self._met.add(shape)
            return _first(self._step(inputs, kv_caches), count)
        self._graphs.move_to_end(shape)
        graph.replay()
        self._model.on_layers(self._model.config.num_layers)
        return _first(graph.output, count)

    def forget(self) -> None:
        """Give up all graphs: the weights or the KV cache are about to lie elsewhere."""
        self._graphs.clear()
        self._recorder.forget()

    def _record(self, shape: Shape, inputs: StepInputs, kv_caches: list[Tensor]) -> Graph | None:
        try:
            graph = self._recorder.record(lambda: self._step(inputs, kv_caches))
        except RuntimeError as error:
            self._refused.add(shape)
            logger.warning(
                "steps of %s requests with up to %s tokens are not recorded as a CUDA graph and take longer: %s",
                *shape,
                error,
            )
            return None
        self._graphs[shape] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _step(self, inputs: StepInputs, kv_caches: list[Tensor]) -> StepOutput:
        hidden = self._model.step(inputs.input_ids, inputs.positions, kv_caches, inputs.attention).hidden
        logits = self._model.compute_logits(hidden)
        ids = logits.argmax(-1)
        return StepOutput(hidden, logits, (ids, logits.gather(1, ids[:, None])[:, 0].float()))


def _shape(inputs: StepInputs) -> Shape:
    attention = inputs.attention
    first = attention.groups[0] if isinstance(attention, StepMetadata) else attention
    return len(inputs.input_ids), first.max_seq_len


def _first(output: StepOutput, count: int) -> StepOutput:
    """Return the outcome of the first `count` rows."""
    logits, largest = output.logits, output.largest
    return StepOutput(
        output.hidden[:count],
        None if logits is None else logits[:count],
        None if largest is None else (largest[0][:count], largest[1][:count]),
    )
