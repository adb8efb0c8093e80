"""Chained hashes of full KV blocks: how a request finds blocks that hold the start of its own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from nbengine.errors import RequestError

ExtraKeys = tuple[tuple[str, str | int | bytes], ...]
"""What the keys and values depend on besides the token ids, as (kind, value): a cache salt, an adapter, an image."""

_TOKEN_TYPE = "I"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


class BlockHasher:
    """Hashes blocks of `block_size` token ids.

    A block's hash is SHA-256 over its token ids and the hash of the block before it; the chain starts from a
    hash of the extra keys. Equal hashes therefore mean an equal prefix, from the first token to the block's
    last, under equal extra keys.

    Where tokens stand for something else, such as an embedding, the digest of that is hashed as well: it makes
    what is hashed longer, so that no such block has the hash of a block of plain tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def digests(self, rows: memoryview, num_rows: int) -> list[bytes]:
        """SHA-256 of what `num_rows` tokens stand for, block by block, the last one perhaps not full.

        `rows` is flat bytes, as many for each token.
        """
        if not num_rows:
            return []
        width = len(rows) // num_rows * self.block_size
        return [sha256(rows[start : start + width]).digest() for start in range(0, len(rows), width)]

    def extend(
        self,
        hashes: list[bytes],
        token_ids: list[int],
        extra_keys: ExtraKeys = (),
        content: Sequence[bytes] = (),
    ) -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that it does not hold yet.

        `content` has the `digests` of the first blocks, where their tokens stand for something else.

        Raises:
            RequestError: a token id is not an integer in [0, 2**32).
        """
        block_size = self.block_size
        start = len(hashes) * block_size
        end = len(token_ids) // block_size * block_size
        if start >= end:
            return
        try:
            data = array(_TOKEN_TYPE, token_ids[start:end]).tobytes()
        except (OverflowError, TypeError) as error:
            raise RequestError(f"a token id is not an integer in [0, 2**32): {error}") from None
        parent = hashes[-1] if hashes else _root(extra_keys)
        width = block_size * _TOKEN_BYTES
        for offset in range(0, len(data), width):
            block = data[offset : offset + width] + parent
            if len(hashes) < len(content):
                block += content[len(hashes)]
            parent = sha256(block).digest()
            hashes.append(parent)


def _root(extra_keys: ExtraKeys) -> bytes:
    # repr() of nested tuples of str, int and bytes is injective: quoting keeps neighbours apart.
    return sha256(repr(extra_keys).encode()).digest()
