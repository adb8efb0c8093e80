"""Which model, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbengine.checks import one_of, require, require_count

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ModelConfig:
    """A model by name and, once `nbengine.models.files.resolve_model` has found it, by place.

    `directory` then holds `config.json`, `tokenizer.json` and, where the model has them,
    `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja`; `weights` are the absolute paths
    of its weight files.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    revision: str | None = None
    enforce_eager: bool = False
    logits_processors: tuple[str, ...] = ()
    """Classes as "module:Class", see `nbengine.sampling.logits_processor`."""

    directory: str = ""
    weights: tuple[str, ...] = ()
    is_moe: bool = False
    """Whether the model found has a mixture of experts, which the engine cores compute together."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("device", self.device, DEVICES)
        require("model", self.model, bool(self.model), "a model name, a directory or a .gguf file")
        if self.max_model_len is not None:
            require_count("max_model_len", self.max_model_len)
        for name in self.logits_processors:
            parts = name.split(":") if isinstance(name, str) else ()
            require(
                "logits_processors", name, len(parts) == 2 and all(parts), 'made of strings "module:Class"'
            )
        require("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)")

    @property
    def resolved(self) -> bool:
        """Whether the model's files have been found."""
        return bool(self.directory)
