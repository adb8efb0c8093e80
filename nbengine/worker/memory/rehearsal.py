"""The widest step that a sampler can have to do, done on dummy data, so that the memory that it takes is
known at the start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nbengine.sampling.logits import TokenMask
from nbengine.sampling.logprobs import LogprobRows
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.penalties import PenaltyRows, PenaltyTable
from nbengine.sampling.rows import ALL_ROWS
from nbengine.sampling.sampler import Sampler, StepConstraints
from nbengine.sampling_params import MAX_LOGPROBS, SamplingParams


class Rehearsal:
    """A step in which all requests of a full batch ask for everything at once. What outlives steps is there
    from the construction on, that is, during the forward pass, too: the table of penalties with all its
    columns, one list having an entry in each."""

    def __init__(self, vocab_size: int, num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_reqs = num_reqs
        self._device = device
        self._table = PenaltyTable(num_reqs, vocab_size, device, max_model_len)
        longest = np.arange(min(vocab_size, max_model_len), dtype=np.int32)
        self._table.add(0, SamplingParams(repetition_penalty=1.1), longest, longest[:0])

    def sample(self, logits: Tensor) -> None:
        """Sample `num_reqs` rows of logits, [num_reqs, vocabulary]; waits for the device."""
        num_reqs, rows = self._num_reqs, np.arange(self._num_reqs)
        words = torch.full((num_reqs, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=self._device)
        mask = TokenMask(ALL_ROWS, words)
        most = min(MAX_LOGPROBS, self._vocab_size)
        penalties = PenaltyRows.build(self._table, rows, rows, num_reqs, self._device)
        metadata = SamplingMetadata.build(
            temperature=np.ones(num_reqs, np.float32),
            top_k=np.zeros(num_reqs, np.int64),
            top_p=np.full(num_reqs, 0.9),
            min_p=np.zeros(num_reqs, np.float32),
            vocab_size=self._vocab_size,
            device=self._device,
        )
        metadata = replace(
            metadata,
            allowed=mask,
            penalties=penalties,
            logprobs=LogprobRows(ALL_ROWS, rows.tolist(), [most] * num_reqs),
        )
        uniform = torch.zeros(num_reqs, dtype=torch.float64, device=self._device)
        # A grammar's mask has its own words.
        step = StepConstraints(TokenMask(ALL_ROWS, words.clone()))
        sampled = Sampler()(logits, metadata, uniform, step)
        self._table.expect(penalties)
        self._table.make_room(penalties)
        self._table.append(penalties, sampled.token_ids)
        sampled.token_ids.cpu()
