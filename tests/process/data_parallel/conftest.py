"""Engines of several engine cores on small models, with transformers and an engine of one core beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.data_parallel_engines import TOPOLOGIES, Case, model_of
from process_support.other_user import EndsWatch
from process_support.parallel_engines import OPTIONS

from nbengine import LLM


@pytest.fixture(scope="module", params=TOPOLOGIES)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    private_runtime_dir: Path,
    private_socket_dir: Path,
) -> Iterator[Case]:
    topology = TOPOLOGIES[request.param]
    model, oracle = model_of(topology, tmp_path_factory.mktemp("model"))
    with EndsWatch() as watch:
        engine = topology.start(model, request.param)
    try:
        with LLM(model, multiprocess=False, **OPTIONS) as alone:
            yield Case(topology, oracle, engine, alone, watch)
    finally:
        engine.shutdown()
