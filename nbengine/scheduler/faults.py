"""The error texts that the caller of a request gets when the model runner has no result for it."""

from __future__ import annotations

from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import Fault
from nbengine.scheduler.request import Request

_MODEL = "the model computed NaN or infinity"
_REMEDY = (
    "its numbers have outgrown their dtype (dtype='float32' has the most room), or its weights are damaged"
)


def describe_fault(fault: Fault, request: Request) -> str:
    """Say in one sentence what is wrong, and what can be done about it."""
    params = request.sampling_params
    if fault is Fault.OUT_OF_MEMORY:
        return _describe_shortage(request)
    if params is None:
        return f"{_MODEL} for this prompt: {_REMEDY}"
    limits = _limits(params)
    place = f"for token {request.num_output_tokens + 1} of the output"
    if fault is Fault.NOTHING_ALLOWED:
        who = " and ".join(limits) or "a logits processor, or the model itself,"
        return f"no token is left {place}: {who} forbid every one"
    forbidden = f"; or {' and '.join(limits)} forbid every token" if limits else ""
    return f"{_MODEL} {place}: {_REMEDY}{forbidden}"


def _describe_shortage(request: Request) -> str:
    asked = ", ".join(_extras(request)) or "this request"
    return (
        f"the engine does not have enough memory for {asked} with {request.num_tokens} tokens: ask for less, "
        "shorten the prompt, or start the engine with a smaller KV cache or max_num_seqs; "
        "other requests go on"
    )


def _extras(request: Request) -> list[str]:
    """List what the request has asked for that takes memory besides its tokens."""
    params, pooling = request.sampling_params, request.pooling_params
    if pooling is not None:
        return [f"the task {pooling.task}"]
    if params is None:
        return []
    values = {
        "prompt_logprobs": params.prompt_logprobs,
        "logprobs": params.logprobs,
        "repetition_penalty": params.repetition_penalty if params.repetition_penalty != 1 else None,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
    }
    return [f"{name}={value}" for name, value in values.items() if value is not None] + _limits(params)


def _limits(params: SamplingParams) -> list[str]:
    """List what the request has asked for that forbids tokens."""
    asked = {
        "structured_outputs": params.structured_outputs is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_token_ids),
        "logit_bias": bool(params.logit_bias),
        "min_tokens": params.min_tokens > 0,
    }
    return [name for name, is_asked in asked.items() if is_asked]
