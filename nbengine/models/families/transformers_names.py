"""The weights of transformers' models: their names in checkpoints, their places in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.tensor_names import COMPUTED, TensorPart
from nbengine.models.configs.transformers_config import (
    TransformersConfig,
    transformers_config,
    unused_tensors,
)
from nbengine.models.families.transformers_class import make_class
from nbengine.models.families.transformers_division import NUM_EXPERTS_DIMENSIONS, Part, holds_experts
from nbengine.models.families.transformers_stacks import Paths, make_stacks
from nbengine.models.layers.memory import WeightMemory
from nbengine.models.layers.weights import Slots, WeightSlot

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

_GATE_AND_UP = ("gate_proj", "up_proj")
_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")


class TensorNames:
    """The names of a model's weights. Experts that transformers has in one tensor have one name each:
    `...experts.3.gate_proj.weight`. Tensors of files in whose names one of the patterns `left_out` is found may be
    there and are not used."""

    def __init__(self, model: PreTrainedModel, left_out: Sequence[str] = ()) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._by_pattern = {
            pattern: converter for converter in self._converters for pattern in converter.source_patterns
        }
        self._prefix = model.base_model_prefix
        self._own = dict(model.state_dict())
        self.tied = dict(model.all_tied_weights_keys)
        """The names of tied weights, each with that of the weight that it is."""
        ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), *left_out)
        self._ignored = tuple(map(re.compile, ignored))
        self.fused = {
            name: self._projections(name)
            for name in self._own
            if any(_fills(converter, name) for converter in self._converters)
            or holds_experts(model.get_submodule(name.rpartition(".")[0]), name)
        }
        """The tensors that hold all experts of a layer, with the projections that they have one after the other."""

    def parts(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, TensorPart]]:
        """Yield our names of what a file's tensor holds, each with its place in it; see `Family.tensor_parts`.

        Raises:
            ModelLoadError: the tensor has to be converted in a way that is not offered.
        """
        from transformers.core_model_loading import apply_renamings, rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._own)
        is_own = renamed in self._own
        if not is_own and (renamed.endswith(COMPUTED) or any(each.search(renamed) for each in self._ignored)):
            return
        if pattern is not None:
            converter = self._by_pattern[pattern]
            if _is_chunk(converter):
                yield from self._chunks(converter, renamed, name, shape)
                return
            self._check(converter, name)
            found = _NUMBER.search(apply_renamings(name, self._renamings))
            if found is None or renamed not in self.fused:
                raise ModelLoadError(f"tensor {name} is no expert's of a weight of this model ({renamed})")
            projection = self.fused[renamed][converter.source_patterns.index(pattern)]
            yield _expert(renamed, int(found[1]), projection), TensorPart(name, shape)
        elif renamed in self.fused and len(shape) == NUM_EXPERTS_DIMENSIONS:
            projections = self.fused[renamed]
            rows = shape[1] // len(projections)
            for expert in range(shape[0]):
                for place, projection in enumerate(projections):
                    part = TensorPart(name, (rows, shape[2]), expert, place * rows)
                    yield _expert(renamed, expert, projection), part
        else:
            yield renamed, TensorPart(name, shape)

    def slots(self, name: str, tensor: Tensor, part: Part | None) -> Slots:
        """Yield the places of one of the model's own tensors."""
        projections = self.fused.get(name)
        if projections is not None:
            rows = tensor.shape[1] // len(projections)
            full = None if part is None else (part.full_shape[1] // len(projections), part.full_shape[2])
            for expert in range(tensor.shape[0]):
                for place, projection in enumerate(projections):
                    own = tensor[expert, place * rows : (place + 1) * rows]
                    slot = WeightSlot.whole(own)
                    if part is not None and full is not None:
                        slot = WeightSlot(own, full, part.dim - 1, part.start)
                    yield _expert(name, expert, projection), slot
        elif part is not None:
            yield name, WeightSlot(tensor, part.full_shape, part.dim, part.start)
        else:
            yield name, WeightSlot.whole(tensor)

    def _chunks(
        self, converter: WeightConverter, first: str, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """Yield the tensors of equal size that a file's tensor has one after the other; `first` is our name of the
        first one."""
        targets = [target.lstrip(".^").rstrip("$") for target in converter.target_patterns]
        rows = shape[0] // len(targets)
        names = [first.replace(targets[0], target) for target in targets]
        if rows * len(targets) != shape[0] or not all(own in self._own for own in names):
            raise ModelLoadError(f"tensor {name} {list(shape)} does not consist of {', '.join(names)}")
        for place, own in enumerate(names):
            yield own, TensorPart(name, (rows, *shape[1:]), None, place * rows)

    def _projections(self, name: str) -> tuple[str, ...]:
        last = name.rpartition(".")[2]
        return _GATE_AND_UP if last == "gate_up_proj" else (last,)

    def _check(self, converter: WeightConverter, name: str) -> None:
        kinds = [type(each).__name__ for each in converter.operations]
        dims = [getattr(each, "dim", None) for each in converter.operations]
        if (kinds, dims) not in ((["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])):
            raise ModelLoadError(
                f"tensor {name} has to be converted by {' and '.join(kinds)}, which is not offered for models that run "
                "through transformers; save the model with transformers 5 (save_original_format=False)"
            )


@lru_cache(maxsize=4)
def _names_of_json(hf: str) -> TensorNames:
    config = transformers_config(json.loads(hf))
    unused = [f"^{re.escape(name)}" for name in unused_tensors(config.hf)]
    return TensorNames(make_class(config.architecture, config.hf, torch.float32), unused)


def tensor_names(config: TransformersConfig) -> TensorNames:
    """Return the names of a configuration's weights, made once."""
    return _names_of_json(config.hf_json)


def _is_chunk(converter: WeightConverter) -> bool:
    """Return whether a tensor of the file is several of the model's, one after the other."""
    operations: list[Any] = list(converter.operations)
    return (
        [type(each).__name__ for each in operations] == ["Chunk"]
        and operations[0].dim == 0
        and operations[0].num_shards_attribute is None
        and len(converter.source_patterns) == 1
    )


def _fills(converter: WeightConverter, name: str) -> bool:
    """Return whether a converter puts the experts of the tensor `name` together."""
    if type(converter.operations[0]).__name__ != "MergeModulelist":
        return False
    return any(name.endswith(target.lstrip(".^").rstrip("$")) for target in converter.target_patterns)


def _expert(name: str, expert: int, projection: str) -> str:
    return f"{name.rpartition('.')[0]}.{expert}.{projection}.weight"


def place_weights(
    model: PreTrainedModel,
    tied: Mapping[str, str],
    device: torch.device,
    memory: WeightMemory | None,
    stacks: Sequence[Paths] = (),
) -> dict[str, Tensor]:
    """Give a model without memory its weights, uninitialised, and compute the tensors that follow from its
    configuration; return the weights by name. On "meta" nothing is computed. The weights of the linear layers in one
    of the `stacks` lie one after the other, and are multiplied together."""
    dtypes = {_names_of(key): dtype for key, dtype in model._get_dtype_plan(model.dtype).items()}
    weights: dict[str, Tensor] = {}

    def dtype_of(name: str, default: torch.dtype) -> torch.dtype:
        return next((each for key, each in dtypes.items() if key.search(name)), default)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if memory is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return memory.empty(shape, dtype)

    stacked: dict[tuple[int, str], Tensor] = {}
    for paths in stacks:
        names = [f"{path}.{own}" for path in paths for own in ("weight", "bias")]
        kinds = {dtype_of(name, model.dtype) for name in names}
        if len(kinds) == 1 and not any(name in tied for name in names):
            for stack in make_stacks(model, [paths]):
                parts = stack.allocate(empty, *kinds)
                stacked.update({(id(linear), own): part for linear, own, part in parts})
    with torch.device(device):
        for path, module in model.named_modules():
            for own, held in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{own}" if path else own
                if held is None or name in tied:
                    continue
                if own in module._non_persistent_buffers_set:
                    module._buffers[own] = torch.empty_like(held, device=device)
                    continue
                taken = stacked.get((id(module), own))
                if taken is None:
                    taken = empty(tuple(held.shape), dtype_of(name, held.dtype))
                if own in module._parameters:
                    taken = nn.Parameter(taken, requires_grad=False)
                    module._parameters[own] = taken
                else:
                    module._buffers[own] = taken
                # Nothing is to be drawn for it: the loader fills it.
                taken._is_hf_initialized = True  # type: ignore[attr-defined]
                weights[name] = taken
        for name, source in tied.items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            if source in weights and own in module._parameters:
                module._parameters[own] = weights[source]
        if device.type != "meta":
            model.initialize_weights()
    return weights


def _names_of(key: str) -> re.Pattern[str]:
    return re.compile(rf"(^|\.){re.escape(key)}(\.|$)")
