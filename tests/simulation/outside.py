"""Substitutes of the modules through which an engine's processes reach the outside.

Each has what is simulated; everything else is the real module's. Files are real ones, in a directory of the world; a
fault may make any call fail.
"""

from __future__ import annotations

import fcntl
import gc
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import psutil
import zmq

from nbengine.ipc import shortage
from nbengine.ipc.transport import EngineContext
from tests.simulation import primitives, state
from tests.simulation.clocks import monotonic, sleep, token_bytes, token_hex, uuid4, wall_time
from tests.simulation.ends import SimPoll, os_pipe, os_set_blocking, socketpair
from tests.simulation.files import (
    check_room,
    flock,
    mkdtemp,
    os_close,
    os_dup,
    os_fdopen,
    os_open,
    os_read,
    os_readlink,
    os_rename,
    os_replace,
    os_write,
)
from tests.simulation.machine import (
    Environment,
    SimPopen,
    SimPsutilProcess,
    boot_time,
    find,
    os_exit,
    os_getsid,
    os_kill,
    os_killpg,
    os_waitid,
    pidfd_open,
    pidfd_send_signal,
    psutil_pids,
    set_wakeup_fd,
    signal_signal,
)
from tests.simulation.polling import SimPoller
from tests.simulation.sockets import SimContext


class Namespace:
    """A module with some names of its own."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        self.__dict__[name] = value
        return value


def os_namespace() -> Namespace:
    """`os`."""
    return Namespace(
        os,
        getpid=lambda: state.process().pid,
        getppid=lambda: state.process().parent_pid,
        getsid=os_getsid,
        kill=os_kill,
        killpg=os_killpg,
        waitid=os_waitid,
        _exit=os_exit,
        pipe=os_pipe,
        open=os_open,
        fdopen=os_fdopen,
        close=os_close,
        read=os_read,
        write=os_write,
        replace=os_replace,
        rename=os_rename,
        set_blocking=os_set_blocking,
        readlink=os_readlink,
        dup=os_dup,
        pidfd_open=pidfd_open,
        set_inheritable=lambda number, flag: None,
        environ=Environment(),
        register_at_fork=lambda **_: None,
    )


def substitutes() -> dict[int, Any]:
    """Return the substitutes that every module of the engine gets, by the `id` of the real thing."""
    process_errors = {name: getattr(psutil, name) for name in ("NoSuchProcess", "AccessDenied")}
    pairs: Iterable[tuple[Any, Any]] = [
        (time, Namespace(time, monotonic=monotonic, time=wall_time, sleep=sleep, perf_counter=monotonic)),
        (os, os_namespace()),
        (zmq, Namespace(zmq, Poller=SimPoller)),
        (EngineContext, SimContext),
        (shortage.check_room, check_room),
        (queue.SimpleQueue, primitives.SimQueue),
        (queue, Namespace(queue, SimpleQueue=primitives.SimQueue)),
        (
            threading,
            Namespace(
                threading,
                Thread=primitives.SimThread,
                Event=primitives.SimEvent,
                Lock=primitives.SimLock,
                RLock=primitives.sim_rlock,
                Condition=primitives.SimCondition,
                current_thread=primitives.current_thread,
            ),
        ),
        (
            psutil,
            Namespace(
                psutil,
                Process=SimPsutilProcess,
                pids=psutil_pids,
                pid_exists=lambda pid: find(pid) is not None,
                boot_time=boot_time,
                **process_errors,
            ),
        ),
        (subprocess, Namespace(subprocess, Popen=SimPopen)),
        (
            signal,
            Namespace(
                signal,
                signal=signal_signal,
                set_wakeup_fd=set_wakeup_fd,
                pidfd_send_signal=pidfd_send_signal,
            ),
        ),
        (select, Namespace(select, poll=SimPoll)),
        (socket, Namespace(socket, socketpair=socketpair)),
        (secrets, Namespace(secrets, token_bytes=token_bytes, token_hex=token_hex)),
        (uuid, Namespace(uuid, uuid4=uuid4)),
        (tempfile, Namespace(tempfile, mkdtemp=mkdtemp)),
        (fcntl, Namespace(fcntl, flock=flock)),
        (gc, Namespace(gc, collect=lambda *_: 0, freeze=lambda: None)),
    ]
    return {id(real): substitute for real, substitute in pairs}
