"""This module lets the CPU ranks of an engine share memory: it says who makes it, who maps it, and when its
files go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import Rendezvous
from nbengine.distributed.shared_memory import MemoryHandle, Peers, SharedMemory, patience, unlink
from nbengine.distributed.shm_communicator import ShmCommunicator
from nbengine.distributed.shm_link import ShmLink
from nbengine.errors import EngineStartError
from nbengine.ipc.liveness import ProcessIdentity, ProcessWatch, this_process
from nbengine.runtime.cgroup import usable_cpus


class _Made(msgspec.Struct):
    """The memory that a rank has made for its group, and that for the link to the next stage."""

    group: MemoryHandle | None
    link: MemoryHandle | None


@dataclass(frozen=True)
class SharedEnds:
    """A rank's ends of the group and links that it has with others."""

    tp: ShmCommunicator | None
    previous: ShmLink | None
    next: ShmLink | None


def share_memory(
    layout: RankLayout, rendezvous: Rendezvous, directory: str, max_tensor_bytes: int, *, links: bool = True
) -> SharedEnds:
    """Make and map the memory of the rank's group and, with `links`, of its links. All ranks must call this.

    The first rank of a stage makes the memory of its group, the sender that of a link. When all ranks have
    mapped theirs, the files are unlinked, so that nothing is left behind however the ranks end.

    The ranks of a group wait for each other briefly, since all of them do the same; but with fewer cores than
    ranks, a rank that spends that time looking keeps a core from the one for which it waits: 4 ranks on 2
    cores sum [32, 576] in 30 µs when they sleep almost at once, and in 200 µs when they look for 40 µs. A
    stage waits for as long as another one computes.

    Raises:
        EngineStartError: there is no room, or a rank has not come in time.
    """
    made = _make(layout, directory, max_tensor_bytes, links)
    handles = [handle for handle in (made.group, made.link) if handle is not None]
    try:
        processes = [
            msgspec.json.decode(other, type=ProcessIdentity)
            for other in rendezvous.share("process", msgspec.json.encode(this_process()).decode())
        ]
        all_made = [
            msgspec.json.decode(other, type=_Made)
            for other in rendezvous.share("memory", msgspec.json.encode(made).decode())
        ]

        def peers(ranks: Iterable[int]) -> Peers:
            others = (rank for rank in ranks if rank != layout.rank)
            return Peers({rank: ProcessWatch(processes[rank]) for rank in others})

        def link(maker: int, other: int) -> ShmLink | None:
            handle = all_made[maker].link if maker in range(layout.world_size) else None
            if handle is None:
                return None
            memory = SharedMemory(handle)
            return ShmLink(memory, patience(memory, short=False), peers((other,)))

        first = layout.rank - layout.tp_rank
        tp, group = None, all_made[first].group
        if group is not None:
            memory = SharedMemory(group)
            tp = ShmCommunicator(
                memory,
                layout.tp_rank,
                layout.tp_size,
                patience(memory, short=layout.world_size <= usable_cpus()),
                peers(range(first, first + layout.tp_size)),
            )
        before, after = layout.rank - layout.tp_size, layout.rank + layout.tp_size
        ends = SharedEnds(tp, link(before, before), link(layout.rank, after))
        rendezvous.meet("mapped")
        return ends
    finally:
        for handle in handles:
            unlink(handle)


def _make(layout: RankLayout, directory: str, max_tensor_bytes: int, links: bool) -> _Made:
    group = link = None
    if layout.tp_size > 1 and layout.tp_rank == 0:
        group = ShmCommunicator.reserve(directory, layout.tp_size)
    if links and not layout.is_last_stage:
        try:
            link = ShmLink.reserve(directory, max_tensor_bytes)
        except EngineStartError:
            if group is not None:
                unlink(group)
            raise
    return _Made(group, link)
