"""The outputs that callers get back for pooling requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """The outcome as it left the engine: float32 [dimensions], [labels] or ("encode") [tokens, hidden size].

    The array may be read-only.
    """

    data: NDArray[np.float32]


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return the number of dimensions of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Return the number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of how well two texts fit together.

    It is a cosine in [-1, 1], or a probability if the model was made for scoring.
    """

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """A finished pooling request; there are no unfinished ones."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    prompt: str | None = None


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its vector."""


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and its labels' probabilities."""


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Two texts and their score; `prompt_token_ids` has the tokens of both."""


def as_embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    """Convert the outcome of the task "embed" to the output that callers get."""
    outputs = EmbeddingOutput(output.outputs.data.tolist())
    return EmbeddingRequestOutput(output.request_id, outputs, **_common(output))


def as_classification(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
    """Convert the outcome of the task "classify" to the output that callers get."""
    outputs = ClassificationOutput(output.outputs.data.tolist())
    return ClassificationRequestOutput(output.request_id, outputs, **_common(output))


def as_score(output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
    """Convert the outcome of the task "score" to the output that callers get."""
    outputs = ScoringOutput(float(output.outputs.data[0]))
    return ScoringRequestOutput(output.request_id, outputs, **_common(output))


def _common(output: PoolingRequestOutput[PoolingOutput]) -> dict[str, Any]:
    names = ("prompt_token_ids", "finished", "num_cached_tokens", "prompt")
    return {name: getattr(output, name) for name in names}
