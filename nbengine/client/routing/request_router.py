"""The router of a client's requests: it knows each one's core, and chooses the next one's. It does no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from nbengine.client.routing.core_table import CoreTable, Home
from nbengine.client.routing.load_balancer import LoadBalancer
from nbengine.client.routing.prefix_affinity import PrefixAffinity
from nbengine.config import EngineConfig
from nbengine.errors import RequestLostError
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest


class _InFlight:
    """A request that an engine core has."""

    __slots__ = ("home", "request")

    def __init__(self, home: Home, request: EngineCoreRequest) -> None:
        self.home = home
        self.request: EngineCoreRequest | None = request
        """The request, in case it must be sent elsewhere; None once an output has come."""


class RequestRouter:
    """The map of requests in flight, for one thread:
    aborts go to a request's core, and only that core's outputs count.

    A request goes to the rank that it names, or that the client is bound to (`bound_rank`), else to the rank
    that the balancer chooses. Requests of one prompt (`n > 1`) follow each other to one rank, where their
    common prefix is computed once, until that rank is crowded. With `data_parallel_prefix_affinity` all
    requests that start alike do so.

    A request whose rank takes none at the moment waits here, and is sent when one does.
    """

    def __init__(self, config: EngineConfig, *, bound_rank: int | None = None, start: int = 0) -> None:
        self.table = CoreTable()
        self.balancer = LoadBalancer(start)
        self.bound_rank = bound_rank
        self._caches_prefixes = config.cache.enable_prefix_caching
        self._block_size = config.cache.block_size
        self._affinity: PrefixAffinity | None = None
        if config.parallel.data_parallel_prefix_affinity and self._caches_prefixes and bound_rank is None:
            self._affinity = PrefixAffinity(config.cache.block_size)
        self._in_flight: dict[str, _InFlight] = {}
        self._waiting: dict[str, EngineCoreRequest] = {}
        self._family: tuple[str | None, int] = (None, 0)
        """The external id of the latest request, and its rank."""

    @property
    def num_in_flight(self) -> int:
        """Count the requests that engine cores have."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Count the requests that no engine core takes yet."""
        return len(self._waiting)

    # Requests.

    def route(self, request: EngineCoreRequest) -> int | None:
        """Choose the rank to send a request to, which has it from now on; None: the request waits.

        Raises:
            RequestLostError: the request is for a rank that has left.
        """
        home = self._home_for(request)
        if home is None:
            self._waiting[request.request_id] = request
            return None
        self.balancer.add(home.rank)
        self._in_flight[request.request_id] = _InFlight(home, request)
        return home.rank

    def abort(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget requests; return the ids to abort, by rank."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            entry = self._take(request_id)
            if entry is not None:
                by_rank.setdefault(entry.home.rank, []).append(request_id)
            else:
                self._waiting.pop(request_id, None)
        return by_rank

    def take_in(self, outputs: EngineCoreOutputs) -> None:
        """Take in a core's outputs, and remove from them those of requests that it does not have any more."""
        home = (outputs.engine_index, outputs.incarnation)
        in_flight = self._in_flight
        stale: set[str] = set()
        for output in outputs.outputs:
            entry = in_flight.get(output.request_id)
            if entry is None or entry.home != home:
                stale.add(output.request_id)
                continue
            if entry.request is not None:
                entry.request = None
                self.balancer.begin(entry.home.rank)
            if output.finish_reason is not None:
                del in_flight[output.request_id]
                self.balancer.end(entry.home.rank, begun=True)
        if stale:
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in stale]
        if outputs.prompts_read:
            known = ((read, in_flight.get(read.request_id)) for read in outputs.prompts_read)
            outputs.prompts_read = [read for read, entry in known if entry is not None and entry.home == home]
        if outputs.finished_requests:
            outputs.finished_requests = [name for name in outputs.finished_requests if self._take(name, home)]

    # Engine cores.

    def on_ready(self, ready: EngineReady) -> None:
        """Take note that the host calls a core ready."""
        self.table.on_ready(ready.rank, ready.incarnation)
        self._block_size = ready.block_size
        if self._affinity is not None:
            self._affinity.set_bound(ready.rank, ready.num_blocks)
        self.update()

    def update(self) -> None:
        """Balance between the ranks that take requests now; called when the table has changed."""
        usable = list(self.table.usable)
        if self.balancer.ranks != usable:
            if self._affinity is not None:
                for rank in set(self.balancer.ranks) - set(usable):
                    self._affinity.forget(rank)
            self.balancer.set_ranks(usable)

    def take_waiting(self) -> list[EngineCoreRequest]:
        """Take out the requests that wait, to be routed again."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def take_back(self, request_ids: Iterable[str], home: tuple[int, int]) -> list[EngineCoreRequest]:
        """Take out the requests that a core hands back without having begun them."""
        entries = [self._take(request_id, home) for request_id in request_ids]
        return [entry.request for entry in entries if entry is not None and entry.request is not None]

    def take_unbegun(self, home: tuple[int, int]) -> list[EngineCoreRequest]:
        """Take out the requests without output of a core that has gone, to be routed again."""
        return self.take_back(
            [name for name, entry in self._in_flight.items() if entry.home == home and entry.request], home
        )

    def take_begun(self, home: tuple[int, int]) -> list[str]:
        """Take out the other requests of a core that has gone, whose outputs cannot be taken back;
        return their ids."""
        ids = [name for name, entry in self._in_flight.items() if entry.home == home and not entry.request]
        return [name for name in ids if self._take(name)]

    def clear(self) -> None:
        """Forget all requests and ranks: the lease is lost."""
        for name in list(self._in_flight):
            self._take(name)
        self._waiting.clear()
        self.table.disconnect()
        self.update()

    # The rest.

    def _home_for(self, request: EngineCoreRequest) -> Home | None:
        """Return the core to which a request is sent now; None: it waits."""
        usable = self.table.usable
        rank = request.data_parallel_rank if self.bound_rank is None else self.bound_rank
        if rank is not None:
            if rank not in usable and rank not in self.table.expected:
                raise RequestLostError(rank, f"engine core {rank} has left")
            return usable.get(rank)
        if not usable:
            return None
        return usable[self._balanced(request)]

    def _balanced(self, request: EngineCoreRequest) -> int:
        if len(self.table.usable) == 1:
            (rank,) = self.table.usable
            return rank
        if self._affinity is not None:
            hashes = self._affinity.hashes(request)
            rank = self.balancer.pick(self._affinity.best(hashes, self.table.usable))
            self._affinity.sent(hashes, rank)
            return rank
        family, last = self._family
        is_sibling = self._shares_prefix(request) and request.external_req_id == family
        rank = self.balancer.pick(last if is_sibling else None)
        self._family = (request.external_req_id, rank)
        return rank

    def _shares_prefix(self, request: EngineCoreRequest) -> bool:
        """Return whether a request would find blocks of another one with the same prompt."""
        tokens = request.prompt_token_ids
        length = len(request.prompt_embeds) if tokens is None else len(tokens)
        return self._caches_prefixes and length > self._block_size

    def _take(self, request_id: str, home: tuple[int, int] | None = None) -> _InFlight | None:
        """Take a request off the map if it is there, and at `home` if that is given; return its entry."""
        entry = self._in_flight.get(request_id)
        if entry is None or (home is not None and entry.home != home):
            return None
        del self._in_flight[request_id]
        self.balancer.end(entry.home.rank, begun=entry.request is None)
        return entry
