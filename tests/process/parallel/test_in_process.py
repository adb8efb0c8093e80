"""Workers in processes of their own under an engine core in this process."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from nbengine import LLM, SamplingParams
from nbengine.errors import EngineDeadError

OPTIONS: dict[str, Any] = {
    "model": "random-tiny",
    "dtype": "float32",
    "multiprocess": False,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
}
PROMPTS = [f"prompt {number} " * (number + 1) for number in range(8)]
PARAMS = [
    SamplingParams(temperature=0.9 if number % 2 else 0, seed=number, max_tokens=12) for number in range(8)
]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_its_workers_say_what_one_process_says_and_end_with_it() -> None:
    with LLM(**OPTIONS) as alone:
        expected = tokens(alone)
    with LLM(**OPTIONS, tensor_parallel_size=2) as llm:
        assert len(psutil.Process().children()) == 2
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        assert [worker.rank for worker in llm.stats().engines[0].workers] == [0, 1]
        victim = psutil.Process().children()[1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker \d \(TP\d\).*SIGKILL"):
            tokens(llm)
    assert psutil.Process().children() == []
