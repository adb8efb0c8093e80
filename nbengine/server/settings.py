"""The settings of a server, checked as a whole."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from nbengine.checks import require, require_int
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.requests.output_interval import FOR_READERS, checked_interval

DEFAULT_PORT = 8000
SHORTEST_KEY = 8
_LOCAL_NAMES = ("localhost",)


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens, whom it answers, and how much it takes on.

    Attributes:
        host: the address to listen at; without `api_keys` it must be this machine's own.
        port: 0 takes any free one.
        api_keys: keys of which a caller must give one; they are never shown.
        served_model_names: the names that callers may give for the model; the first is the one that answers
            carry. Empty: the name under which the engine was started.
        allowed_hosts: further values of the header `Host` that a server without keys answers to. A page of
            another site could otherwise use it through its visitor's browser.
        max_body_bytes: the most bytes of a body.
        max_total_body_bytes: the most bytes of all bodies whose requests are not answered yet, those that are
            still coming included.
        max_concurrent_requests: the most completions that this server has in the engine at a time.
        max_queued_requests: the most requests that wait for their turn; others get 429.
        max_connections: the most connections; further ones are closed at once.
        read_timeout: seconds that a caller may take for the headers, and between two parts of a body.
        write_timeout: seconds that a caller may leave an answer unread before it is given up.
        output_interval: seconds for which the engine may hold the tokens of a stream, to send them together; the first
            token and the end are sent at once. 0 sends each token by itself.
        ping_interval: seconds without an event after which a stream gets a comment, so that nothing between
            takes it for dead.
        drain_timeout: seconds that requests get to finish once the server is to end.
        tool_parser, reasoning_parser: the form of the model's calls and of its reasoning: "auto" (the chat
            template tells), "none", or a name.
        trust_request_templates: callers may send a `chat_template`.
        log_requests: log a line for each request: no prompts, no answers.
        log_prompts: log prompts, too.
        traces_endpoint: the collector that gets a span of each request, by OTLP over HTTP; None: nobody.

    Raises:
        InvalidArgumentError: a value is out of range, or the server would be open to others without a key.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_total_body_bytes: int = 256 << 20
    max_concurrent_requests: int = 1024
    max_queued_requests: int = 1024
    max_connections: int = 4096
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    output_interval: float = FOR_READERS
    ping_interval: float = 15.0
    drain_timeout: float = 30.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_templates: bool = False
    log_requests: bool = False
    log_prompts: bool = False
    traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in ("host", "tool_parser", "reasoning_parser"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidTypeError(name, value, "a text that is not empty")
        require_int("port", self.port)
        require("port", self.port, 0 <= self.port < 2**16, "0 (any free one) to 65535")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            require_int(name, value)
            require(name, value, value >= least, f"at least {least}")
        for name in ("read_timeout", "write_timeout", "ping_interval"):
            require(name, getattr(self, name), getattr(self, name) > 0, "more than 0 seconds")
        checked_interval(self.output_interval)
        require("drain_timeout", self.drain_timeout, self.drain_timeout >= 0, "0 or more seconds")
        for name in ("served_model_names", "allowed_hosts"):
            value = getattr(self, name)
            require(name, value, all(isinstance(text, str) and text for text in value), "texts, none empty")
        self._check_keys()

    def _check_keys(self) -> None:
        # A key must not get into a message.
        good = all(
            isinstance(key, str) and len(key) >= SHORTEST_KEY and key.isascii() for key in self.api_keys
        )
        allowed = f"of at least {SHORTEST_KEY} ASCII characters each, without spaces"
        if not good or any(not key.isprintable() or " " in key for key in self.api_keys):
            raise InvalidArgumentError("api_keys", "(hidden)", allowed)
        if not self.api_keys and not self.is_local:
            raise InvalidArgumentError(
                "host",
                self.host,
                "an address of this machine alone, such as 127.0.0.1, unless there is an API key (--api-key-file, "
                "--api-key or NBENGINE_API_KEY): everybody who reaches the server could use it",
            )

    @property
    def is_local(self) -> bool:
        """Tell whether only processes of this machine reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is this machine's own."""
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_COUNTS = {
    "max_body_bytes": 1024,
    "max_total_body_bytes": 1024,
    "max_concurrent_requests": 1,
    "max_queued_requests": 0,
    "max_connections": 1,
}
"""The settings that count something, and the least value of each."""
