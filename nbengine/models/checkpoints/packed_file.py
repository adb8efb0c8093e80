"""A file of weights in the layout in which they are computed with: a header, and the bytes of regions.

    magic       8 bytes
    length      8 bytes, little-endian, of the description
    digest     32 bytes, SHA-256 of the description
    description JSON, see `Description`
    regions     each from a multiple of 2 MiB on, so that huge pages of the file can be mapped

The payload's digest finds what a disk, or a crash before the file was on it, has made of the bytes. It is
SHA-256 over the sums of each 4 KiB in words of 64 bits, which is as fast as memory is read: it notices every
flipped bit, and pages that are zero, torn or in another place. Nobody's malice is its concern: files of others
are not read at all.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from nbengine.errors import NBEngineError
from nbengine.kernels.cpu.huge_pages import HUGE_PAGE

_MAGIC = b"nbePACK1"
_PREFIX = len(_MAGIC) + 8 + 32
_LARGEST_DESCRIPTION = 1 << 20
_PAGE = 4096
_CHUNK = 4 * HUGE_PAGE
"""Bytes that are summed or written at a time. Writes of whole huge pages make huge pages of the file."""

Bytes = NDArray[np.uint8]
Reading = Callable[[], AbstractContextManager[None]]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file: `key` names everything that its bytes depend on, `sizes` are those of the regions in
    bytes, `digest` is that of their content, and `source` the weight files, for a reader."""

    key: str
    source: str
    sizes: tuple[int, ...]
    digest: str


def description_of(key: str, source: str, regions: Sequence[Bytes], reading: Reading) -> Description:
    """Describe regions, whose sizes are whole pages, and which are read in the contexts that `reading` gives."""
    digest = hashlib.sha256()
    for chunk in _chunks(regions):
        with reading():
            digest.update(_page_sums(chunk))
    return Description(key, source, tuple(map(len, regions)), digest.hexdigest())


def contents(description: Description, regions: Sequence[Bytes]) -> Iterator[tuple[int, memoryview]]:
    """Yield the parts of the file, and where each of them goes."""
    text = msgspec.json.encode(description)
    yield 0, memoryview(_MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)
    for region, offset in zip(regions, _offsets(len(text), description.sizes), strict=False):
        for first in range(0, len(region), _CHUNK):
            yield offset + first, region[first : first + _CHUNK].data


def most_bytes(sizes: Iterable[int]) -> int:
    """Return the most that a file of such regions takes of a disk."""
    return sum(sizes) + _LARGEST_DESCRIPTION


@dataclass(frozen=True, slots=True)
class PackedFile:
    """An open file whose description is good; its regions are at `offsets`."""

    descriptor: int
    description: Description
    offsets: tuple[int, ...]

    @classmethod
    def read(cls, descriptor: int, key: str, sizes: Sequence[int]) -> PackedFile:
        """Read the description of a file that is to hold what `key` names, in regions of these sizes.

        Raises:
            NBEngineError: it does not, or is damaged; the message continues a sentence about the file.
            OSError: it cannot be read.
        """
        start = os.pread(descriptor, _PREFIX, 0)
        length = int.from_bytes(start[8:16], "little")
        if len(start) < _PREFIX or start[:8] != _MAGIC or length > _LARGEST_DESCRIPTION:
            raise NBEngineError("is cut off, or no file of weights")
        text = os.pread(descriptor, length, _PREFIX)
        if not hmac.compare_digest(hashlib.sha256(text).digest(), start[16:]):
            raise NBEngineError("is damaged")
        try:
            description = msgspec.json.decode(text, type=Description)
        except msgspec.MsgspecError as error:
            raise NBEngineError("is of another version") from error
        if description.key != key or description.sizes != tuple(sizes):
            raise NBEngineError("is of other weights")
        *offsets, end = _offsets(length, description.sizes)
        if os.fstat(descriptor).st_size != end:
            raise NBEngineError("is cut off, or too long")
        return cls(descriptor, description, tuple(offsets))

    def has(self, regions: Sequence[Bytes], num_threads: int) -> bool:
        """Return whether regions have the bytes that were written to the file."""
        return hmac.compare_digest(_digest(regions, num_threads), self.description.digest)


def _offsets(length: int, sizes: Iterable[int]) -> list[int]:
    """Return the places of regions behind a description of `length` bytes, and the end of the last one."""
    offsets, end = [], _PREFIX + length
    for size in sizes:
        offsets.append(-(-end // HUGE_PAGE) * HUGE_PAGE)
        end = offsets[-1] + size
    return [*offsets, end]


def _digest(regions: Sequence[Bytes], num_threads: int) -> str:
    digest = hashlib.sha256()
    with ThreadPoolExecutor(num_threads) as pool:
        for sums in pool.map(_page_sums, _chunks(regions)):
            digest.update(sums)
    return digest.hexdigest()


def _chunks(regions: Sequence[Bytes]) -> list[Bytes]:
    return [region[first : first + _CHUNK] for region in regions for first in range(0, len(region), _CHUNK)]


def _page_sums(chunk: Bytes) -> Any:
    return chunk.view(np.int64).reshape(-1, _PAGE // 8).sum(axis=1)
