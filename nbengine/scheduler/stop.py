"""The conditions on which a request ends by itself."""

from __future__ import annotations

from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.request import Request, RequestStatus


def token_limit(num_prompt_tokens: int, params: SamplingParams | None, max_model_len: int) -> int:
    """Return how many tokens, prompt and output, a request may have.

    The outcome of a pooling request (`params` is None) counts as one token of output.
    """
    if params is None:
        return num_prompt_tokens + 1
    if params.max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + params.max_tokens, max_model_len)


def append_tokens(request: Request, new_token_ids: list[int]) -> list[int]:
    """Append sampled tokens until one of them ends the request, and return those appended.

    An end token (the eos token unless it is ignored, or one of `stop_token_ids`) counts once there are
    `min_tokens` output tokens with it; the limit of `max_tokens` and `max_model_len` counts always. When the
    request ends, `status` and `stop_reason` (the stop token id, None for eos and for the limit) are set.
    """
    all_token_ids, num_tokens = request.all_token_ids, request.num_tokens
    stop_token_ids, limit = request.stop_token_ids, request.max_total_tokens
    for token_id in new_token_ids:
        all_token_ids.append(token_id)
        num_tokens += 1
        if token_id in stop_token_ids and num_tokens >= request.min_total_tokens:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = None if token_id == request.eos_token_id else token_id
        elif num_tokens >= limit:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            continue
        new_token_ids = new_token_ids[: num_tokens - request.num_tokens]
        break
    request.num_tokens = num_tokens
    return new_token_ids


def follow_grammar(request: Request, new_token_ids: list[int]) -> bool:
    """Advance the grammar of a request by the tokens just appended; return False if it refuses one of them.

    An end token that the grammar accepts ends the request even where `ignore_eos` kept `append_tokens` from
    ending it: the grammar then offers an end token only where nothing else can follow. An end token that has
    already ended the request is not the grammar's business, unless it had given up and allowed nothing else.
    """
    grammar = request.grammar
    if grammar is None:
        return True
    if request.status is RequestStatus.FINISHED_STOPPED and not grammar.error:
        return True
    if not grammar.accept_tokens(new_token_ids):
        request.status = RequestStatus.FINISHED_ERROR
        return False
    if grammar.is_terminated():
        request.status = RequestStatus.FINISHED_STOPPED
    return True


def is_free(request: Request, num_unknown: int) -> bool:
    """Tell whether a request may get any token behind `num_unknown` further ones, whatever its grammar."""
    return request.grammar is None or request.grammar.is_free(num_unknown)
