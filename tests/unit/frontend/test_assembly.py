"""A frontend does its own part of a start while the engine gets ready."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError
from nbengine.frontend.assembly import assemble
from nbengine.frontend.requests import prompt_length
from nbengine.ipc.control_messages import EngineReady

READY = EngineReady(
    rank=0,
    num_blocks=4,
    block_size=16,
    max_model_len=64,
    kv_cache_bytes=1,
    weights_bytes=1,
    device="cpu",
    dtype="float32",
    supported_tasks=["generate"],
    pid=1,
)


class StartingClient:
    """The client of an engine on this machine that is ready when `become_ready` returns."""

    connection = None

    def __init__(self, config: EngineConfig, become_ready: Callable[[], EngineReady]) -> None:
        self.config = config
        self._become_ready = become_ready
        self.is_abandoned = False

    def wait_ready(self, progress: object) -> EngineReady:
        return self._become_ready()

    def abandon(self) -> None:
        self.is_abandoned = True


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tokenizer]:
    """The tokenizers whose descriptions have been read."""
    found: list[Tokenizer] = []
    most_bytes = prompt_length.most_bytes_of_token

    def noted(tokenizer: Tokenizer) -> int | None:
        found.append(tokenizer)
        return most_bytes(tokenizer)

    monkeypatch.setattr(prompt_length, "most_bytes_of_token", noted)
    return found


def test_the_tokenizer_is_described_once_and_before_the_engine_is_ready(
    engine_config: EngineConfig, read: list[Tokenizer]
) -> None:
    described = []

    def become_ready() -> EngineReady:
        described.append(len(read))
        return READY

    client = StartingClient(engine_config, become_ready)
    parts = assemble(client, None)
    assert described == [1]
    assert len(read) == 1
    assert parts.ready is READY
    assert parts.input_processor.max_model_len == READY.max_model_len
    assert not client.is_abandoned


@pytest.mark.parametrize("error", [EngineStartError("no memory"), KeyboardInterrupt()])
def test_an_engine_that_does_not_get_ready_is_given_up(
    error: BaseException, engine_config: EngineConfig
) -> None:
    def fail() -> EngineReady:
        raise error

    client = StartingClient(engine_config, fail)
    with pytest.raises(type(error)):
        assemble(client, None)
    assert client.is_abandoned
