"""The command `nbengine`, as far as it needs no engine."""

from __future__ import annotations

import pytest

import nbengine
from nbengine.cli import main


def test_version_is_one_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr() == (f"nbengine {nbengine.__version__}\n", "")
