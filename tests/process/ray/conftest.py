"""A Ray cluster of two nodes with a CPU each, for all tests here: what wants two places gets one on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from process_support.ray_cluster import RayCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that break the cluster behind all others."""
    items.sort(key=lambda item: item.get_closest_marker("breaks_the_cluster") is not None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster([{"CPU": 1}, {"CPU": 1}])
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def clean_nodes(cluster: RayCluster, no_leftovers: None) -> Iterator[None]:
    """Check that engines leave nothing on the nodes."""
    yield
    cluster.wait_clean()
