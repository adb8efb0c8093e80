"""This module lists the families of the registry for people to read; it is free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbengine.models.checkpoints.gguf_architectures import ARCHITECTURES
from nbengine.models.configs.encoder_config import ARCHITECTURES as ENCODERS
from nbengine.models.registry import DECODERS, load_family

HEADER = ("models", "class in config.json", "GGUF", "computed by")
OWN = "nbengine"
_WRITTEN_AS = {
    "MistralForCausalLM": "LlamaForCausalLM",
    "MixtralForCausalLM": "LlamaForCausalLM",
    "BambaForCausalLM": "GraniteMoeHybridForCausalLM",
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM": "DeepseekV2ForCausalLM",
}
"""The classes whose files say that they are another one's."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """Models that run: what people call them, their classes in config.json, llama.cpp's names of them, and the
    code that computes them."""

    title: str
    architectures: tuple[str, ...]
    gguf: tuple[str, ...]
    how: str

    @property
    def lines(self) -> list[tuple[str, str, str, str]]:
        """Return rows of a table with `HEADER`, one a class, so that a line fits on a screen."""
        gguf = ", ".join(self.gguf) or "-"
        first, *others = self.architectures
        return [(self.title, first, gguf, self.how), *(("", name, "", "") for name in others)]


THROUGH_TRANSFORMERS = Runnable(
    "other decoders and encoders",
    ("classes of transformers whose layers take an attention function",),
    (),
    "transformers",
)


def runnable(registered: Mapping[str, str]) -> list[Runnable]:
    """List what runs: decoders in the registry's order, those that have been `registered`, and encoders."""
    by_reference: dict[str, list[str]] = {}
    for architecture, reference in DECODERS.items():
        if architecture not in registered:
            by_reference.setdefault(reference, []).append(architecture)
    rows = [
        Runnable(load_family(reference).title, tuple(names), _gguf_names(names), OWN)
        for reference, names in by_reference.items()
    ]
    rows += [Runnable("registered here", (name,), (), reference) for name, reference in registered.items()]
    return [*rows, Runnable("BERT, RoBERTa, XLM-RoBERTa (encoders)", ENCODERS, (), OWN)]


def markdown_table() -> str:
    """Return the table of docs/models.md: what runs, one line a family."""
    lines = [f"| {' | '.join(HEADER[:3])} |", "|---|---|---|"]
    for row in runnable({}):
        classes = ", ".join(f"`{name}`" for name in row.architectures)
        lines.append(f"| {row.title} | {classes} | {', '.join(row.gguf) or '-'} |")
    return "\n".join(lines)


def _gguf_names(architectures: list[str]) -> tuple[str, ...]:
    names = {_WRITTEN_AS.get(name, name) for name in architectures}
    return tuple(arch for arch, known in ARCHITECTURES.items() if known.name in names)
