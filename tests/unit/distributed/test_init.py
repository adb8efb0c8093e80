"""Places where workers cannot meet, and how their state ends."""

from __future__ import annotations

import pytest
import torch

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.init import init_parallel
from nbengine.distributed.layout import ALONE
from nbengine.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "method", ["tcp://127.0.0.1", "tcp://:5", "tcp://127.0.0.1:x", "env://", "127.0.0.1:5"]
)
def test_what_is_no_place_is_refused_by_name(tmp_path, method):
    with pytest.raises(
        InvalidArgumentError, match="distributed_init_method must be None, 'tcp://HOST:PORT' or"
    ):
        init_parallel(
            ALONE, torch.device("cpu"), init_method=method, directory=str(tmp_path), max_tensor_bytes=1
        )


def test_closing_lets_go_of_everything_the_world_last():
    class End:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)

    closed = []
    ParallelState(ALONE, End("tp"), End("previous"), End("next"), End("world")).close()
    assert closed == ["tp", "previous", "next", "world"]
    SINGLE.close()
