"""Transcripts: the records that an engine core keeps of requests with a `TranscriptMark`,
and how they travel.

The utility `transcripts(session)` lists records, `read_transcripts(session, groups)` marks them as seen,
`forget_transcripts(session, groups)` drops them (all where `groups` is None), and `transcript_sessions()`
counts them.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from nbengine.errors import WireError
from nbengine.ipc.messages import FinishReason, TranscriptMark
from nbengine.sampling_params import SamplingParams

_TOKEN_BYTES = 4
MAX_PROMPT_CHARACTERS = 4000
"""Characters of a prompt's text that are kept beside its answer."""


class TranscriptRecord(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The record of one completion: the prompt and the tokens of the answer, whose text a frontend makes."""

    mark: TranscriptMark
    tokens: bytes
    """Token ids of the answer, 4 bytes each, little-endian (`pack_tokens`):
    `mark.num_written`, then the output's."""
    num_prompt_tokens: int
    decoding: SamplingParams
    """The part of the request's parameters that decides how tokens become text (`decoding_params`)."""
    finish_reason: FinishReason | None = None
    """The reason of its end; None: it is still being written."""
    stop_reason: int | str | None = None
    cause: str = ""
    """The cause of its end, where neither model nor client has ended it."""
    ended: float | None = None
    """The time of its end, by `time.time()` of the engine core."""
    was_read: bool = False
    rank: int = 0


def shortened(prompt: str) -> str:
    """Cut a prompt to its beginning, which says so if it is not all."""
    if len(prompt) <= MAX_PROMPT_CHARACTERS:
        return prompt
    return f"{prompt[:MAX_PROMPT_CHARACTERS]} … ({len(prompt):,} characters)"


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids into bytes, 4 each, little-endian."""
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Unpack the bytes that `pack_tokens` has made.

    Raises:
        WireError: the bytes are no whole number of tokens.
    """
    if len(data) % _TOKEN_BYTES:
        raise WireError(f"{len(data)} bytes of tokens, not a multiple of {_TOKEN_BYTES}")
    packed = array.array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def decoding_params(params: SamplingParams) -> SamplingParams:
    """Return the part of a request's parameters that decides how its tokens become text."""
    return SamplingParams(
        max_tokens=None,
        min_tokens=params.min_tokens,
        stop=list(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        detokenize=params.detokenize,
    )


def records_of(answer: Any) -> list[TranscriptRecord]:
    """Return the records of one engine core's answer to `transcripts`.

    Raises:
        msgspec.ValidationError: it is no such answer.
    """
    return [
        item if isinstance(item, TranscriptRecord) else msgspec.convert(item, TranscriptRecord)
        for item in answer
    ]
