"""The sampling parameters of the batch's requests, by row, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.transfer import upload
from nbengine.sampling.logits import LogitBias, TokenMask
from nbengine.sampling.logits_processor import BatchUpdate, LogitsProcessor, RowAdded, RowMoved, RowRemoved
from nbengine.sampling.logprobs import LogprobRows
from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.penalties import PenaltyRows, PenaltyTable
from nbengine.sampling.random_streams import uniforms
from nbengine.sampling.rows import rows_of, take_rows
from nbengine.sampling.sampler import StepConstraints
from nbengine.sampling_params import SamplingParams
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.bad_words import BadWords
from nbengine.worker.batch.row_table import RowTable

_ROW = np.dtype(
    [
        ("stream", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("temperature", np.float32),
        ("num_logprobs", np.int64),
        ("has_allowed", np.bool_),
        ("has_penalties", np.bool_),
        ("has_more_ends", np.bool_),
    ]
)
MOST_ENDS = 8
"""End tokens of a request that `ends` has room for."""
_TOKEN = np.dtype([("token_id", np.int64)])
_BIAS = np.dtype([("token_id", np.int64), ("bias", np.float32)])
_EARLY_END = np.dtype([("token_id", np.int64), ("min_tokens", np.int64)])


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The batch's tokens, shared with the batch that keeps them: `token_ids` [rows, length], and two columns
    by row."""

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]


class SamplingBatch:
    """The sampling parameters of the batch's rows, and what has to be known of their tokens.

    Rows come with `add` and leave with `remove`; nothing else changes what is kept. A feature for which no
    row asks costs a test for emptiness.
    """

    def __init__(
        self,
        tokens: RowTokens,
        vocab_size: int,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
        allocations: Allocations | None = None,
    ) -> None:
        self._allocations = allocations or Allocations()
        self.rows = np.zeros(len(tokens.num_tokens), _ROW)
        self.ends = np.full((len(self.rows), MOST_ENDS), -1)
        """[rows, ends] int64: the tokens that may end a request; -1: no further one."""
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._device = device
        self._allowed = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._bad_tokens = RowTable(_TOKEN)
        self._bad_words = BadWords()
        self._early_ends = RowTable(_EARLY_END)
        self._bias = RowTable(_BIAS)
        self._penalties = PenaltyTable(
            len(self.rows), vocab_size, device, tokens.token_ids.shape[1], self._allocations.checkpoint
        )
        self._processors = _ProcessorFeed(processors) if processors else None
        self._version = 0
        self._metadata_key: tuple[int, bytes] | None = None
        self._metadata: SamplingMetadata
        self._metadata_rows: NDArray[np.int64]
        self._positions = np.empty(0, np.int64)

    # Rows.

    def add(self, row: int, params: SamplingParams, stream: int, *, prompt_is_known: bool = True) -> bool:
        """Take in a request whose tokens are in their row already.

        Args:
            row: the row of the request.
            params: parameters that were checked against the vocabulary.
            stream: the request's stream of random numbers.
            prompt_is_known: the prompt was given as tokens, not as embeddings.

        Returns:
            Whether there was enough memory for its penalties; where not, the request is there without them.
        """
        self._version += 1
        self._set_row(row, params, stream)
        if params.allowed_token_ids is not None:
            self._set_allowed(row, params.allowed_token_ids)
        words = params.bad_words_token_ids or ()
        if single := [word[0] for word in words if len(word) == 1]:
            self._bad_tokens.add(row, token_id=np.array(single))
        if several := [word for word in words if len(word) > 1]:
            self._bad_words.add(row, several)
        self._set_ends(row, params)
        if params.min_tokens and (ends := _end_tokens(params, self._vocab_size)):
            self._early_ends.add(row, token_id=np.array(ends), min_tokens=params.min_tokens)
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias.items(), strict=True)
            self._bias.add(row, token_id=np.array(token_ids), bias=np.array(biases))
        if self._processors is not None:
            prompt, output = self._known_tokens(row, prompt_is_known)
            self._processors.changed(RowAdded(row, params, prompt.copy(), output.copy()))
        if params.has_penalties:
            with self._allocations.attempt() as attempt:
                self._penalties.add(row, params, *self._known_tokens(row, prompt_is_known))
            if attempt.failed:
                self._penalties.remove(row)
            self.rows["has_penalties"][row] = not attempt.failed
            return not attempt.failed
        return True

    def remove(self, row: int, last: int) -> None:
        """Forget a row; the row `last` takes its place."""
        self._version += 1
        for table in self._tables():
            table.remove(row)
        if self._processors is not None:
            self._processors.changed(RowRemoved(row))
        if row != last:
            self._move(last, row)

    def _move(self, source: int, target: int) -> None:
        self.rows[target] = columns = self.rows[source]
        self.ends[target] = self.ends[source]
        for table in self._tables():
            table.move(source, target)
        if columns["has_allowed"]:
            self._allowed[target] = self._allowed[source]
        if self._processors is not None:
            self._processors.changed(RowMoved(source, target))

    def _tables(self) -> list[RowTable | BadWords | PenaltyTable]:
        """List the tables that hold anything."""
        tables = (self._bad_tokens, self._bad_words, self._early_ends, self._bias, self._penalties)
        return [table for table in tables if table]

    def _set_row(self, row: int, params: SamplingParams, stream: int) -> None:
        columns = self.rows[row]
        columns["stream"] = stream
        columns["temperature"] = 0 if params.is_greedy else params.temperature
        columns["top_k"], columns["top_p"], columns["min_p"] = params.top_k, params.top_p, params.min_p
        columns["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        columns["has_allowed"] = params.allowed_token_ids is not None
        columns["has_penalties"] = params.has_penalties

    def _set_ends(self, row: int, params: SamplingParams) -> None:
        ends = set(params.stop_token_ids)
        if params.eos_token_id is not None and not params.ignore_eos:
            ends.add(params.eos_token_id)
        self.ends[row] = -1
        self.ends[row, : len(ends)] = list(ends)[:MOST_ENDS]
        self.rows["has_more_ends"][row] = len(ends) > MOST_ENDS

    def _set_allowed(self, row: int, token_ids: Sequence[int]) -> None:
        if not len(self._allowed):
            self._allowed = np.zeros((len(self.rows), self._allowed.shape[1]), np.int32)
        bits = np.zeros(32 * self._allowed.shape[1], np.uint8)
        bits[token_ids] = 1
        self._allowed[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def _known_tokens(self, row: int, prompt_is_known: bool) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tokens = self._tokens
        start, end = tokens.num_prompt_tokens[row], tokens.num_tokens[row]
        prompt = tokens.token_ids[row, : start if prompt_is_known else 0]
        return prompt, tokens.token_ids[row, start:end]

    # A step.

    @property
    def needs_tokens(self) -> bool:
        """Return whether the tokens of the step before must be in their rows before the next step is
        sampled."""
        return bool(len(self._bad_words)) or self._processors is not None

    def metadata(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """Return what `rows` ask for, in that order; it is made again only when the batch or the order has
        changed."""
        key = (self._version, rows.tobytes())
        if key != self._metadata_key:
            # Should memory run out, nothing of what is half there is taken for whole.
            self._metadata_key = None
            self._positions = np.full(len(self.rows), -1)
            self._positions[rows] = np.arange(len(rows))
            self._metadata_rows = rows.copy()
            self._metadata = self._build(rows)
            self._metadata_key = key
        return self._metadata

    def is_plain(self, rows: NDArray[np.int64]) -> bool:
        """Return whether the next tokens of `rows` are taken or drawn from the model's own logits, whatever comes before
        them, and `ends` has all their ends."""
        if self._processors is not None or len(self._early_ends) or len(self._bad_words):
            return False
        return not (self.metadata(rows).asks_more or self.rows["has_more_ends"][rows].any())

    def put_draws(self, draws: NDArray[np.void], rows: NDArray[np.int64]) -> bool:
        """Write what the draws of the next tokens of `rows` need into `draws`, a `DRAW_ROW` each; return False if none of
        them is drawn."""
        known = self.metadata(rows).draws
        if known is None:
            return False
        draws[:] = known
        draws["stream"], draws["number"] = self.rows["stream"][rows], self._num_output_tokens(rows)
        draws["uniform"] = self.uniforms(rows)
        return True

    def uniforms(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the random number of each row's next output token, in [0, 1)."""
        return uniforms(self.rows["stream"][rows], self._num_output_tokens(rows))

    def constraints(
        self, rows: NDArray[np.int64], grammar: TokenMask | None = None
    ) -> StepConstraints | None:
        """Return the constraints on the next token alone of `rows`, the rows with which `metadata` was
        called."""
        banned = self._banned_now()
        if self._processors is not None:
            self._processors.bring_up_to_date()
        elif grammar is None and banned is None:
            return None
        return StepConstraints(grammar, banned, rows)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Take in the tokens that were sampled for `rows`, on the host."""
        if self._processors is not None:
            self._processors.sampled(rows, token_ids)

    def append_on_device(self, token_ids: Tensor) -> list[int]:
        """Take in the tokens that were sampled for the rows with which `metadata` was called.

        Returns:
            The rows for whose penalties there is not enough memory, and which have none any more. Where the
            table cannot grow, the row of the longest list loses its penalties, until the table need not grow;
            where one more token for each is too much, all rows do.
        """
        lost: list[int] = []
        penalised = self._metadata.penalties
        if penalised is not None:
            self._penalties.expect(penalised)
        while penalised is not None and self._penalties.is_full:
            with self._allocations.attempt() as attempt:
                self._penalties.make_room(penalised)
            if attempt.failed:
                lost += self._lose_penalties([self._penalties.longest_row])
                penalised = self._metadata.penalties
        if penalised is not None:
            with self._allocations.attempt() as attempt:
                self._penalties.append(penalised, take_rows(token_ids, penalised.positions))
            if attempt.failed:
                lost += self._lose_penalties(penalised.host_rows.tolist())
        return lost

    def _lose_penalties(self, rows: list[int]) -> list[int]:
        self._version += 1
        for row in rows:
            self.rows["has_penalties"][row] = False
            self._penalties.remove(row)
        self.metadata(self._metadata_rows)
        return rows

    def _num_output_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._tokens.num_tokens[rows] - self._tokens.num_prompt_tokens[rows]

    def _banned_now(self) -> Tensor | None:
        found = []
        if len(self._early_ends):
            rows, ends = self._early_ends.rows, self._early_ends.entries
            early = self._num_output_tokens(rows) < ends["min_tokens"]
            found.append((rows[early], ends["token_id"][early]))
        if len(self._bad_words):
            tokens = self._tokens
            found.append(
                self._bad_words.banned(tokens.token_ids, tokens.num_tokens, tokens.num_prompt_tokens)
            )
        if not any(len(rows) for rows, _ in found):
            return None
        rows, token_ids = (np.concatenate(column) for column in zip(*found, strict=True))
        index, _ = self._logits_index(rows, token_ids)
        return index if len(index) else None

    def _logits_index(
        self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return the places of tokens of rows in the flattened logits, and which of these rows are in the
        step at all."""
        positions = self._positions[rows]
        there = positions >= 0
        index = positions[there] * self._vocab_size + token_ids[there]
        return upload(index, self._device), there

    def _build(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        columns = self.rows[rows]
        metadata = SamplingMetadata.build(
            columns["temperature"],
            columns["top_k"],
            columns["top_p"],
            columns["min_p"],
            vocab_size=self._vocab_size,
            device=self._device,
        )
        return replace(
            metadata,
            allowed=self._allowed_rows(rows, columns),
            banned=self._banned_always(),
            bias=self._biased(),
            penalties=self._penalised(rows, columns),
            logprobs=self._logprob_rows(columns),
        )

    def _allowed_rows(self, rows: NDArray[np.int64], columns: NDArray[np.void]) -> TokenMask | None:
        positions = np.flatnonzero(columns["has_allowed"])
        if not len(positions):
            return None
        bitmask = upload(self._allowed[rows[positions]], self._device)
        return TokenMask(rows_of(positions, len(rows), self._device), bitmask)

    def _banned_always(self) -> Tensor | None:
        if not len(self._bad_tokens):
            return None
        index, _ = self._logits_index(self._bad_tokens.rows, self._bad_tokens.entries["token_id"])
        return index if len(index) else None

    def _biased(self) -> LogitBias | None:
        if not len(self._bias):
            return None
        entries = self._bias.entries
        index, there = self._logits_index(self._bias.rows, entries["token_id"])
        if not there.any():
            return None
        return LogitBias(index, upload(entries["bias"][there], self._device))

    def _penalised(self, rows: NDArray[np.int64], columns: NDArray[np.void]) -> PenaltyRows | None:
        positions = np.flatnonzero(columns["has_penalties"])
        if not len(positions):
            return None
        return PenaltyRows.build(self._penalties, rows[positions], positions, len(rows), self._device)

    def _logprob_rows(self, columns: NDArray[np.void]) -> LogprobRows | None:
        counts = columns["num_logprobs"]
        positions = np.flatnonzero(counts >= 0)
        if not len(positions):
            return None
        wanted = np.minimum(counts[positions], self._vocab_size)
        return LogprobRows(
            rows_of(positions, len(columns), self._device), positions.tolist(), wanted.tolist()
        )


class _ProcessorFeed:
    """A collector that notes for the logits processors what happens to the rows between two steps."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._clear()

    def _clear(self) -> None:
        self._sampled = np.empty(0, np.int64), np.empty(0, np.int64)
        self._changes: list[RowAdded | RowMoved | RowRemoved] = []

    def sampled(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        self._sampled = rows, token_ids

    def changed(self, change: RowAdded | RowMoved | RowRemoved) -> None:
        self._changes.append(change)

    def bring_up_to_date(self) -> None:
        update = BatchUpdate(*self._sampled, tuple(self._changes))
        self._clear()
        for processor in self._processors:
            processor.update_state(update)


def _end_tokens(params: SamplingParams, vocab_size: int) -> list[int]:
    ends = set(params.stop_token_ids)
    if params.eos_token_id is not None:
        ends.add(params.eos_token_id)
    return [token for token in ends if 0 <= token < vocab_size]
