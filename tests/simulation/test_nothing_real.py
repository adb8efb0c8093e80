"""No world runs where something real is within its reach."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from nbengine.runtime import processes
from tests.simulation import substitutes


def test_a_forgotten_package_keeps_every_world_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    without = tuple(name for name in substitutes.PACKAGES if name != "nbengine.runtime.")
    assert without != substitutes.PACKAGES
    substitutes._table.cache_clear()
    substitutes._before.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(substitutes, "PACKAGES", without)
            ran = False
            with pytest.raises(RuntimeError, match=r"nbengine\.runtime\.processes"), substitutes.installed():
                ran = True
            assert not ran
            assert processes.os is os
    finally:
        substitutes._table.cache_clear()
        substitutes._before.cache_clear()


def test_a_module_that_is_loaded_between_two_worlds_gets_substitutes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with substitutes.installed():
        pass
    later = ModuleType("nbengine.client.loaded_later")
    later.os = os  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, later.__name__, later)
    with substitutes.installed():
        assert later.os is not os
        assert substitutes.real_things_left() == []
    assert later.os is os
