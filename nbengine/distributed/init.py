"""This module joins a worker to the others of its engine: its tensor-parallel group and its pipeline links,
and torch.distributed where these need it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nbengine.distributed.communicator import Communicator, ParallelState, SingleRank
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import (
    Party,
    Rendezvous,
    check_may_listen,
    choose_interface,
)
from nbengine.distributed.torch_communicator import TorchCommunicator, TorchLink
from nbengine.errors import EngineStartError
from nbengine.kernels.dispatch import shares_memory

START_SECONDS = 120.0
"""Seconds within which all ranks must come: they import torch at the same time, on however few cores there
are."""
STEP_SECONDS = 1800.0
"""Seconds after which a rank gives up waiting for another in the middle of a step."""


def init_parallel(
    layout: RankLayout,
    device: torch.device,
    *,
    init_method: str,
    directory: str,
    max_tensor_bytes: int,
    dtype: torch.dtype | None = None,
    networked: bool = False,
    timeout: float = START_SECONDS,
) -> ParallelState:
    """Join the other workers of the engine; return when all have come and everything is connected.

    On the CPUs of one machine everything goes through shared memory: no process listens anywhere when this
    returns, and with a "file://" place none does before. Otherwise torch.distributed is initialised for the
    whole process, with NCCL for a GPU and gloo for a CPU, so a process can be in one such engine at a time.
    `directory` is private to the engine (0700), `max_tensor_bytes` the size of the largest tensor that is
    sent from stage to stage, `dtype` that of the model: if it is known, the kernels for its sums are compiled
    now. With `networked` the engine may listen on TCP ports.

    Raises:
        InvalidArgumentError: `init_method` does not name a place.
        EngineStartError: the place is taken or cannot be reached, a rank has not come within `timeout`
            seconds, or ranks on a CPU would have to listen on TCP ports.
    """
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.cuda.set_device(device)
    rendezvous = Rendezvous(init_method, Party.of_workers(layout), Path(directory).name, timeout)
    if on_cpu and layout.world_size == 1:
        return ParallelState(layout)
    ends = None
    if all(each == "yes" for each in rendezvous.share("memory?", _answer(rendezvous))):
        from nbengine.distributed.shm_setup import share_memory

        # GPUs exchange only flags through memory.
        ends = share_memory(layout, rendezvous, directory, max_tensor_bytes, links=on_cpu)
    if on_cpu and ends is not None:
        if ends.tp is not None and dtype is not None:
            ends.tp.warm_up(dtype)
        rendezvous.leave()
        return ParallelState(layout, ends.tp or SingleRank(), ends.previous, ends.next)
    if on_cpu:
        check_may_listen(rendezvous, networked)
    world = TorchWorld(layout, device, rendezvous)
    try:
        state = _over_torch(layout, device, world, None if ends is None else ends.tp)
        if not on_cpu:
            _connect_gpus(state, device)
        rendezvous.meet("ready")
        return state
    except BaseException:
        world.close()
        raise


def _answer(rendezvous: Rendezvous) -> str:
    """Return "yes" if this rank can share memory with all others, else "no"."""
    return "yes" if rendezvous.is_local and shares_memory() else "no"


def _over_torch(
    layout: RankLayout, device: torch.device, world: TorchWorld, flags: Communicator | None
) -> ParallelState:
    tp: Communicator = SingleRank()
    if layout.tp_size > 1:
        tp = TorchCommunicator(world.stage_group(), device, flags)
    rank, step = layout.rank, layout.tp_size
    before = None if layout.is_first_stage else TorchLink(rank - step, device)
    after = None if layout.is_last_stage else TorchLink(rank + step, device)
    return ParallelState(layout, tp, before, after, world)


class TorchWorld:
    """torch.distributed, initialised for all ranks of the engine; closing this ends it."""

    def __init__(self, layout: RankLayout, device: torch.device, rendezvous: Rendezvous) -> None:
        self._layout = layout
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        choose_interface(rendezvous)
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
        """Return the group of this rank's stage; all ranks of the engine must call this."""
        size = self._layout.tp_size
        starts = range(0, self._layout.world_size, size)
        # torch wants every rank to make the groups of all stages, in the same order.
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
