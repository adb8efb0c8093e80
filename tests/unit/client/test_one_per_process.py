"""A process has one shared instance of a class, however many threads ask, and a forked child has its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from nbengine.runtime.one_per_process import OnePerProcess

THREADS = 32

IN_A_FORK = """
import asyncio, os, signal, threading, warnings
from nbengine.client.threads.loop_thread import LoopThread
from nbengine.magics.generation.background import Background
from nbengine.runtime.one_per_process import OnePerProcess

# Newer versions of Python say that a process with threads is forked, which is what this is about.
warnings.simplefilter("ignore", DeprecationWarning)
making, may_go_on = threading.Event(), threading.Event()

class Slow(OnePerProcess):
    def __init__(self):
        self.pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            making.set()
            may_go_on.wait()

maker = threading.Thread(target=Slow.shared)
maker.start()
making.wait()  # From here the other thread has the lock.
loop_thread, background = LoopThread.shared(), Background.shared()
child = os.fork()
if child == 0:
    signal.alarm(60)  # A child that waits for a lock ends by this signal.
    assert Slow.shared().pid == os.getpid() != os.getppid()
    assert LoopThread.shared() is not loop_thread and Background.shared() is not background

    async def thread_name():
        return threading.current_thread().name

    assert LoopThread.shared().run(thread_name()) == "nbengine-loop"
    ran = threading.Event()
    Background.shared().call_soon(ran.set)
    assert ran.wait(60)
    os._exit(0)
_, status = os.waitpid(child, 0)
may_go_on.set()
maker.join()
assert status == 0, status
assert Slow.shared().pid == os.getpid()
assert LoopThread.shared() is loop_thread and Background.shared() is background
"""


def test_threads_that_ask_together_get_the_one_that_is_made() -> None:
    made: list[OnePerProcess] = []
    all_ask = threading.Event()

    class Slow(OnePerProcess):
        def __init__(self) -> None:
            made.append(self)
            assert all_ask.wait(60)

    def ask(number: int) -> Slow:
        if number == THREADS - 1:
            all_ask.set()
        return Slow.shared()

    with ThreadPoolExecutor(THREADS) as pool:
        found = set(pool.map(ask, range(THREADS)))
    assert found == set(made)
    assert len(made) == 1


def test_each_class_has_an_instance_of_its_own_and_others_are_not_shared() -> None:
    class One(OnePerProcess):
        pass

    class Other(OnePerProcess):
        pass

    class Derived(One):
        pass

    shared = [kind.shared() for kind in (One, Other, Derived)]
    assert [type(instance) for instance in shared] == [One, Other, Derived]
    assert One.shared() is shared[0]
    assert One() is not One.shared()


def test_a_forked_child_makes_its_own_also_while_another_thread_has_the_lock() -> None:
    subprocess.run([sys.executable, "-c", IN_A_FORK], check=True, timeout=120)
