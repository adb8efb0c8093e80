"""The flags of a server, for `nbengine serve` and `%engine serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from nbengine.errors import InvalidArgumentError, NBEngineError, shown
from nbengine.ipc.private import reason_of
from nbengine.server.settings import ServerSettings

KEY_VARIABLE = "NBENGINE_API_KEY"
_MOST_KEY_BYTES = 1 << 16


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a server to a parser; `settings_of` reads what it finds."""
    group = parser.add_argument_group("server")
    defaults = ServerSettings()

    def add(flag: str, help_text: str, **options: Any) -> None:
        group.add_argument(flag, help=help_text, default=None, **options)

    add(
        "--host",
        f"address to listen at (default {defaults.host}); others than this machine's need a key",
        metavar="H",
    )
    add("--port", f"port (default {defaults.port}; 0: any free one)", type=int, metavar="N")
    add(
        "--api-key",
        "a key that callers must give; others may read it in the shell's history",
        metavar="K",
        action="append",
    )
    add("--api-key-file", f"file with a key on each line (or the variable {KEY_VARIABLE})", metavar="FILE")
    add("--served-model-name", "name of the model for callers, or several", metavar="NAME", nargs="+")
    add(
        "--allowed-host",
        "another name under which callers without a key reach it",
        metavar="HOST",
        action="append",
    )
    add(
        "--max-concurrent-requests",
        f"completions at a time (default {defaults.max_concurrent_requests})",
        type=int,
        metavar="N",
    )
    add(
        "--max-queued-requests",
        f"requests that may wait (default {defaults.max_queued_requests})",
        type=int,
        metavar="N",
    )
    add(
        "--max-body-bytes", f"most bytes of a body (default {defaults.max_body_bytes})", type=int, metavar="N"
    )
    add(
        "--output-interval",
        "seconds for which tokens of a stream may be held, to be sent together "
        f"(default {defaults.output_interval:g}; 0: each by itself)",
        type=float,
        metavar="S",
    )
    add(
        "--drain-timeout",
        f"seconds for running requests at the end (default {defaults.drain_timeout:g})",
        type=float,
        metavar="S",
    )
    add("--tool-parser", "form of the model's calls (default auto: from the chat template)", metavar="NAME")
    add("--reasoning-parser", "form of the model's reasoning (default auto)", metavar="NAME")
    add("--trust-request-templates", "take chat_template from requests", action="store_true")
    add("--log-requests", "log a line for each request, without its prompt", action="store_true")
    add("--traces-endpoint", "collector that gets a span of each request (OTLP over HTTP)", metavar="URL")
    add("--log-prompts", "log prompts, too", action="store_true")


def settings_of(parsed: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> ServerSettings:
    """Make the settings from parsed flags and the environment.

    Raises:
        InvalidArgumentError: a value is not allowed.
        NBEngineError: the file of keys cannot be read.
    """
    names = {"served_model_name": "served_model_names", "allowed_host": "allowed_hosts"}
    given = {name: value for name, value in parsed.items() if value is not None and name in _FLAGS}
    keys = [*given.pop("api_key", ()), *_keys_in(given.pop("api_key_file", None))]
    if not keys and environment.get(KEY_VARIABLE):
        keys = [environment[KEY_VARIABLE]]
    values = {names.get(name, name): value for name, value in given.items()}
    for name in names.values():
        if name in values:
            values[name] = tuple(values[name])
    return ServerSettings(api_keys=tuple(keys), **values)


def _keys_in(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            lines = file.read(_MOST_KEY_BYTES).decode().split("\n")
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is no text"
        raise NBEngineError(f"the keys in {shown(path)} cannot be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InvalidArgumentError("api_key_file", path, "a file with a key on each line")
    return keys


_FLAGS = frozenset(
    (
        "host",
        "port",
        "api_key",
        "api_key_file",
        "served_model_name",
        "allowed_host",
        "max_concurrent_requests",
        "max_queued_requests",
        "max_body_bytes",
        "output_interval",
        "drain_timeout",
        "tool_parser",
        "reasoning_parser",
        "trust_request_templates",
        "log_requests",
        "log_prompts",
        "traces_endpoint",
    )
)
