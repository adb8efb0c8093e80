"""The metadata of recurrent layers says where states come from and go to, and refuses what cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbengine.errors import InvalidArgumentError
from nbengine.kernels.dispatch import select_recurrent_kernels
from nbengine.kernels.recurrent_metadata import Checkpoints, build_recurrent_metadata
from nbengine.kernels.torch.recurrent import TorchRecurrent

CPU = torch.device("cpu")


def metadata(lens, slots, sources, checkpoints=(), num_slots=8):
    columns = np.array(checkpoints, np.int32).reshape(-1, 3).T
    arrays = (np.array(column, np.int32) for column in (lens, slots, sources))
    kept = Checkpoints(*columns)
    return build_recurrent_metadata(*arrays, kept, num_slots=num_slots, kernels=TorchRecurrent(), device=CPU)


def test_checkpoints_are_found_by_request_in_order():
    result = metadata([1, 5, 9], [0, 1, 2], [-1, 1, 7], [(2, 8, 3), (0, 1, 4), (2, 4, 5)])
    assert result.query_start_loc.tolist() == [0, 1, 6, 15]
    assert result.checkpoint_start_loc.tolist() == [0, 1, 1, 3]
    assert result.checkpoint_requests.tolist() == [0, 2, 2]
    assert result.checkpoint_ends.tolist() == [1, 4, 8]
    assert result.checkpoint_slots.tolist() == [4, 5, 3]
    assert (result.num_reqs, result.num_tokens, result.max_query_len, result.num_decodes) == (3, 15, 9, 1)


def test_a_step_may_have_no_checkpoints():
    result = build_recurrent_metadata(
        *(np.array([n], np.int32) for n in (3, 0, -1)), num_slots=1, kernels=TorchRecurrent(), device=CPU
    )
    assert result.checkpoint_start_loc.tolist() == [0, 0]
    assert not len(result.checkpoint_slots)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], [], []), "query_lens, slots, sources must be of one length, at least 1"),
        (([1], [0, 1], [0]), "query_lens, slots, sources must be of one length"),
        (([1], [8], [0]), "slots must be from 0 to 7"),
        (([1], [-1], [0]), "slots must be from 0 to 7"),
        (([1], [0], [8]), "sources must be from -1 to 7"),
        (([1], [0], [-2]), "sources must be from -1 to 7"),
        (([1, 1], [3, 3], [-1, -1]), "slots must be all different"),
        (([4], [3], [-1], [(0, 2, 3)]), "slots must be all different"),
        (([1, 1], [3, 4], [4, -1]), "sources must be not written by other requests"),
        (([4], [3], [5], [(0, 2, 5)]), "sources must be not written by other requests"),
        (([4], [3], [-1], [(1, 2, 4)]), r"checkpoints\.requests must be from 0 to 0"),
        (([4], [3], [-1], [(0, 5, 4)]), r"checkpoints\.ends must be from 1 to"),
        (([4], [3], [-1], [(0, 0, 4)]), r"checkpoints\.ends must be from 1 to"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, said):
    with pytest.raises(InvalidArgumentError, match=said):
        metadata(*arguments)


def test_the_cpu_gets_compiled_kernels_and_other_devices_plain_torch_with_a_warning(caplog):
    assert select_recurrent_kernels(CPU, torch.bfloat16).name == "cpu"
    assert not caplog.records
    assert select_recurrent_kernels(torch.device("meta"), torch.float32).name == "torch"
    assert "recurrent layers in torch.float32 on meta run through plain torch" in caplog.text
    with pytest.raises(InvalidArgumentError, match="dtype must be float32, bfloat16 or float16"):
        select_recurrent_kernels(CPU, torch.float64)
