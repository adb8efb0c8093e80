"""The choice of an engine core's executor."""

from __future__ import annotations

import importlib

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.executor.base import Executor


def executor_class(config: EngineConfig) -> type[Executor]:
    """Return the executor that the configuration names, `"module:Class"` being a custom one, or else the one for its
    number of workers.

    Raises:
        EngineStartError: the named class does not exist, or is not an `Executor`.
    """
    parallel = config.parallel
    backend = parallel.distributed_executor_backend or ""
    if ":" in backend:
        return _custom_class(backend)
    # Ray and the processes of workers are imported where they are used.
    if backend == "ray":
        from nbengine.executor.ray import RayExecutor

        return RayExecutor
    if backend == "mp" or parallel.world_size > 1:
        from nbengine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor
    from nbengine.executor.uniproc import UniProcExecutor

    return UniProcExecutor


def _custom_class(reference: str) -> type[Executor]:
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineStartError(f"no executor {reference}") from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise EngineStartError(f"{reference} is not an Executor")
    return found
