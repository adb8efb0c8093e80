"""Encoders that run through their class of transformers: its layers, with our attention over a flat batch of whole
prompts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nbengine.errors import ModelLoadError, NBEngineError, shown
from nbengine.models.configs.transformers_encoder_config import TransformersEncoderConfig
from nbengine.models.encoder_model import EncoderModel
from nbengine.models.families.transformers_attention import handle
from nbengine.models.families.transformers_class import check_rope, make_class
from nbengine.models.families.transformers_names import TensorNames, place_weights
from nbengine.models.families.transformers_prompts import PromptAttention
from nbengine.models.families.transformers_stacks import Paths, checked_stacks, noted_stacks
from nbengine.models.layers.dense import use_dense_products
from nbengine.models.layers.encoder_attention import PromptGroup
from nbengine.models.layers.memory import WeightMemory
from nbengine.models.layers.weights import WeightSlot

_META = torch.device("meta")
_PROBE_TOKENS = 3


@lru_cache(maxsize=4)
def encoder_names(architecture: str, stated: str, hf_json: str) -> TensorNames:
    """Return the names of an encoder's weights, made once; arguments as in `TransformersEncoderConfig`."""
    model = make_class(architecture, TransformersEncoderConfig.hf_of(hf_json), torch.float32)
    left_out = (
        []
        if hasattr(model.base_model, "pooler") and _has_weights(model.base_model.pooler)
        else [r"(^|\.)pooler\."]
    )
    if stated != architecture:
        # The head that fills in masked tokens.
        left_out.append(rf"^(?!{model.base_model_prefix}\.)")
    return TensorNames(model, left_out)


class TransformersEncoder(EncoderModel):
    """An encoder of transformers. A step runs the class's submodel that makes hidden states on all tokens as one
    sequence, with their positions; classes come from the class's own `forward`, whose submodel then answers with the
    pooled states, as sequences of one token.

    Raises:
        ModelLoadError: the class does not take the configuration, or needs what we do not do.
    """

    def __init__(
        self,
        config: TransformersEncoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: WeightMemory | None = None,
    ) -> None:
        self.config: TransformersEncoderConfig = config
        self.dtype = dtype
        self.device = device
        self.on_layers: Callable[[int], None] = lambda _count: None
        self._names = encoder_names(config.architecture, config.stated, config.hf_json)
        self._model = make_class(config.architecture, config.hf, dtype)
        check_rope(self._model, config.architecture, config.hf, config.num_positions)
        self._trunk: nn.Module = self._model.base_model
        self._offset = self._checked_offset()
        self._attention = PromptAttention(config.architecture, lambda: self.on_layers(1))
        for module in self._model.modules():
            handle(module, self._attention)
        self._options = self._options_of_forward()
        self._given: Any = None
        self._stacks: tuple[Paths, ...] = ()
        self._output, self._pooler = self._tried_out()
        if self._trunk is not self._model:
            self._forward_trunk = self._trunk.forward
            vars(self._trunk)["forward"] = self._run_trunk
        self._weights = place_weights(self._model, self._names.tied, device, memory, self._stacks)
        use_dense_products(self._model)

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_types: Tensor, groups: list[PromptGroup]
    ) -> Tensor:
        """See `EncoderModel.forward`."""
        self._attention.begin(groups)
        named = {"token_type_ids": token_types[None]} if self._options else {}
        outcome = self._trunk(input_ids=input_ids[None], position_ids=positions[None] + self._offset, **named)
        hidden: Tensor = outcome.last_hidden_state[0]
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        """See `EncoderModel.classify`.

        Raises:
            NBEngineError: the model has no classification head.
        """
        if not self.config.num_labels:
            raise NBEngineError("the model has no classification head")
        states = hidden.to(self.dtype)[:, None]
        pooled = {} if self._pooler is None else {"pooler_output": self._pooler(states)}
        self._given = self._output(last_hidden_state=states, **pooled)
        try:
            logits: Tensor = self._model(
                input_ids=torch.ones(states.shape[:2], dtype=torch.int64, device=hidden.device)
            ).logits
        finally:
            self._given = None
        return logits

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `EncoderModel.weight_slots`."""
        slots: dict[str, WeightSlot] = {}
        for name, weight in self._weights.items():
            slots.update(self._names.slots(name, weight, None))
        return slots

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Return the tied weights: `encoder_names` leaves out what else the model does not use."""
        return frozenset(self._names.tied)

    def parameters(self) -> Iterator[Tensor]:
        """See `EncoderModel.parameters`."""
        return iter(self._weights.values())

    def _run_trunk(self, *arguments: Any, **named: Any) -> Any:
        if self._given is not None:
            return self._given
        return self._forward_trunk(*arguments, **named)

    def _checked_offset(self) -> int:
        """Return the row of the position embeddings that a prompt's first token gets."""
        stated = self.config.position_offset
        for path, module in self._trunk.named_modules():
            if path.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                found = 0 if module.padding_idx is None else module.padding_idx + 1
                if found != stated:
                    raise _refused(
                        self.config.architecture, f"positions that begin at {found}, not at {stated}"
                    )
        return stated

    def _options_of_forward(self) -> bool:
        """Return whether the class takes the segments of tokens."""
        accepted = inspect.signature(self._trunk.forward).parameters
        if "position_ids" not in accepted:
            raise _refused(self.config.architecture, "a forward that takes no positions")
        return "token_type_ids" in accepted

    def _tried_out(self) -> tuple[Callable[..., Any], nn.Module | None]:
        """Run the model without memory; return what makes an outcome of the submodel, and the module that its
        classification head needs beside the hidden states."""
        name = self.config.architecture
        found: dict[str, Any] = {}
        pooler = getattr(self._trunk, "pooler", None) if self.config.num_labels else None
        hooks = [self._trunk.register_forward_hook(lambda _module, _given, out: found.update(outcome=out))]
        if isinstance(pooler, nn.Module):
            hooks.append(
                pooler.register_forward_hook(lambda _module, given, out: found.update(pooled=(given, out)))
            )
        stacks: list[Paths] = []
        try:
            with noted_stacks(self._model, stacks):
                made = self._run_on_meta()
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{name} cannot be tried out without weights: {shown(str(error))}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        self._stacks = checked_stacks(self._model, stacks, self._run_on_meta)
        outcome = found["outcome"]
        width, labels = outcome.last_hidden_state.shape[-1], self.config.num_labels
        if width != self.config.hidden_size:
            raise _refused(
                name, f"hidden states of {width} numbers, and config.json says {self.config.hidden_size}"
            )
        if not labels:
            return type(outcome), None
        if made.logits.shape[-1] != labels:
            raise _refused(name, f"{made.logits.shape[-1]} classes, and config.json names {labels}")
        if getattr(outcome, "pooler_output", None) is None:
            return type(outcome), None
        (given, *_), pooled = found.get("pooled", ((None,), None))
        if given is not outcome.last_hidden_state or pooled is not outcome.pooler_output:
            raise _refused(name, "a pooler that does not take hidden states")
        return type(outcome), pooler

    def _run_on_meta(self) -> Any:
        """Return the outcome for some tokens, without numbers."""
        ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device=_META)
        named = {"token_type_ids": ids} if self._options else {}
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._model(input_ids=ids, position_ids=ids, **named)


def _has_weights(pooler: nn.Module | None) -> bool:
    return pooler is not None and any(True for _ in pooler.parameters())


def _refused(architecture: str, feature: str) -> ModelLoadError:
    return ModelLoadError(f"{architecture} cannot run through transformers: it has {feature}")
