"""Defaults of the magics: in ipython_config.py, with `%config`, and in the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError
from traitlets.config import Config

from nbengine.magics.config import NBEngine
from tests.unit.magics.conftest import FakeClient

ROOT = Path(__file__).parents[3]


def test_the_documentation_lists_each_default_as_it_is() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", page, re.MULTILINE)
    traits = NBEngine.class_own_traits(config=True)
    assert {name: (default, text) for name, default, text in rows} == {
        name: (repr(trait.default()), trait.help) for name, trait in traits.items()
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "temperature",
            "hot",
            "'temperature' trait of a NBEngine instance expected a float, not the str 'hot'",
        ),
        ("temperature", -1.0, "NBEngine.temperature must be a finite number, 0 or greater, got -1.0"),
        ("top_p", 3.0, "NBEngine.top_p must be in (0, 1], got 3.0"),
        ("max_tokens", 0, "NBEngine.max_tokens must be at least 1, or None, got 0"),
        ("seed", 1.5, "expected an int"),
        ("format", "html", "expected any of ['text', 'markdown', 'json', 'code']"),
        ("model", "", "NBEngine.model must be the name of a model"),
        ("footer", 3, "expected a boolean"),
    ],
)
def test_a_wrong_value_is_one_line(name: str, value: Any, message: str) -> None:
    config = NBEngine()
    before = getattr(config, name)
    with pytest.raises(TraitError) as raised:
        setattr(config, name, value)
    assert message in str(raised.value)
    assert getattr(config, name) == before
    with pytest.raises(UsageError) as refused:
        NBEngine(config=Config(NBEngine={name: value}))
    assert str(refused.value).startswith("the configuration of NBEngine is wrong: ")
    assert "\n" not in str(refused.value)


def test_config_shows_all_and_changes_what_follows(
    shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%config NBEngine").raise_error()
    shown = capsys.readouterr().out
    assert all(f"NBEngine.{name}=" in shown for name in NBEngine.class_own_traits(config=True))
    shell.run_cell("%config NBEngine.top_k = 7").raise_error()
    shell.run_cell("%config NBEngine.top_k = -7").raise_error()
    shell.run_cell("%chat hi").raise_error()
    assert engine.requests[0][1].top_k == 7


def test_ipython_config_holds_before_the_extension_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "ipython_config.py").write_text(
        "c = get_config()\nc.NBEngine.temperature = 0.25\nc.NBEngine.max_tokens = 33\nc.NBEngine.temprature = 1\n"
        "c.HistoryManager.enabled = False\n"
    )
    command = [sys.executable, "-m", "IPython", "--profile-dir", str(tmp_path), "--no-banner", "-c"]
    lines = [
        "%load_ext nbengine",
        "t = %config NBEngine.temperature",
        "n = %config NBEngine.max_tokens",
        "print(t, n)",
    ]
    done = subprocess.run(
        [*command, "\n".join(lines)],
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.25 33"
    assert (
        "`temprature` not recognized by `NBEngine`.  Did you mean `temperature`?" in done.stdout + done.stderr
    )
