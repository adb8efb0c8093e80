"""Small models of several shapes with seeded random weights: a checkpoint for the engine, transformers as the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from nbengine import RequestOutput

HEAD_DIM = 16
VOCAB_SIZE = 258
"""Of random-tiny, whose tokenizer these models have: a token a byte, and two special ones."""
SURE = 2e-5
"""Logits (of unit size) that are further apart keep their order however the float32 sums behind them are taken."""


QUANTISED = "int8"
"""The quantisation with which two workers have whole blocks of `TinyModel.of_blocks`."""


@dataclass(frozen=True)
class TinyModel:
    """A Llama-like model, or one with experts; `kind` as in transformers' `KindForCausalLM`."""

    kind: str
    heads: int
    kv_heads: int
    tied: bool = False
    layers: int = 3
    inner: int = 96
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_blocks(cls) -> TinyModel:
        """A model whose steps are prepared where it is quantised: its heads and features are whole blocks."""
        return cls("Llama", 4, 2, inner=128, settings={"head_dim": 32})

    def write(self, directory: Path) -> PreTrainedModel:
        """Write the checkpoint, and return the model."""
        model = self._make()
        model.save_pretrained(directory)
        source = Path(resolve_model(ModelConfig("random-tiny")).directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / name, directory / name)
        return model

    def _make(self) -> PreTrainedModel:
        import transformers

        settings = {"head_dim": HEAD_DIM} if self.kind.startswith("Qwen3") else {}
        config = getattr(transformers, f"{self.kind}Config")(
            vocab_size=VOCAB_SIZE,
            hidden_size=HEAD_DIM * self.heads,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=512,
            tie_word_embeddings=self.tied,
            bos_token_id=VOCAB_SIZE - 2,
            eos_token_id=VOCAB_SIZE - 1,
            **settings,
            **self.settings,
        )
        model = getattr(transformers, f"{self.kind}ForCausalLM")._from_config(
            config, attn_implementation="eager"
        )
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() >= 2 else 0.5
                parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * scale)
        return model.float().eval()


def logits_of(model: PreTrainedModel, prompt: list[int] | Tensor, output: list[int]) -> Tensor:
    """The model's logits [len(output), vocabulary] before each token of an output, in one forward pass.

    A prompt may be embeddings [tokens, hidden].
    """
    table = model.get_input_embeddings().weight
    with torch.inference_mode():
        before = prompt if isinstance(prompt, torch.Tensor) else table[prompt]
        inputs = torch.cat((before, table[output]))
        return model(inputs_embeds=inputs[None]).logits[0, len(before) - 1 : -1]


def check_greedy(model: PreTrainedModel, prompt: list[int] | Tensor, output: list[int]) -> None:
    """Check that an output is what greedy decoding gives: each token is the likeliest after those before it.

    The oracle must be sure of each, so that rounding cannot be what tells them apart.
    """
    assert output
    values, tokens = logits_of(model, prompt, output).topk(2)
    best, second = values.unbind(-1)
    assert float((best - second).min()) > SURE, "a near tie: choose another seed for the model"
    assert output == tokens[:, 0].tolist()


def check_greedy_output(model: PreTrainedModel, output: RequestOutput) -> None:
    """`check_greedy` of a request's only completion."""
    assert output.finished
    assert output.prompt_token_ids is not None
    check_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)
