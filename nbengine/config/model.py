"""The configuration of the model: its name, its files, and the way in which it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbengine.checks import one_of, require, require_count, require_line
from nbengine.config.registered_models import check_reference, registered_models

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf")
TOKENIZER_MODES = ("auto", "fast", "slow")
GENERATION_CONFIGS = ("auto", "none")
MODEL_IMPLS = ("auto", "nbengine", "transformers")
DEVICES = ("auto", "cpu", "cuda")
ACTIVATION_DTYPES = ("auto", "int16")
ROUNDINGS = {"int8": 8, "int4": 4}
"""The values of `quantization`, and the bits of a weight's level that each asks for."""


@dataclass(frozen=True)
class ModelConfig:
    """A model by name and, once `nbengine.models.checkpoints.files.resolve_model` has found it, by its files.

    `directory` then holds `config.json`, `tokenizer.json` and, where the model has them,
    `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja`; `weights` are the absolute
    paths of its weight files. A tokenizer whose `tokenizer.json` had to be made lies in
    `tokenizer_directory`. `chat_template` is the text of a template. With `enforce_eager` a GPU's decode steps are not
    recorded as graphs. Products with quantised weights round what they are multiplied with: `activation_dtype` is "auto",
    8 bits, and 16 before the output projection, or "int16" for all.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    chat_template: str | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    activation_dtype: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    enforce_eager: bool = False
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    logits_processors: tuple[str, ...] = ()
    """Classes as "module:Class", see `nbengine.sampling.logits_processor`."""

    directory: str = ""
    tokenizer_directory: str = ""
    weights: tuple[str, ...] = ()
    is_moe: bool = False
    """True if the model that was found has a mixture of experts, which the engine cores compute together."""
    families: dict[str, str] = field(default_factory=registered_models)
    """The family's class, as "module:Class", of each architecture that was registered where the engine was
    started (`nbengine.register_model`)."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("tokenizer_mode", self.tokenizer_mode, TOKENIZER_MODES)
        one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("model_impl", self.model_impl, MODEL_IMPLS)
        one_of("device", self.device, DEVICES)
        self._check_quantization()
        self._check_activations()
        require("model", self.model, bool(self.model), "a model name, a directory or a .gguf file")
        if self.max_model_len is not None:
            require_count("max_model_len", self.max_model_len)
        for name in self.logits_processors:
            parts = name.split(":") if isinstance(name, str) else ()
            require(
                "logits_processors", name, len(parts) == 2 and all(parts), 'made of strings "module:Class"'
            )
            require_line("logits_processors", name)
        for reference in self.families.values():
            check_reference("families", reference)
        require("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)")

    def _check_quantization(self) -> None:
        asked = self.quantization
        if asked is None:
            return
        names = " or ".join(map(repr, ROUNDINGS))
        require(
            "quantization",
            asked,
            asked in ROUNDINGS,
            f"None, {names} (files of AWQ, GPTQ and GGUF say themselves how they are quantised)",
        )
        only = "only the CPU computes with quantised weights"
        require("quantization", asked, self.device != "cuda", f"None with device='cuda' ({only})")
        exact = "with which all weights are held in 32 bits; leave dtype out, or ask for 'bfloat16'"
        require("quantization", asked, self.dtype != "float32", f"None with dtype='float32', {exact}")

    def _check_activations(self) -> None:
        asked = self.activation_dtype
        one_of("activation_dtype", asked, ACTIVATION_DTYPES)
        if asked == "auto":
            return
        only = "only the CPU computes with quantised weights"
        require("activation_dtype", asked, self.device != "cuda", f"'auto' with device='cuda' ({only})")
        exact = "'auto' with dtype='float32', with which nothing is rounded"
        require("activation_dtype", asked, self.dtype != "float32", exact)

    @property
    def tokenizer_files(self) -> str:
        """Return the directory with the tokenizer of a resolved model."""
        return self.tokenizer_directory or self.tokenizer or self.directory

    @property
    def resolved(self) -> bool:
        """Tell whether the model's files have been found."""
        return bool(self.directory)
