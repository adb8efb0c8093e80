"""How a worker joins the others of its engine: torch.distributed, its tensor-parallel group, and its pipeline links."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nbengine.distributed.communicator import Communicator, ParallelState, SingleRank
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import Party, Rendezvous, interface_towards, loopback_interface
from nbengine.distributed.torch_communicator import TorchCommunicator, TorchLink
from nbengine.errors import EngineStartError
from nbengine.kernels.dispatch import shares_memory

START_SECONDS = 120.0
"""For all ranks to come: they import torch at the same time, on however few cores there are."""
STEP_SECONDS = 1800.0
"""After which a rank gives up waiting for another in the middle of a step."""


def init_parallel(
    layout: RankLayout,
    device: torch.device,
    *,
    init_method: str,
    directory: str,
    max_tensor_bytes: int,
    dtype: torch.dtype | None = None,
    timeout: float = START_SECONDS,
) -> ParallelState:
    """Join the other workers of the engine; returns when all have come, and everything is connected.

    torch.distributed is initialised for the whole process, with NCCL for a GPU and gloo for a CPU, so a process can be
    in one engine at a time. `directory` is private to the engine (0700), `max_tensor_bytes` the size of the largest
    tensor that is sent from stage to stage, `dtype` the model's: what sums of it need is compiled now, if it is known.

    Raises:
        InvalidArgumentError: `init_method` is no place.
        EngineStartError: it is taken or cannot be reached, or a rank has not come within `timeout` seconds.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rendezvous = Rendezvous(init_method, Party.of_workers(layout), Path(directory).name, timeout)
    world = TorchWorld(layout, device, rendezvous)
    try:
        on_cpu = device.type == "cpu"
        if on_cpu and all(each == "yes" for each in rendezvous.share("memory?", _answer(rendezvous))):
            from nbengine.distributed.shm_setup import share_memory

            ends = share_memory(layout, rendezvous, directory, max_tensor_bytes)
            if ends.tp is not None and dtype is not None:
                ends.tp.warm_up(dtype)
            return ParallelState(layout, ends.tp or SingleRank(), ends.previous, ends.next, world)
        state = _over_torch(layout, device, world)
        if not on_cpu:
            _connect_gpus(state, device)
        rendezvous.meet("ready")
        return state
    except BaseException:
        world.close()
        raise


def _answer(rendezvous: Rendezvous) -> str:
    """Whether this rank can share memory with all others."""
    return "yes" if rendezvous.is_local and shares_memory() else "no"


def _over_torch(layout: RankLayout, device: torch.device, world: TorchWorld) -> ParallelState:
    tp: Communicator = SingleRank()
    if layout.tp_size > 1:
        tp = TorchCommunicator(world.stage_group(), device)
    rank, step = layout.rank, layout.tp_size
    before = None if layout.is_first_stage else TorchLink(rank - step, device)
    after = None if layout.is_last_stage else TorchLink(rank + step, device)
    return ParallelState(layout, tp, before, after, world)


class TorchWorld:
    """torch.distributed, initialised for all ranks of the engine."""

    def __init__(self, layout: RankLayout, device: torch.device, rendezvous: Rendezvous) -> None:
        self._layout = layout
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        interface = loopback_interface() if rendezvous.is_local else interface_towards(rendezvous.host)
        if interface is not None:
            # torch would take the one that this machine's name stands for, which may lead nowhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=rendezvous.store,
                rank=layout.rank,
                world_size=layout.world_size,
                timeout=timedelta(seconds=STEP_SECONDS),
            )
        except (RuntimeError, ValueError) as error:
            raise EngineStartError(f"rank {layout.rank} could not join the other workers: {error}") from error

    def stage_group(self) -> dist.ProcessGroup:
        """The group of this rank's stage; all ranks of the engine must call this."""
        size = self._layout.tp_size
        starts = range(0, self._layout.world_size, size)
        self._groups = [dist.new_group(list(range(start, start + size))) for start in starts]
        return self._groups[self._layout.pp_rank]

    def close(self) -> None:
        """Leave; what is on its way is given up, because the others may not be there any more."""
        if not dist.is_initialized():
            return
        if self._device.type == "cuda":
            for group in (*self._groups, dist.group.WORLD):
                if isinstance(group, dist.ProcessGroup):
                    group.abort()
        dist.destroy_process_group()


def _connect_gpus(state: ParallelState, device: torch.device) -> None:
    """Exchange something everywhere, so that NCCL has made its connections and taken its memory."""
    token = torch.zeros(1, device=device)
    state.tp.all_reduce(token)
    if state.previous is not None:
        token = state.previous.receive((1,), torch.float32)
    if state.next is not None:
        state.next.send(token)
    torch.cuda.synchronize(device)
