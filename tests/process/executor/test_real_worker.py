"""The real worker in processes: encoders, and the utilities that every worker takes part in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbengine import LLM, SamplingParams

PROMPTS = ["hello", "a somewhat longer prompt, which spans more than one block", "東京 🙂"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def two_stages(no_leftovers: None) -> Iterator[LLM]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}
    with LLM("random-tiny", multiprocess=False, pipeline_parallel_size=2, **options) as llm:
        yield llm


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_all_workers_sleep_wake_up_and_write_profiles_of_their_own(two_stages: LLM, tmp_path: Path) -> None:
    before = generate(two_stages)
    for level in (1, 2):
        two_stages.sleep(level)
        two_stages.wake_up()
        assert generate(two_stages) == before
    two_stages.start_profile(str(tmp_path))
    generate(two_stages)
    report = two_stages.stop_profile()
    names = [Path(path).name for path in report.paths]
    assert [f"-rank{rank}-" in name for rank, name in enumerate(names)] == [True, True]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())


def test_an_encoder_gives_the_same_vectors_from_a_process_of_its_own() -> None:
    vectors = []
    for backend in ("uni", "mp"):
        options: dict[str, Any] = {"device": "cpu", "distributed_executor_backend": backend}
        with LLM("all-minilm-l6-v2", multiprocess=False, **options) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
    np.testing.assert_array_equal(*vectors)
