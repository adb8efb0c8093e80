"""A worker with the fake executor's model, for `MultiprocExecutor`, and with ways to go wrong.

Its knobs, in `hf_overrides`, are those of `FakeExecutor`; `ranks` has further ones, or others, by rank (as a string, for
JSON). `start_by` says how it fails when it has loaded the model (see `trouble`), `step_by` what in a step that
computes `at_token`; `async_output` makes it give outputs that arrive later.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from process_support.fake_executor import FakeExecutor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from nbengine.errors import EngineStartError, InvalidArgumentError, ModelLoadError
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.scheduler.output import AsyncModelRunnerOutput

FAKE_WORKERS_EXECUTOR = "process_support.fake_worker:FakeWorkersExecutor"

ANSWERED_BY_THE_MODEL = (
    "model_info",
    "determine_available_memory",
    "get_kv_cache_spec",
    "check_kv_cache_fits",
    "initialize_kv_cache",
    "sleep",
    "check_wake_up",
    "wake_up",
    "start_profile",
    "stop_profile",
)

logger = logging.getLogger(__name__)


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


ERRORS = {
    "runtime": lambda: RuntimeError("out of order"),
    "memory": lambda: EngineStartError("12 GiB of weights do not fit"),
    "load": lambda: ModelLoadError("model.safetensors is truncated"),
    "argument": lambda: InvalidArgumentError("tensor_parallel_size", 2, "1, 3 or 9"),
    "lost": lambda: RuntimeError("Connection closed by peer [127.0.0.1]:29500"),
    "unpicklable": lambda: UnpicklableError("this", "that"),
}


def trouble(kind: str) -> None:
    """Raise an error, end or get stuck, as `kind` says."""
    if kind in ERRORS:
        raise ERRORS[kind]() from ValueError("the root of it")
    logger.warning("%s begins", kind)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(3)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "busy":
        while True:
            pass
    elif kind == "native":
        ctypes.CDLL(None).sleep(3600)
    elif kind == "native_with_lock":
        ctypes.PyDLL(None).sleep(3600)
    else:
        raise AssertionError(kind)


class LateOutput(AsyncModelRunnerOutput):
    def __init__(self, output: Any, seconds: float) -> None:
        self.output = output
        self.due = time.monotonic() + seconds

    @property
    def is_ready(self) -> bool:
        return time.monotonic() >= self.due

    def get_output(self) -> Any:
        time.sleep(max(0.0, self.due - time.monotonic()))
        if isinstance(self.output, Value):
            self.output.on_thread = threading.current_thread().name
            self.output.came_at = time.monotonic()
        return self.output


class HeldOutput(LateOutput):
    def __init__(self, output: Any, seconds: float) -> None:
        super().__init__(output, seconds)
        self.go_on = threading.Event()

    def get_output(self) -> Any:
        self.go_on.wait()
        return super().get_output()


class FakeWorker:
    held = HeldOutput(None, 0.0)

    def __init__(self, config: EngineConfig, progress=None, layout=None, files=None, **_) -> None:
        knobs = dict(config.model.hf_overrides)
        knobs |= knobs.pop("ranks", {}).get(str(layout.rank), {})
        self.config = config
        self.layout = layout
        self.files = files
        self.knobs = knobs
        self.progress = progress

    def init_device(self) -> None:
        return

    def load_model(self) -> None:
        self.model = FakeExecutor(self.config, self.progress)
        self.model.knobs = self.knobs
        if "start_by" in self.knobs:
            time.sleep(self.knobs.get("start_delay", 0))
            trouble(self.knobs["start_by"])

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERED_BY_THE_MODEL:
            return lambda *args: self.model.collective_rpc(name, args)[0]
        raise AttributeError(name)

    def worker_info(self) -> WorkerInfo:
        layout = self.layout
        return WorkerInfo(layout.rank, layout.tp_rank, layout.pp_rank, os.getpid(), "cpu", 4, 4, 0, 1)

    def check_health(self) -> None:
        return

    def execute_model(self, plan) -> Any:
        output = self.model.run(plan)
        if not plan.total_num_scheduled_tokens:
            return output
        tokens = {token for row in output.sampled_token_ids for token in row}
        if self.knobs.get("at_token") in tokens:
            trouble(self.knobs["step_by"])
        self.output = output
        return None

    def sample_tokens(self, grammar_output=None) -> Any:
        if "async_output" in self.knobs:
            return LateOutput(self.output, self.knobs["async_output"])
        return self.output

    def shutdown(self) -> None:
        logger.info("shut down in order")

    # For tests of calls.

    def rank(self) -> int:
        return self.layout.rank

    def pid(self) -> int:
        return os.getpid()

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def late(self, value: Any, seconds: float, ranks: tuple[int, ...] = ()) -> Any:
        if not ranks or self.layout.rank in ranks:
            time.sleep(seconds)
        return value

    def held_output(self, value: Any) -> Any:
        """Give an output that does not arrive before `late_output` is called."""
        self.held = HeldOutput(Value(value), 0.0)
        return self.held

    def late_output(self, value: Any, seconds: float) -> Any:
        output = LateOutput(Value(value), seconds)
        self.held.go_on.set()
        return output

    def trouble(self, *kinds: str) -> int:
        """Make trouble: each rank the kind that is given for it, "" for none."""
        if kinds[self.layout.rank]:
            trouble(kinds[self.layout.rank])
        return self.layout.rank

    def function(self) -> Any:
        return lambda: None


class Value:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.on_thread = ""
        self.called_at = time.monotonic()
        self.came_at = 0.0


class FakeWorkersExecutor(MultiprocExecutor):
    """Fake workers in processes."""

    worker_class = "process_support.fake_worker:FakeWorker"


StartExecutor = Callable[..., FakeWorkersExecutor]


def fake_workers_config(tp: int = 1, pp: int = 1, *, is_async: bool = False, **knobs) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", hf_overrides=knobs),
        cache=CacheConfig(num_gpu_blocks_override=64),
        scheduler=SchedulerConfig(async_scheduling=is_async),
        parallel=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend=FAKE_WORKERS_EXECUTOR,
        ),
    )
