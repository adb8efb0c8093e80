"""Engines of several workers on small models, with transformers and an engine of one worker beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.other_user import EndsWatch
from process_support.parallel_engines import OPTIONS, TOPOLOGIES, Case
from process_support.tiny_models import TinyModel

from nbengine import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams


@pytest.fixture(scope="module")
def model_of_blocks(
    tmp_path_factory: pytest.TempPathFactory, private_runtime_dir: Path, private_socket_dir: Path
) -> Path:
    """The directory of `TinyModel.of_blocks`; with writing it, transformers leaves a thread behind."""
    directory = tmp_path_factory.mktemp("blocks")
    TinyModel.of_blocks().write(directory)
    return directory


@pytest.fixture(scope="module", params=TOPOLOGIES)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    private_runtime_dir: Path,
    private_socket_dir: Path,
) -> Iterator[Case]:
    topology = TOPOLOGIES[request.param]
    directory = tmp_path_factory.mktemp("model")
    oracle = topology.model.write(directory)
    options = OPTIONS | topology.options
    with EndsWatch() as watch:
        engine = AsyncLLM(
            str(directory),
            name=request.param,
            tensor_parallel_size=topology.tp,
            pipeline_parallel_size=topology.pp,
            **options,
        )
    try:
        with LLM(str(directory), multiprocess=False, **options) as alone:
            # Tests are checked for processes that they leave behind: the one that checks grammars comes first.
            structured = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
            alone.generate("x", structured, use_tqdm=False)
            engine.submit("x", structured).get_blocking(timeout=60)
            yield Case(topology, directory, oracle, engine, alone, watch)
    finally:
        engine.shutdown()
