"""The settings of a server, and the flags that make them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from nbengine.errors import InvalidArgumentError
from nbengine.server.arguments import add_server_arguments, settings_of
from nbengine.server.settings import ServerSettings

KEY = "a-secret-key"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert ServerSettings(host=host).is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.test", "localhost.evil.test"])
def test_other_addresses_need_a_key_and_say_so(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--api-key"):
        ServerSettings(host=host)
    assert not ServerSettings(host=host, api_keys=(KEY,)).is_local


def test_keys_are_never_shown() -> None:
    assert KEY not in repr(ServerSettings(api_keys=(KEY,)))
    for wrong in ("short", f"{KEY} ", f"{KEY}\n", "schlüssel-key"):
        with pytest.raises(InvalidArgumentError) as refused:
            ServerSettings(api_keys=(KEY, wrong))
        assert KEY not in str(refused.value)
        assert wrong not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": -1},
        {"port": "http"},
        {"max_body_bytes": 0},
        {"max_concurrent_requests": 0},
        {"max_queued_requests": -1},
        {"read_timeout": 0},
        {"drain_timeout": -1},
        {"output_interval": -0.1},
        {"output_interval": 61},
        {"output_interval": "often"},
        {"host": ""},
        {"served_model_names": ("",)},
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        ServerSettings(**wrong)


def parsed(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return vars(parser.parse_args(words))


def test_flags_make_settings() -> None:
    flags = ("--port", "0", "--served-model-name", "a", "b", "--log-requests", "--allowed-host", "mine.test")
    assert settings_of(parsed(*flags, "--output-interval", "0.5"), {}) == ServerSettings(
        port=0,
        served_model_names=("a", "b"),
        log_requests=True,
        allowed_hosts=("mine.test",),
        output_interval=0.5,
    )


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-1\n\n second-key-2 \n")
    environment = {"NBENGINE_API_KEY": "from-environment"}
    assert settings_of(parsed(), environment).api_keys == ("from-environment",)
    flags = ("--api-key", KEY, "--api-key-file", str(file))
    assert settings_of(parsed(*flags), environment).api_keys == (KEY, "first-key-1", "second-key-2")
    file.write_text("\n")
    with pytest.raises(InvalidArgumentError, match="api_key_file"):
        settings_of(parsed("--api-key-file", str(file)), {})
