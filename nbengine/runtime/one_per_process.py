"""The base of classes whose instance a process shares, such as a thread for all its engines."""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar, Self


class OnePerProcess:
    """The base of a class of which each process has one shared instance, besides any others.

    A forked child begins without one, because it has the parent's object but not its thread.
    """

    _shared: ClassVar[Any]
    _shared_lock: ClassVar[threading.Lock]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._forget_shared()
        os.register_at_fork(after_in_child=cls._forget_shared)

    @classmethod
    def _forget_shared(cls) -> None:
        cls._shared = None
        # A thread that had the parent's lock does not exist in a child.
        cls._shared_lock = threading.Lock()

    @classmethod
    def shared(cls) -> Self:
        """Return the shared instance of this process, which is made when it is first asked for."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
            shared: Self = cls._shared
            return shared
