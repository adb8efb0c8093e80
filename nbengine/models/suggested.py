"""Small models that are worth fetching, as data: `%engine models`, `nbengine models` and docs/models.md show them."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.models.checkpoints.fetch import ALL_MINILM_L6_V2, SMOLLM2_135M

_BYTES_PER_PARAMETER = 2
"""The weights of models on the hub are held in 16 bits."""


@dataclass(frozen=True, slots=True)
class Suggested:
    """A model to fetch: its name, its number of parameters, the bytes of its weights in memory, and its use."""

    name: str
    parameters: float
    weights_bytes: int
    good_for: str
    is_decoder: bool = True

    @property
    def billions(self) -> str:
        """Return the number of parameters in words, such as `0.36 billion`."""
        return f"{self.parameters / 1e9:.2g} billion"


def _on_hub(name: str, parameters: float, good_for: str) -> Suggested:
    return Suggested(name, parameters, int(parameters * _BYTES_PER_PARAMETER), good_for)


SUGGESTED = (
    Suggested("smollm2-135m", 135e6, SMOLLM2_135M.files[0].size, "trying everything at once; it babbles"),
    Suggested("all-minilm-l6-v2", 23e6, ALL_MINILM_L6_V2.files[0].size, "embeddings of sentences", False),
    _on_hub("HuggingFaceTB/SmolLM2-360M-Instruct", 0.36e9, "short texts, on any machine"),
    _on_hub("Qwen/Qwen2.5-0.5B-Instruct", 0.49e9, "JSON and simple questions"),
    _on_hub("Qwen/Qwen3-0.6B", 0.6e9, "the same, and thinking aloud"),
    _on_hub("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.7e9, "the smallest that is pleasant to talk to"),
    _on_hub("Qwen/Qwen3-1.7B", 1.7e9, "reasoning in small steps"),
    _on_hub("Qwen/Qwen3-4B", 4.0e9, "longer tasks; a GPU helps"),
    _on_hub("mistralai/Mistral-7B-Instruct-v0.3", 7.2e9, "a GPU with 24 GB"),
)
"""The models, smallest first within a source: aliases, whose files are pinned, and then the hub's."""


def markdown_table() -> str:
    """Return the table of docs/models.md."""
    lines = ["| model | parameters | weights in memory | good for |", "|---|---|---|---|"]
    for each in SUGGESTED:
        lines.append(
            f"| `{each.name}` | {each.billions} | {each.weights_bytes / 1e9:.3g} GB | {each.good_for} |"
        )
    return "\n".join(lines)
