"""The bridge: a process that is a driver of a Ray cluster, on behalf of its parent, the owner.

Ray ends a driver that has lost its node or the cluster, takes over its signal handlers, and kills its
children: so an engine's host or engine core must not be a driver itself. When a driver ends, Ray ends all of
its actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nbengine.cluster.actor import IN, LANES, OUT, VERSION, NodeActor
from nbengine.cluster.describe import describe_ray_error, no_cluster, no_room
from nbengine.cluster.messages import (
    BridgeToOwner,
    Connected,
    FromKeeper,
    Lost,
    NoCluster,
    OwnerToBridge,
    Release,
    Reserve,
    ToKeeper,
)

logger = logging.getLogger(__name__)

CONNECT_SECONDS, ANSWER_SECONDS = 30.0, 5.0
"""Seconds to become a driver of the cluster, and to find a process that listens at its address."""
NODE_SECONDS = 3.0
"""Seconds between two looks at whether this machine's node is alive."""
OWNER_SECONDS = 1.0
"""Seconds between two looks at whether the owner still runs."""
SHUTDOWN_SECONDS = 3.0
"""Seconds that Ray may take to leave the cluster."""


@dataclass(slots=True)
class _Group:
    """Processes that were asked for together."""

    room: PlacementGroup
    actors: list[Any] = field(default_factory=list)


class Bridge:
    """The bridge between the owner, at the other end of `connection`, and keepers on the nodes."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._owner = os.getppid()
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[OwnerToBridge] = msgspec.msgpack.Decoder(OwnerToBridge)
        self._groups: dict[int, _Group] = {}

    def run(self) -> None:
        """Serve the owner until it is gone."""
        try:
            while self._hears_owner():
                self._obey(self._decoder.decode(self._connection.recv_bytes()))
        except (EOFError, OSError):
            logger.debug("the owner is gone")

    def _hears_owner(self) -> bool:
        """Wait for a message (True) or the owner's end (False); a process that the owner forked may hold its
        end of the line."""
        while not self._connection.poll(OWNER_SECONDS):
            if os.getppid() != self._owner:
                return False
        return True

    def tell(self, message: BridgeToOwner) -> None:
        """Send the owner a message, from any thread; this has no effect when it is gone."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _obey(self, message: OwnerToBridge) -> None:
        match message:
            case Reserve(group, bundles):
                room = placement_group(bundles, strategy="PACK")
                self._groups[group] = _Group(room)
                self._in_thread(self._start, message, self._groups[group])
            case ToKeeper(number, index, content):
                if (known := self._groups.get(number)) is not None and known.actors:
                    known.actors[index].send.options(concurrency_group=IN).remote(content)
            case Release(number):
                if (gone := self._groups.pop(number, None)) is not None:
                    self._release(gone)
                    self.tell(Lost(number, None, "it was told to end before it had started"))

    def _in_thread(self, function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _start(self, wanted: Reserve, group: _Group) -> None:
        """Wait until the cluster has room, then start an actor in each bundle."""
        try:
            self._start_actors(wanted, group)
        except Exception as error:  # noqa: BLE001  # Ray raises many kinds, and the owner waits
            self.tell(Lost(wanted.group, None, describe_ray_error(error)))

    def _start_actors(self, wanted: Reserve, group: _Group) -> None:
        if not group.room.wait(wanted.patience):
            cause = no_room(wanted.bundles, wanted.patience, ray.nodes(), available_resources_per_node())
            self.tell(Lost(wanted.group, None, cause))
            return
        for index, bundle in enumerate(wanted.bundles):
            group.actors.append(_make_actor(group.room, index, bundle))
        for index, actor in enumerate(group.actors):
            self._in_thread(self._relay, wanted, index, actor)

    def _relay(self, wanted: Reserve, index: int, actor: Any) -> None:
        """Have an actor start its keeper, and pass on the keeper's messages."""
        try:
            label = wanted.label if len(wanted.bundles) == 1 else f"{wanted.label}.rank{index}"
            open_keeper = actor.open.options(concurrency_group=IN)
            receive = actor.receive.options(concurrency_group=OUT)
            cause: str | None = ray.get(open_keeper.remote(VERSION, label))
            while cause is None:
                message: bytes | None = ray.get(receive.remote())
                if message is None:
                    cause = "its keeper has ended"
                else:
                    self.tell(FromKeeper(wanted.group, index, message))
        except Exception as error:  # noqa: BLE001  # as above
            cause = describe_ray_error(error)
        self.tell(Lost(wanted.group, index, cause))

    def watch_node(self) -> None:
        """Wait until this machine's node of the cluster is gone,
        and with it all that belongs to this driver."""
        own = ray.get_runtime_context().get_node_id()
        while True:
            time.sleep(NODE_SECONDS)
            # Without an answer the cluster is gone, which Ray will notice.
            with contextlib.suppress(Exception):
                if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == own):
                    return

    def _release(self, group: _Group) -> None:
        for actor in group.actors:
            ray.kill(actor)
        remove_placement_group(group.room)


def _make_actor(room: PlacementGroup, index: int, bundle: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    make = ray.remote(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=others,
        concurrency_groups=LANES,
        scheduling_strategy=PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=index),
    )
    return make(NodeActor).remote()


def run_bridge(fd: int, address: str | None, name: str, clean_up: Callable[[], None]) -> None:
    """Run the bridge in this process until the owner's end of the socket `fd` is closed;
    then `clean_up` is called.

    `address` is the cluster's, None for the one that `RAY_ADDRESS` names or that this machine belongs to.
    """
    os.set_inheritable(fd, False)
    bridge = Bridge(Connection(fd))
    address = address or os.environ.get("RAY_ADDRESS") or "auto"

    def give_up() -> None:
        bridge.tell(NoCluster(no_cluster(address, f"no answer within {CONNECT_SECONDS:g} s")))
        os._exit(1)

    patience = threading.Timer(CONNECT_SECONDS, give_up)
    patience.daemon = True
    patience.start()
    try:
        cluster = _connect(address, name)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        logger.debug("no cluster", exc_info=True)
        bridge.tell(NoCluster(no_cluster(address, describe_ray_error(error))))
        return
    patience.cancel()
    bridge.tell(Connected(cluster))

    def end_with_node() -> None:
        bridge.watch_node()
        bridge.tell(NoCluster("this machine's node of the Ray cluster is gone"))
        os._exit(1)

    threading.Thread(target=end_with_node, daemon=True).start()
    bridge.run()
    # Before `ray.shutdown`, in which Ray may end this process.
    clean_up()
    farewell = threading.Thread(target=ray.shutdown, daemon=True)
    farewell.start()
    farewell.join(SHUTDOWN_SECONDS)


def _connect(address: str, name: str) -> str:
    """Become a driver of the cluster, and return the address under which its nodes know it."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        # Checked here, because Ray would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    ray.init(
        address,
        namespace=name,
        job_config=JobConfig(metadata={"job_name": name}),
        log_to_driver=False,
        configure_logging=False,
    )
    return str(ray.get_runtime_context().gcs_address)
