"""The data-parallel groups: the workers that have one place in all engine cores form one, and can form
another one later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from nbengine.distributed.communicator import DataParallelGroup, ParallelState, SingleGroup
from nbengine.distributed.init import START_SECONDS, STEP_SECONDS
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import Party, Rendezvous, check_may_listen, choose_interface
from nbengine.distributed.shared_memory import MemoryHandle, Peers, SharedMemory, patience, unlink
from nbengine.errors import EngineStartError
from nbengine.ipc.liveness import ProcessIdentity, ProcessWatch, this_process
from nbengine.ipc.transport import own_address
from nbengine.kernels.dispatch import shares_memory
from nbengine.runtime.cgroup import usable_cpus

if TYPE_CHECKING:
    from nbengine.distributed.shm_data_parallel import ShmDataParallelGroup


class DataParallelEnd:
    """A worker's end of the data-parallel group that it is in at present, which is `SingleGroup` at first.

    The model keeps this object; the group behind it is exchanged between two steps.
    """

    def __init__(self, group: DataParallelGroup | None = None) -> None:
        self._group = group or SingleGroup()

    @property
    def rank(self) -> int:
        """See `DataParallelGroup.rank`."""
        return self._group.rank

    @property
    def size(self) -> int:
        """See `DataParallelGroup.size`."""
        return self._group.size

    def switch(self, group: DataParallelGroup) -> None:
        """Leave the present group for another one."""
        self._group.close()
        self._group = group

    @contextmanager
    def replaced_by(self, group: DataParallelGroup) -> Iterator[None]:
        """Use another group for a while."""
        own, self._group = self._group, group
        try:
            yield
        finally:
            self._group = own

    def begin_step(self, num_tokens: int) -> None:
        """See `DataParallelGroup.begin_step`."""
        self._group.begin_step(num_tokens)

    def gather(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.gather`."""
        return self._group.gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.reduce_scatter`."""
        return self._group.reduce_scatter(x)

    def any(self, flag: bool) -> bool:
        """See `DataParallelGroup.any`."""
        return self._group.any(flag)

    def broadcast(self, x: Tensor, source: int) -> None:
        """See `DataParallelGroup.broadcast`."""
        self._group.broadcast(x, source)

    def close(self) -> None:
        """See `DataParallelGroup.close`."""
        self._group.close()


class RehearsalGroup(SingleGroup):
    """A stand-in for a group of `size` ranks that measures how much memory a step takes: it waits for nobody,
    and gives as many rows as if all ranks had as many as this one."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, x: Tensor) -> Tensor:
        """Return `x` once for every rank."""
        return x.repeat(self.size, *(1,) * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return the first rank's rows."""
        # A real group's result takes new memory, too, so this is no view.
        return x[: len(x) // self.size].clone()


@contextmanager
def rehearsal(parallel: ParallelState) -> Iterator[None]:
    """Compute without the other engine cores for a while, and take as much memory as with them."""
    if not isinstance(parallel.dp, DataParallelEnd):
        yield
        return
    with parallel.dp.replaced_by(RehearsalGroup(parallel.layout.dp_size)):
        yield


class _Member(msgspec.Struct):
    """A rank's message to the others: whether it can share memory, and its process."""

    shares: bool
    process: ProcessIdentity


def join_data_parallel(
    layout: RankLayout,
    device: torch.device,
    *,
    init_method: str,
    engine: str,
    directory: str,
    max_tensor_bytes: int,
    dtype: torch.dtype,
    networked: bool = False,
    timeout: float = START_SECONDS,
) -> DataParallelGroup:
    """Join the workers of this place in the other engine cores; return when all have come.

    `init_method` is the place where all workers of all engine cores meet, "file://PATH" on one machine; a
    later group of the same engine needs another one. In "tcp://HOST:PORT" HOST is the machine of engine core
    0. `engine` is the name that they have in common, `directory` this machine's private one, and no rank has
    tensors of more than `max_tensor_bytes` in a step. With `networked` the engine may listen on TCP ports.

    Raises:
        InvalidArgumentError: `init_method` does not name a place.
        EngineStartError: the place is taken or cannot be reached, there is no room, not all have come within
            `timeout` seconds, or ranks would have to listen on TCP ports.
    """
    party = Party.of_engine_cores(layout)
    if init_method.startswith("file://"):
        init_method = f"{init_method}-{party.place}"
    rendezvous = Rendezvous(init_method, party, engine, timeout)
    # GPUs exchange only numbers through memory: the host needs to know the numbers of rows.
    on_cpu = device.type == "cpu"
    shared = _share_memory(
        layout, rendezvous, directory, max_tensor_bytes if on_cpu else 0, dtype if on_cpu else None
    )
    group: DataParallelGroup
    if shared is not None and on_cpu:
        group = shared
    else:
        if shared is None:
            check_may_listen(rendezvous, networked)
        group = _over_torch(layout, device, rendezvous, shared)
    rendezvous.leave()
    return group


def _share_memory(
    layout: RankLayout,
    rendezvous: Rendezvous,
    directory: str,
    max_tensor_bytes: int,
    dtype: torch.dtype | None,
) -> ShmDataParallelGroup | None:
    """Make the group over shared memory; None if one of the ranks cannot reach it. Its file is removed when
    all have mapped it. The kernels for sums of `dtype` are compiled now."""
    can_share = rendezvous.is_local and shares_memory()
    me = _Member(can_share, this_process())
    members = [
        msgspec.json.decode(other, type=_Member)
        for other in rendezvous.share("members", msgspec.json.encode(me).decode())
    ]
    if not all(member.shares for member in members):
        return None
    from nbengine.distributed.shm_data_parallel import ShmDataParallelGroup

    made = None
    if layout.dp_rank == 0:
        made = ShmDataParallelGroup.reserve(directory, layout.dp_size, max_tensor_bytes)
    try:
        answers = rendezvous.share("memory", msgspec.json.encode(made).decode())
        memory = SharedMemory(msgspec.json.decode(answers[0], type=MemoryHandle))
        watches = {
            f"{layout.rank} of engine core {rank}": ProcessWatch(member.process)
            for rank, member in enumerate(members)
            if rank != layout.dp_rank
        }
        # With fewer cores than ranks, looking takes a core from the others (see `share_memory`).
        looks = layout.dp_size * layout.world_size <= usable_cpus()
        group = ShmDataParallelGroup(
            memory, layout.dp_rank, layout.dp_size, patience(memory, short=looks), Peers(watches)
        )
        if dtype is not None:
            group.warm_up(dtype)
        rendezvous.meet("mapped")
    finally:
        if made is not None:
            unlink(made)
    return group


def _over_torch(
    layout: RankLayout, device: torch.device, rendezvous: Rendezvous, words: ShmDataParallelGroup | None
) -> DataParallelGroup:
    from nbengine.distributed.torch_data_parallel import TorchDataParallelGroup

    choose_interface(rendezvous)
    address = "127.0.0.1" if rendezvous.is_local else own_address(rendezvous.host)
    limit = timedelta(seconds=STEP_SECONDS)
    try:
        group = TorchDataParallelGroup(
            rendezvous.store, layout.dp_rank, layout.dp_size, device, address, limit, words
        )
        # The connections need the store, and are made when they are first used: so they are used once now.
        group.begin_step(1)
        group.reduce_scatter(group.gather(torch.zeros(1, 1, device=device)))
    except RuntimeError as error:
        raise EngineStartError(f"engine core {layout.dp_rank} could not join the others: {error}") from error
    return group
