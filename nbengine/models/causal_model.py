"""The model as workers, loaders and the redivision of experts see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbengine.distributed.communicator import Communicator, ParallelState
    from nbengine.distributed.layout import RankLayout
    from nbengine.kernels.attention_metadata import AttentionMetadata
    from nbengine.kernels.dispatch import Kernels
    from nbengine.kernels.step_metadata import StepMetadata
    from nbengine.models.checkpoints.kept_weights import KeptWeights
    from nbengine.models.configs.decoder_config import DecoderConfig
    from nbengine.models.further_steps import FurtherSteps
    from nbengine.models.layers.memory import WeightMemory
    from nbengine.models.layers.moe import SparseMoeBlock
    from nbengine.models.layers.weights import PackedFormats, WeightSlot
    from nbengine.models.sharding import DecoderShard
    from nbengine.models.step_output import StepOutput


class DecoderOptions(TypedDict):
    """The arguments that a family gets beside the configuration to build a rank's part of a model: the type of dense weights,
    their device, the longest sequence, the rank's place among others, the weights that stay quantised, and the memory
    of weights (None: each has its own)."""

    dtype: torch.dtype
    device: torch.device
    max_positions: NotRequired[int | None]
    parallel: NotRequired[ParallelState]
    packed: NotRequired[PackedFormats]
    memory: NotRequired[WeightMemory | None]


class CausalModel(Protocol):
    """One rank's part of a decoder, which is run under `torch.inference_mode`.

    The first pipeline stage embeds tokens, the last one has the output projection, and each has its own layers. The
    ranks of a stage run `step` together and get the same hidden states. Weights are uninitialised until a loader has
    filled `weight_slots()`; on the device "meta" they take no memory.
    """

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    hidden_dtype: torch.dtype
    """The type of hidden states and logits."""
    layout: RankLayout
    tp: Communicator
    """The group of the ranks among which each layer is divided."""
    shard: DecoderShard
    """The layers of this rank, and its heads."""
    on_layers: Callable[[int], None]
    """Called at once when a step has come on by some layers, with their number."""
    kept: KeptWeights | None
    """The file on disk that has the weights, or will have them, if there is one."""

    @property
    def has_logits(self) -> bool:
        """Return whether there is an output projection here: on the last stage of a model that generates."""

    @property
    def moe_blocks(self) -> list[SparseMoeBlock]:
        """List the blocks of this stage's layers that have experts divided among workers."""

    @property
    def product_instructions(self) -> str | None:
        """Return the name of the instructions that multiply with quantised weights; None: there are none."""

    @property
    def pads_single_rows(self) -> bool:
        """Return whether a step of one token has to be computed as two rows to give the same numbers as in a
        batch."""

    @property
    def is_recordable(self) -> bool:
        """Return whether a step of one token a request starts operations on a GPU and waits for none of them, so that
        it can be recorded once and computed again."""

    @property
    def goes_on(self) -> bool:
        """Return whether `step` takes further steps."""

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tensors that a checkpoint may have and that the model does not use."""

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """Return the weights that are others in this model, with the names of those."""

    @property
    def weights_bytes(self) -> int:
        """Return the memory of the weights in bytes."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of input_ids [T], in new memory; on the first stage alone."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata | StepMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states of `step`, without logits."""

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata | StepMetadata,
        inputs_embeds: Tensor | None = None,
        further: FurtherSteps | None = None,
    ) -> StepOutput:
        """Return the hidden states [T, hidden] of input_ids [T] at positions [T], both int64: on the last stage
        those after the final norm, before it what the next stage takes as `inputs_embeds`.

        `kv_caches` has one tensor for each layer of the stage, which gets the new keys and values at
        `attn.slot_mapping`. `inputs_embeds` [T, hidden], which is overwritten, takes the place of `input_ids`. The next
        step may overwrite the outcome.

        A step of one token a request may be followed by those that `further` allows, where the model `goes_on`. The
        outcome is then that of the last one, and what was given as inputs has been overwritten with its own.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocab_size] of hidden states [N, hidden] that a step gave; the same on all ranks.

        Raises:
            NBEngineError: there is no output projection here.
        """

    def dummy_forward(self) -> None:
        """Take part in the experts' computation for other engine cores' tokens without own tokens."""

    def warm_up(self, kernels: Kernels, kv_caches: list[Tensor], max_tokens: int) -> None:
        """Compile and prepare what steps of up to `max_tokens` with these caches need."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints; tied weights appear
        once."""

    def parameters(self) -> Iterator[Tensor]:
        """Yield every weight once."""

    def forget_addresses(self) -> None:
        """Take note that the weights are about to lie elsewhere in memory."""

    def redivided(self, layout: RankLayout) -> None:
        """Take note that the experts are divided in another way, and that this worker has another place now."""


@runtime_checkable
class Classifier(Protocol):
    """A `CausalModel` with a classification head in place of its output projection."""

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the prompts whose last tokens' hidden states are [N, hidden].

        Raises:
            NBEngineError: this is not the last stage.
        """
