"""Failed comparisons of what frames tell with what a mirror knows say how the two differ."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.unit.widgets.frame_reader")
