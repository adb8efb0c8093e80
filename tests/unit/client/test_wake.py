"""Waking a polling thread."""

from __future__ import annotations

import select

from nbengine.client.link.wake import WakePipe


def readable(pipe: WakePipe) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def test_it_is_readable_from_a_wake_up_until_it_is_drained() -> None:
    pipe = WakePipe()
    assert not readable(pipe)
    pipe.wake()
    pipe.wake()
    assert readable(pipe)
    pipe.drain()
    assert not readable(pipe)
    pipe.close()


def test_any_number_of_wake_ups_never_blocks() -> None:
    pipe = WakePipe()
    for _ in range(100_000):
        pipe.wake()
    pipe.drain()
    assert not readable(pipe)
    pipe.close()


def test_waking_after_the_end_has_no_effect() -> None:
    pipe = WakePipe()
    pipe.close()
    # It has the descriptors that were the first one's.
    other = WakePipe()
    pipe.wake()
    assert not readable(other)
    other.close()
