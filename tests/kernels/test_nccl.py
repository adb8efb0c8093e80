"""One GPU can test the exchange between GPUs in a world of one."""

from __future__ import annotations

import pytest
import torch

from nbengine.distributed.init import init_parallel
from nbengine.distributed.layout import ALONE
from nbengine.distributed.torch_communicator import TorchCommunicator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def joined(tmp_path):
    device = torch.device("cuda", 0)
    method = f"file://{tmp_path}/rendezvous"
    state = init_parallel(
        ALONE, device, init_method=method, directory=str(tmp_path), max_tensor_bytes=1 << 20
    )
    yield state, TorchCommunicator(state.world.stage_group(), device)
    state.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_world_of_one_sums_gathers_and_meets(joined, dtype):
    _, group = joined
    x = torch.randn(32, 576, device="cuda").to(dtype)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x)
    group.barrier()


def test_an_all_reduce_can_be_captured_in_a_graph(joined):
    _, group = joined
    x = torch.ones(32, 576, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.all_reduce(x)
        y = x * 2
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 6).all()
