"""The memory of a model's weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.layers.memory import Arena, Tally
from nbengine.models.loading import load_model
from nbengine.worker.memory.offload import WeightsOffload

CPU = torch.device("cpu")
DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from(DTYPES))))
def test_an_arena_of_the_counted_size_holds_all_tensors_apart_and_aligned(tensors):
    tally = Tally()
    for shape, dtype in tensors:
        assert tally.empty(shape, dtype).device.type == "meta"
    arena = Arena.of_size(tally.num_bytes)
    made = [arena.empty(shape, dtype) for shape, dtype in tensors]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    for number, (tensor, (shape, dtype)) in enumerate(zip(made, tensors, strict=True)):
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype is dtype
        assert tensor.is_contiguous()
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()
    with pytest.raises(RuntimeError):
        arena.empty([65 + tally.num_bytes], torch.uint8)


@pytest.mark.parametrize("name", ["random-tiny", "random-tiny-moe"])
def test_all_weights_but_experts_lie_in_one_storage_which_sleep_empties(name):
    model = load_model(resolve_model(ModelConfig(name)), CPU, torch.float32)
    experts, others = set(), set()
    for slot_name, slot in model.weight_slots().items():
        (experts if ".experts." in slot_name else others).add(slot.tensor.untyped_storage()._cdata)
    assert len(others) == 1
    assert not experts & others
    assert bool(experts) == (name == "random-tiny-moe")

    weights_bytes, num_tensors = model.weights_bytes, len(model.weight_slots())
    offload = WeightsOffload(model.parameters())
    offload.drop()
    assert weights_bytes <= offload.num_missing_bytes <= weights_bytes + 64 * num_tensors
    assert offload.restore() is False
    assert offload.num_missing_bytes == 0
