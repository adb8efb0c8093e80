"""The resources that an engine would take of this machine, as figures, text and tables."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.units import size
from nbengine.widgets.words import count, table

_LENGTHS = (512, 2048, 8192, 32768, 131072)
"""The lengths of requests, in tokens, that the report counts."""


@dataclass(frozen=True)
class MemoryPlace:
    """A memory: the machine's, or a GPU's; `total` and `free` are bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class TensorParallelFit:
    """The fit with another number of tensor-parallel workers; bytes are those of one worker."""

    tensor_parallel_size: int
    weights_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    problem: str
    num_tables: int = 1
    """The groups of layers that take blocks for a request's tokens, each for itself."""

    @property
    def fits(self) -> bool:
        """Return whether the engine would start."""
        return not self.problem


@dataclass(frozen=True)
class FitReport:
    """The fit of an engine on this machine; sizes are bytes, of all workers of one engine core together.

    `problem` says why it would not start, and is empty if it would; `advice` has flags with which it would.
    """

    model: str
    problem: str = ""
    advice: str = ""
    device: str = ""
    dtype: str = ""
    file_bytes: int = 0
    """The bytes of the weights on disk."""
    weights_bytes: int = 0
    """The bytes of the weights in memory."""
    page_bytes: int = 0
    """The bytes of a KV cache block."""
    block_size: int = 0
    num_blocks: int = 0
    groups: CacheGroups = ONE_GROUP
    """The groups of the model's layers, each of which takes blocks for a request's tokens."""
    slot_bytes: int = 0
    """The bytes of a request's recurrent state."""
    num_state_slots: int = 0
    """The slots for recurrent state: of requests, and of checkpoints of prompts."""
    num_spare_slots: int = 0
    """Those of them that are for checkpoints alone."""
    max_model_len: int = 0
    """The longest request, in tokens."""
    context_limit: int = 0
    """The longest request that the model was made for, in tokens."""
    max_num_seqs: int = 0
    num_engine_cores: int = 1
    memory: tuple[MemoryPlace, ...] = ()
    tensor_parallel: tuple[TensorParallelFit, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether the engine would start."""
        return not self.problem

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes of the whole KV cache."""
        return self.num_blocks * self.page_bytes + self.num_state_slots * self.slot_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of the KV cache that a token takes, while no window has passed it."""
        return self.groups.num_tables * self.page_bytes // self.block_size if self.block_size else 0

    def concurrency(self, length: int) -> int:
        """Count the requests of `length` tokens, prompt and answer, that an engine core works on at once."""
        if not self.fits or length > self.max_model_len:
            return 0
        most = self.max_num_seqs
        if self.num_state_slots:
            most = min(most, self.num_state_slots - self.num_spare_slots)
        if not self.num_blocks:
            return most
        # Most steps compute one token of a request.
        return min(most, self.num_blocks // self.groups.most_blocks(length, self.block_size, 1))

    @property
    def verdict(self) -> str:
        """Say in one sentence whether the model fits, and if not, why and what would help."""
        if self.fits:
            return f"{self.model} fits"
        advice = f"; try {self.advice}" if self.advice else ""
        return f"{self.model} does not fit, because {self.problem}{advice}"

    def tables(self) -> tuple[str, str]:
        """Render the whole report as (plain text, HTML)."""
        parts = [(self.verdict, f"<p><b>{escape(self.verdict)}</b></p>")]
        if self.weights_bytes:
            parts.append(table(self._figures()))
        if self.fits and self.kv_cache_bytes:
            parts.append(table(self._requests(), ["REQUESTS OF", "AT ONCE"]))
        if len(self.tensor_parallel) > 1:
            header = ["--tp", "WEIGHTS PER WORKER", "KV PER TOKEN AND WORKER", "BLOCKS", ""]
            rows = [_size_row(each, self.block_size, self.problem) for each in self.tensor_parallel]
            parts.append(table(rows, header))
        return "\n\n".join(plain for plain, _ in parts), "".join(html for _, html in parts)

    def _figures(self) -> list[list[str]]:
        on_disk = f", {size(self.file_bytes)} on disk" if self.file_bytes else ""
        rows = [["weights", f"{size(self.weights_bytes)} of {self.dtype}{on_disk}"]]
        if self.page_bytes:
            rows.append(["KV cache", f"{size(self.kv_bytes_per_token)} a token"])
        if self.fits and self.num_blocks:
            blocks = f"{count(self.num_blocks, 'block')} of {count(self.block_size, 'token')}"
            each = " in each engine core" if self.num_engine_cores > 1 else ""
            rows[-1][1] += f", {blocks} ({size(self.num_blocks * self.page_bytes)}){each}"
        if self.slot_bytes:
            taken = size(self.num_state_slots * self.slot_bytes)
            slots = f", {count(self.num_state_slots, 'slot')} ({taken})" if self.num_state_slots else ""
            rows.append(["recurrent state", f"{size(self.slot_bytes)} a request{slots}"])
        limit = f"{count(self.context_limit, 'token')}"
        if self.fits and self.max_model_len != self.context_limit:
            limit = f"{count(self.max_model_len, 'token')} of the model's {limit}"
        rows.append(["context", limit])
        rows += [[place.name, f"{size(place.free)} of {size(place.total)} free"] for place in self.memory]
        return rows

    def _requests(self) -> list[list[str]]:
        lengths = [length for length in _LENGTHS if length < self.max_model_len] + [self.max_model_len]
        return [[count(length, "token"), f"{self.concurrency(length):,}"] for length in lengths]

    def __str__(self) -> str:
        return self.tables()[0]

    def _repr_html_(self) -> str:
        return self.tables()[1]


def _size_row(each: TensorParallelFit, block_size: int, said: str) -> list[str]:
    """Make a row of the table; `said` is the problem that stands above it already."""
    outcome = "does not fit" if each.problem == said else each.problem
    if each.fits and each.num_blocks:
        # As many are there while no window has passed any.
        outcome = f"{count(each.num_blocks // each.num_tables * block_size, 'token')} of KV cache"
    weights = size(each.weights_bytes) if each.weights_bytes else ""
    kv = size(each.kv_bytes_per_token) if each.kv_bytes_per_token else ""
    return [str(each.tensor_parallel_size), weights, kv, f"{each.num_blocks:,}" if each.fits else "", outcome]
