"""Classes of transformers as models without memory: made on the device "meta", divided among ranks, and tried out
for what their layers ask of attention."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbengine.errors import ModelLoadError, shown
from nbengine.kv_cache.specs import FULL, LayerRule
from nbengine.models.configs.transformers_config import GENERATORS
from nbengine.models.families import transformers_attention
from nbengine.models.families.transformers_attention import LayerShape, Probe, handle
from nbengine.models.families.transformers_masks import MaskProbe, masks_made
from nbengine.models.families.transformers_stacks import Paths, checked_stacks, noted_stacks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nbengine.models.configs.transformers_config import TransformersConfig

_LOG = logging.getLogger(__name__)
_META = torch.device("meta")
_PROBE_TOKENS = 3
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles transformers chooses by the longest sequence of a batch."""


def make_class(name: str, hf: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Make the model of the class `name` and a configuration without memory, with our attention function.

    Raises:
        ModelLoadError: transformers has no such class, or it does not take an attention function or the
            configuration.
    """
    import transformers
    from transformers.initialization import no_init_weights

    kind: Any = getattr(transformers, name, None)
    is_class = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_class:
        raise ModelLoadError(
            f"transformers {transformers.__version__} has no class {name}, and code that comes with a checkpoint "
            "(trust_remote_code) is never run"
        )
    if getattr(kind, "_is_stateful", False):
        raise _refused(name, "recurrent state")
    if not (kind._supports_attention_backend or kind._can_set_attn_implementation()):
        raise _refused(name, "attention of its own: the class takes no attention function")
    transformers_attention.register()
    try:
        with torch.inference_mode(False), _META, no_init_weights():
            made = kind._from_config(
                _class_config(kind, hf),
                dtype=dtype,
                attn_implementation=transformers_attention.NAME,
                **_without_pooler(kind),
            )
    except Exception as error:
        raise ModelLoadError(
            f"{name} of transformers does not take this config.json: {shown(str(error))}"
        ) from error
    if name.endswith(GENERATORS) and made.get_output_embeddings() is None:
        raise _refused(name, "no output projection (lm_head)")
    for module in made.modules():
        if isinstance(module, nn.Conv1d):
            raise _refused(name, "convolutions over the tokens")
    # With it, some classes look for padding in every batch, which has none, and wait for the device to tell.
    # (Not by the configuration's own __setattr__, which compares types.)
    vars(made.config)["pad_token_id"] = None
    return made.eval().requires_grad_(requires_grad=False)


def _class_config(kind: Any, hf: Mapping[str, Any]) -> Any:
    known = {name: value for name, value in hf.items() if not name.startswith("nbengine_")}
    # Sizes are stated under usual names, too, which overrides may have changed.
    for usual, own in (getattr(kind.config_class, "attribute_map", None) or {}).items():
        if usual in known:
            known[own] = known.pop(usual)
    return kind.config_class.from_dict(known)


def _without_pooler(kind: Any) -> dict[str, bool]:
    """Return the argument that leaves out a pooler behind the hidden states, where the class has one."""
    accepted = inspect.signature(kind.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}


def check_rope(
    model: PreTrainedModel, architecture: str, hf: Mapping[str, Any], max_positions: int | None
) -> None:
    """Check that the angles of a token's rotary embedding do not depend on other requests.

    Raises:
        ModelLoadError: they would; the message says with which `max_model_len` they do not.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        found = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(each in _LENGTH_DEPENDENT for each in found):
            limit = hf.get("original_max_position_embeddings") or _original_length(hf)
            if limit is None or (max_positions or hf["max_position_embeddings"]) > limit:
                known = "" if limit is None else f"; with max_model_len={limit} it runs"
                raise _refused(
                    architecture,
                    f"a rotary embedding whose angles depend on the longest sequence of a batch{known}",
                )


def _original_length(hf: Mapping[str, Any]) -> int | None:
    stated = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    found = stated.get("original_max_position_embeddings") if isinstance(stated, Mapping) else None
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class Tried:
    """The outcome of running a model without memory, with the paths of its modules.

    `trunk` is the submodel that turns tokens into the hidden states of which the class makes logits; `output` makes
    such an outcome. `layers` has the module that calls attention in each layer, and what it computes with.
    """

    trunk: str
    output: Callable[..., Any]
    layers: Mapping[int, tuple[str, LayerShape]]
    width: int
    """The numbers in a hidden state."""
    stacks: tuple[Paths, ...]
    """The linear layers that multiply the same input."""


_tried: dict[tuple[str, int], Tried] = {}


def try_out(model: PreTrainedModel, config: TransformersConfig, tp_size: int) -> Tried:
    """Run a model without memory, divided among `tp_size` ranks, and find what its layers ask for; once for each
    configuration.

    Raises:
        ModelLoadError: it needs what we do not do, or cannot be run like this.
    """
    key = config.hf_json, tp_size
    if key not in _tried:
        _tried[key] = _run_on_meta(model, config)
    return _tried[key]


def _run_on_meta(model: PreTrainedModel, config: TransformersConfig) -> Tried:
    name, probe = config.architecture, Probe(config.architecture)
    trunks: list[tuple[nn.Module, Any]] = []
    stacks: list[Paths] = []
    with _handled(model, probe), _watched(model, trunks), noted_stacks(model, stacks):
        try:
            logits = _run(model)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{name} cannot be tried out without weights: {shown(str(error))}"
            ) from error
    if len(trunks) != 1:
        raise _refused(name, f"{len(trunks)} submodels of which it makes logits")
    if config.num_labels:
        if logits.shape[-1] != config.num_labels:
            raise _refused(name, f"{logits.shape[-1]} classes, and config.json names {config.num_labels}")
    elif logits.shape[-1] != config.vocab_size:
        raise _refused(name, f"logits for {logits.shape[-1]} tokens, and a vocabulary of {config.vocab_size}")
    ((trunk, outcome),) = trunks
    if "position_ids" not in inspect.signature(trunk.forward).parameters:
        raise _refused(name, "a forward that takes no positions")
    if sorted(probe.layers) != list(range(config.num_layers)):
        others = config.num_layers - len(probe.layers)
        raise _refused(
            name, f"{others} of {config.num_layers} layers that keep something else than keys and values"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    rules = _rules_of_masks(model, name)
    layers = {
        index: (paths[id(module)], _with_rule(shape, config, index, rules.get(index)))
        for index, (module, shape) in sorted(probe.layers.items())
    }
    if not rules:
        _check_windows(config, (shape for _, shape in layers.values()))
    if len({(shape.num_heads, shape.num_kv_heads, shape.head_dim) for _, shape in layers.values()}) > 1:
        raise _refused(name, "layers with different heads")
    width = outcome.last_hidden_state.shape[-1]
    with _handled(model, Probe(name)):
        checked = checked_stacks(model, stacks, lambda: _run(model))
    return Tried(paths[id(trunk)], type(outcome), layers, width, checked)


def _run(model: PreTrainedModel, attention_mask: Tensor | None = None) -> Any:
    """Return the logits of some tokens, without numbers."""
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device=_META)
    positions = torch.zeros_like(ids)
    with _experts_on_meta(model), torch.inference_mode(mode=False), torch.no_grad():
        found = model(input_ids=ids, position_ids=positions, attention_mask=attention_mask, use_cache=False)
    return found.logits


def _rules_of_masks(model: PreTrainedModel, architecture: str) -> Mapping[int, LayerRule]:
    """Return what the masks of layers let their queries see, by the layers' numbers; layers of which masks do not tell
    are left out."""
    probe = MaskProbe(architecture)
    with _handled(model, probe), masks_made(model):
        try:
            _run(model, attention_mask=torch.ones((1, _PROBE_TOKENS), dtype=torch.int64, device=_META))
        except (RuntimeError, TypeError, ValueError) as error:
            # A class may take no mask, or ask for its numbers, and there are none. What its layers say is known without.
            _LOG.debug("the masks of %s are not known: %s", architecture, shown(str(error)))
    return probe.rules


def _with_rule(
    shape: LayerShape, config: TransformersConfig, index: int, mask: LayerRule | None
) -> LayerShape:
    """Enter which keys a layer's queries see: as its mask says and, where that is not known, config.json."""
    stated = config.cache_rules()[index]
    if mask is None and stated == FULL:
        return shape
    rule = mask or stated
    if mask is None and stated.kind == "window" and shape.window is not None:
        rule = LayerRule("window", shape.window)
    # The cache gives back what config.json says that nobody sees.
    if stated not in (FULL, rule):
        raise ModelLoadError(
            f"config.json gives layer {index} a {stated.kind} of {stated.size}, {config.architecture} {_in_words(rule)}"
        )
    sizes = {rule.kind: rule.size}
    return replace(shape, window=sizes.get("window"), chunk=sizes.get("chunk"))


def _in_words(rule: LayerRule) -> str:
    return "none" if rule == FULL else f"a {rule.kind} of {rule.size}"


def _check_windows(config: TransformersConfig, shapes: Iterable[LayerShape]) -> None:
    """Check, where masks are not known, that config.json states no window that no layer has."""
    if any(shape.window or shape.chunk for shape in shapes) or config.hf.get("use_sliding_window") is False:
        return
    for key in ("sliding_window", "attention_chunk_size"):
        if config.hf.get(key):
            raise _refused(config.architecture, f"a {key} of which its layers do not tell")


@contextlib.contextmanager
def _handled(model: PreTrainedModel, probe: Probe | MaskProbe) -> Iterator[None]:
    for module in model.modules():
        handle(module, probe)
    try:
        yield
    finally:
        for module in model.modules():
            handle(module, None)


@contextlib.contextmanager
def _watched(model: PreTrainedModel, found: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Note the outermost submodels that run, and their outcomes."""
    from transformers import PreTrainedModel

    depth = 0

    def begin(_module: nn.Module, _arguments: Any) -> None:
        nonlocal depth
        depth += 1

    def end(module: nn.Module, _arguments: Any, outcome: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            found.append((module, outcome))

    hooks: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module is not model:
            hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _experts_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """Have experts computed by products that need no numbers to know their shapes."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(each, getattr(each, "_experts_implementation_internal", None)) for each in configs.values()]
    for each, _ in before:
        each._experts_implementation_internal = "batched_mm"
    try:
        yield
    finally:
        for each, implementation in before:
            each._experts_implementation_internal = implementation


def _refused(architecture: str, feature: str) -> ModelLoadError:
    return ModelLoadError(f"{architecture} cannot run through transformers: it has {feature}")
