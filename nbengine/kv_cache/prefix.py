"""Chained hashes of full KV blocks, with which a request finds blocks that hold its own first tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from nbengine.errors import RequestError

ExtraKeys = tuple[tuple[str, str | int | bytes], ...]
"""Things on which the keys and values depend besides the token ids, as (kind, value): a cache salt, an
adapter, an image."""

_TOKEN_TYPE = "I"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


class BlockHasher:
    """A hasher of blocks of `block_size` token ids.

    A block's hash is SHA-256 over its token ids and the hash of the block before it; the chain starts from a
    hash of the extra keys. Equal hashes therefore mean an equal prefix, from the first token to the block's
    last, under equal extra keys.

    Where tokens stand for something else, such as an embedding, the digest of that is hashed as well. It
    makes the hashed text longer, so that no such block has the hash of a block of plain tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def digests(self, rows: memoryview, num_rows: int) -> list[bytes]:
        """Return the SHA-256 of what `num_rows` tokens stand for, block by block; the last may not be full.

        `rows` is flat bytes, the same number for each token.
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
        """Append to `hashes` the hashes of the full blocks of `token_ids` that it does not have yet.

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


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key with which the index finds the block of a group of layers: the hash itself for the first
    group, else the hash and the group's number, which makes it longer than any hash."""
    return block_hash + group.to_bytes(2, "big") if group else block_hash
