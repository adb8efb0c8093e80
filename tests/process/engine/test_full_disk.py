"""An engine that cannot write any file any more: it goes on, and catches up when there is room."""

from __future__ import annotations

import os
import resource
import signal

from process_support.engine_under_test import FAKE_EXECUTOR, wait_for
from process_support.ranks_client import join

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import EngineReady
from nbengine.runtime.connection import connection_file

NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_a_full_disk_ends_neither_a_restart_nor_a_scaling_nor_the_log(start_engine) -> None:
    parallel = ParallelConfig(data_parallel_size=2, distributed_executor_backend=FAKE_EXECUTOR)
    engine = start_engine(parallel=parallel)
    client = join(engine, 2)
    before = engine.read_connection()
    # From now on the connection file is too large to be written, and neither it nor what it starts can write the log.
    size = engine.log_path.stat().st_size
    resource.prlimit(engine.host.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    assert size < connection_file(engine.name).stat().st_size

    os.kill(client.pid(1), signal.SIGKILL)
    client.wait_lost()
    client.wait_ranks(0, 1)
    assert client.heard(EngineReady)[-1].incarnation == 1
    assert client.scale(3).error is None
    client.wait_ranks(0, 1, 2)
    late = join(engine, 3)
    answer = late.ask("r", rank=2)
    late.wait_done(answer)
    assert answer.is_complete
    assert engine.read_connection() == before
    assert "ready: engine core 0: 64 blocks, engine core 1: 64 blocks, engine core 2" not in engine.log()

    resource.prlimit(engine.host.pid, resource.RLIMIT_FSIZE, NO_LIMIT)
    wait_for(lambda: len(engine.read_connection().ready) == 3, "the connection file")
    now = engine.read_connection()
    assert [core.incarnation for core in now.ready] == [0, 1, 0]
    assert now.config.parallel.data_parallel_size == 3
    wait_for(lambda: "the connection file is up to date again" in engine.log(), "the log")
    assert "bytes are missing here: File too large" in engine.log()
    engine.host.terminate()
    assert engine.host.wait() == 0
