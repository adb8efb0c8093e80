"""A signal is handled wherever the main thread waits."""

from __future__ import annotations

import subprocess
import sys

WAITING = """
import os, queue, signal, sys, threading
from nbengine.runtime.lifeline import Lifeline

reader, writer = os.pipe()
lifeline = Lifeline(reader, lambda: None)
lifeline.start()
woken = queue.SimpleQueue()
# Now another thread takes the signal, and nothing interrupts the main thread's wait.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
lifeline.wake_on_signals(lambda: woken.put(None))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
woken.get(timeout=60)
os.write(1, b"woken\\n")
"""


def test_a_signal_wakes_a_main_thread_that_it_does_not_interrupt() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["handled", "woken"], done.stderr
