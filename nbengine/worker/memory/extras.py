"""The memory for which a full batch may ask beside weights, forward passes and the KV cache: it is counted at
the start, so that no step need find it missing.

On a GPU the worker measures it, see `ModelRunner.profile_run`; for a CPU, and for a KV cache whose size is
given, it is worked out here. It does not include what requests keep of each prompt token on the host, nor
lists of single tokens (`logit_bias`, `bad_words`).
"""

from __future__ import annotations

from nbengine.config import SchedulerConfig
from nbengine.sampling.penalties import table_bytes
from nbengine.sampling_params import MAX_LOGPROBS
from nbengine.worker.batch.prompt_logprobs import PIECE_BYTES

GATHERED_BYTES = 12 * (MAX_LOGPROBS + 1) + 16
"""The bytes that a prompt's token takes while its log probabilities are gathered: an id and a float32 number
for each of `MAX_LOGPROBS` tokens and for the token that follows, whose id and rank are kept once more."""

_LOGITS_COPIES = 3
"""Logits are held three times at most: as computed, in float32 where they are changed, and as they were where
log probabilities are wanted."""
_PIECE_COPIES = 6
"""A piece of a prompt's logits is held in float32, as probabilities, compared, and three times to order them."""


def decoder_extras(scheduler: SchedulerConfig, vocab_size: int, hidden_size: int, max_model_len: int) -> int:
    """Return the bytes of a rank that samples: logits, masks, log probabilities, penalties and pooling of
    `max_num_seqs` requests of up to `max_model_len` tokens, all at their widest."""
    num_reqs = scheduler.max_num_seqs
    logits = _LOGITS_COPIES * num_reqs * vocab_size * 4
    masks = 2 * num_reqs * -(-vocab_size // 32) * 4
    # While a table grows, the old one and the new one exist.
    penalties = 2 * table_bytes(num_reqs, vocab_size, max_model_len)
    row = 4 * vocab_size
    pieces = _PIECE_COPIES * min(max(PIECE_BYTES, row), scheduler.max_num_batched_tokens * row)
    return logits + masks + penalties + pieces + pooling_extras(scheduler, hidden_size, max_model_len)


def pooling_extras(scheduler: SchedulerConfig, hidden_size: int, max_model_len: int) -> int:
    """Return the bytes of a rank that pools: the sums of `max_num_seqs` requests, and the states of a step in
    float32."""
    num_tokens = max(scheduler.max_num_batched_tokens, max_model_len)
    return (2 * scheduler.max_num_seqs + num_tokens) * hidden_size * 4
