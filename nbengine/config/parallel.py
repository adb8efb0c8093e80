"""The processes that share the model, and the ways in which they start and meet."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from nbengine.checks import require, require_count

EXECUTOR_BACKENDS = (None, "uni", "mp", "ray")
DATA_PARALLEL_BACKENDS = ("mp", "ray")


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the tensor-, pipeline- and data-parallel groups.

    `distributed_executor_backend` may also name a custom `Executor`, as "module:Class".
    `distributed_init_method` is where the workers find each other, "tcp://127.0.0.1:29500" for instance; None
    means a file in the engine's own directory, which nobody else can take or reach.

    `data_parallel_rank` is the rank of the engine core that has this configuration. `data_parallel_address`
    is the address or the name with which other machines reach this one; None means that it is found where it
    is needed. An engine that is given an address listens there. `data_parallel_prefix_affinity` sends a
    prompt where its first blocks are likely to be cached. `data_parallel_init_method` is where the workers of
    engine cores in lock step find each other, in the form of `distributed_init_method`; the process that
    starts the engine cores chooses it. With `data_parallel_joins_later` an engine core starts beside others
    that run already: its workers get their weights from the workers of those when they join them.

    `ray_address` is the address of the Ray cluster, None for the cluster that RAY_ADDRESS names or to which
    this machine belongs. `ray_timeout` is the number of seconds that the cluster may take to make room. A
    worker in it takes `ray_cpus_per_worker` of its node's CPUs, and has that many threads.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    data_parallel_backend: str = "mp"
    distributed_init_method: str | None = None
    data_parallel_address: str | None = None
    data_parallel_prefix_affinity: bool = False
    ray_address: str | None = None
    ray_timeout: float = 60.0
    ray_cpus_per_worker: int = 1
    data_parallel_init_method: str | None = None
    data_parallel_joins_later: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            require_count(name, getattr(self, name))
        backend = self.distributed_executor_backend
        require(
            "distributed_executor_backend",
            backend,
            backend in EXECUTOR_BACKENDS or (isinstance(backend, str) and ":" in backend),
            "None, 'uni', 'mp', 'ray' or 'module:Class'",
        )
        backend = self.data_parallel_backend
        require("data_parallel_backend", backend, backend in DATA_PARALLEL_BACKENDS, "'mp' or 'ray'")
        executor = self.distributed_executor_backend
        is_alone = executor == "uni" and self.world_size > 1
        require(
            "distributed_executor_backend",
            executor,
            not is_alone,
            f"None or 'mp' for {self.world_size} workers",
        )
        address = self.data_parallel_address
        ok = address is None or _is_of_one_machine(address)
        require("data_parallel_address", address, ok, "None, or an address or the name of this machine")
        method = self.distributed_init_method
        is_url = method is None or method.startswith(("tcp://", "file://"))
        require("distributed_init_method", method, is_url, "None, 'tcp://HOST:PORT' or 'file://PATH'")
        self._check_ray()

    def _check_ray(self) -> None:
        method, address = self.distributed_init_method, self.ray_address
        if self.distributed_executor_backend == "ray":
            is_reachable = method is None or method.startswith("tcp://")
            allowed = "None or 'tcp://HOST:PORT' with distributed_executor_backend='ray'"
            require("distributed_init_method", method, is_reachable, allowed)
        ok = address is None or (bool(address) and "://" not in address)
        require("ray_address", address, ok, "None, 'auto' or 'HOST:PORT'; Ray Client (ray://) cannot be used")
        cpus = self.ray_cpus_per_worker
        require_count("ray_cpus_per_worker", cpus)
        require("ray_timeout", self.ray_timeout, self.ray_timeout > 0, "more than 0 seconds")

    @property
    def world_size(self) -> int:
        """Return the number of workers of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def networked(self) -> bool:
        """Tell whether the sockets are on a network, so that other machines may have cores or clients."""
        return self.data_parallel_address is not None or self.data_parallel_backend == "ray"


def _is_of_one_machine(address: str) -> bool:
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return bool(address) and not any(character.isspace() or character in "/:*" for character in address)
    return not (number.is_unspecified or number.is_multicast)
