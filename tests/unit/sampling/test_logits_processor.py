"""Logits processors of one's own: found by name, told about every row, and able to refuse a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbengine.config import EngineConfig, ModelConfig
from nbengine.errors import EngineStartError, NBEngineError, RequestError
from nbengine.sampling.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    check_params,
    create_logits_processors,
    load_logits_processors,
)
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.sampler import Sampler, StepConstraints
from nbengine.sampling_params import SamplingParams

MODULE = """
from nbengine.sampling.logits_processor import LogitsProcessor

class Good(LogitsProcessor):
    def update_state(self, update): ...
    def apply(self, logits, rows): return logits

class Unfinished(LogitsProcessor):
    def apply(self, logits, rows): return logits

class Breaking(Good):
    def __init__(self, config, device):
        raise OSError("no such table")

class Stranger: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_processors.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_processors"


def config(*names: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(logits_processors=names))


def test_processors_are_made_in_the_order_of_their_names(module: str) -> None:
    found = create_logits_processors(config(f"{module}:Good", f"{module}:Good"), torch.device("cpu"))
    assert [type(processor).__name__ for processor in found] == ["Good", "Good"]
    assert load_logits_processors(()) == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_processors:Missing", "cannot be imported: AttributeError"),
        ("nothing_of_that_name:X", "cannot be imported: ModuleNotFoundError"),
        ("own_broken:X", "cannot be imported: ModuleNotFoundError"),
        ("own_processors:Stranger", "no subclass of"),
        ("own_processors:Breaking", "cannot be made: OSError: no such table"),
        ("own_processors:Unfinished", "cannot be made: TypeError"),
    ],
)
@pytest.mark.usefixtures("module")
def test_a_processor_that_cannot_be_had_is_named(name: str, reason: str) -> None:
    with pytest.raises(EngineStartError, match=rf"{name} .*{reason}"):
        create_logits_processors(config(name), torch.device("cpu"))


class Doubling(LogitsProcessor):
    def update_state(self, update: BatchUpdate) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return logits * 2

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if params.extra_args and "twice" not in params.extra_args:
            raise KeyError("twice")


def test_a_refusal_names_the_processor_and_its_reason() -> None:
    check_params([Doubling], SamplingParams(extra_args={"twice": 1}))
    check_params([Doubling], SamplingParams())
    with pytest.raises(RequestError, match="Doubling refuses: 'twice'"):
        check_params([Doubling], SamplingParams(extra_args={"once": 1}))


def greedy(rows: int) -> SamplingMetadata:
    zeros = np.zeros(rows)
    return SamplingMetadata.build(
        zeros.astype(np.float32),
        zeros.astype(np.int64),
        zeros + 1,
        zeros.astype(np.float32),
        vocab_size=4,
        device=torch.device("cpu"),
    )


def test_processors_follow_each_other_and_come_before_bans() -> None:
    class Favouring(Doubling):
        def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
            logits[:, 2] += 7
            return logits

    logits = torch.tensor([[4.0, 0.0, 0.0, 1.0]])
    processors = [Favouring(config(), torch.device("cpu")), Doubling(config(), torch.device("cpu"))]
    step = StepConstraints(rows=np.array([0]))
    assert Sampler(processors)(logits.clone(), greedy(1), None, step).token_ids.tolist() == [2]
    banned = replace(step, banned=torch.tensor([2]))
    assert Sampler(processors)(logits.clone(), greedy(1), None, banned).token_ids.tolist() == [0]


@pytest.mark.parametrize("change", [lambda x: x[:, :3], lambda x: x.double()])
def test_a_result_of_another_shape_or_type_is_named(change: Callable[[torch.Tensor], Any]) -> None:
    class Wrong(Doubling):
        def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
            return change(logits)

    sampler = Sampler([Wrong(config(), torch.device("cpu"))])
    with pytest.raises(NBEngineError, match=r"Wrong returned torch.float(32|64) \(1, \d\)"):
        sampler(torch.zeros(1, 4), greedy(1), None, StepConstraints(rows=np.array([0])))
