"""A logits processor is told of requests that come, move, are preempted and go, and its logits are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.models.loading import load_model
from nbengine.sampling.logits_processor import BatchUpdate, LogitsProcessor, RowAdded, RowMoved, RowRemoved
from nbengine.sampling_params import SamplingParams

MODULE = """
from tests.unit.worker.test_logits_processors import NoRepeat as Found
"""


class NoRepeat(LogitsProcessor):
    """Forbids each request that asks for it (`extra_args`) the tokens that it has, but those of its prompt."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.seen: dict[int, set[int]] = {}
        self.asked: dict[int, bool] = {}

    def update_state(self, update: BatchUpdate) -> None:
        for row, token in zip(update.sampled_rows.tolist(), update.sampled_token_ids.tolist(), strict=True):
            self.seen[row].add(token)
        for change in update.changes:
            match change:
                case RowAdded(row, params, prompt, output):
                    assert len(prompt)
                    assert row not in self.seen
                    self.seen[row] = set(output.tolist())
                    self.asked[row] = bool(params.extra_args)
                case RowRemoved(row):
                    del self.seen[row], self.asked[row]
                case RowMoved(source, target):
                    self.seen[target] = self.seen.pop(source)
                    self.asked[target] = self.asked.pop(source)

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        for position, row in enumerate(rows.tolist()):
            if self.asked[row]:
                logits[position, list(self.seen[row])] = -torch.inf
        return logits


@pytest.mark.parametrize("seed", range(3))
def test_its_state_follows_the_rows(
    driver: Callable,
    new_runner: Callable,
    oracle: Callable,
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    (tmp_path / "own_no_repeat.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    model = replace(tiny_config.model, logits_processors=("own_no_repeat:Found",))
    weights = load_model(tiny_config.model, torch.device("cpu"), torch.float32)
    run = driver(seed, chaos=0.8, runner=new_runner(weights, replace(tiny_config, model=model)))
    given = {}
    for index in range(12):
        prompt = [index + 1, 3, 5 * index, 9][: index % 4 + 1]
        params = SamplingParams(temperature=0, extra_args={"no_repeat": True} if index % 3 else None)
        given[str(index)] = prompt, params
        run.add(str(index), prompt, params, max_tokens=12)
    outputs = run.run()
    assert run.num_preemptions > 3
    for req_id, (prompt, params) in given.items():
        for count, token in enumerate(outputs[req_id]):
            before = outputs[req_id][:count]
            logits = oracle(prompt + before)[-1].clone()
            if params.extra_args:
                logits[before] = -torch.inf
            assert token == logits.argmax()
        if params.extra_args:
            assert len(set(outputs[req_id])) == 12
