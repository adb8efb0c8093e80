"""The configuration decides where an engine's sockets are."""

from __future__ import annotations

import pytest

from nbengine.config import ParallelConfig
from nbengine.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("options", "networked"),
    [
        ({}, False),
        ({"data_parallel_size": 4}, False),
        ({"distributed_executor_backend": "mp"}, False),
        ({"data_parallel_address": "127.0.0.1"}, True),
        ({"data_parallel_backend": "ray"}, True),
        ({"distributed_executor_backend": "ray"}, False),
    ],
)
def test_an_engine_is_on_a_network_only_where_it_must(options: dict, networked: bool) -> None:
    assert ParallelConfig(**options).networked is networked


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "fe80::1", "node7", "node7.example"])
def test_an_address_is_that_of_one_machine(address: str) -> None:
    assert ParallelConfig(data_parallel_address=address).data_parallel_address == address


@pytest.mark.parametrize(
    "address", ["", "0.0.0.0", "::", "224.0.0.1", "*", "tcp://10.0.0.1", "10.0.0.1:5555", "a b", "::1/64"]
)
def test_no_address_is_that_of_all_interfaces_or_none(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="data_parallel_address"):
        ParallelConfig(data_parallel_address=address)
