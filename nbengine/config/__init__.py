"""Engine configuration: frozen dataclasses, one file each, JSON-able from end to end."""

from nbengine.config.cache import CacheConfig
from nbengine.config.engine import AsyncEngineArgs, EngineArgs, EngineConfig
from nbengine.config.model import ModelConfig
from nbengine.config.parallel import ParallelConfig
from nbengine.config.scheduler import SchedulerConfig

__all__ = [
    "AsyncEngineArgs",
    "CacheConfig",
    "EngineArgs",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
]
