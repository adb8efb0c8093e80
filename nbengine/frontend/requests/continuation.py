"""Answers that go on from their middle: the part that is written already, and whether that part is the
end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from nbengine.errors import InvalidArgumentError
from nbengine.ipc.messages import EngineCoreRequest, FinishReason
from nbengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """The beginning of an answer, which stands behind the prompt in its request."""

    written: list[int]
    params: SamplingParams
    """The completed parameters of the whole answer; the request has those of the rest."""

    def end(self) -> tuple[FinishReason, int | None] | None:
        """Return why nothing can follow, by the rules of the engine core: (finish reason, stop reason), or
        None."""
        params, last = self.params, self.written[-1]
        is_eos = last == params.eos_token_id and not params.ignore_eos
        if (is_eos or last in params.stop_token_ids) and len(self.written) >= params.min_tokens:
            return FinishReason.STOP, None if last == params.eos_token_id else last
        if params.max_tokens is not None and len(self.written) >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None


def continued(request: EngineCoreRequest, written: Sequence[int]) -> Continuation:
    """Put the beginning of the answer behind the prompt of a request that has just been made for a whole
    answer.

    The request keeps its sampling parameters but for `max_tokens` and `min_tokens`, from which the number of
    written tokens is subtracted; a request whose `max_tokens` is 0 then need not be sent.

    Raises:
        InvalidArgumentError: the answer cannot go on from its middle; the message says why.
    """
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:
        raise InvalidArgumentError("written", list(written), "empty for a prompt that has no tokens")
    for name, allowed in (("n", 1), ("structured_outputs", None), ("prompt_logprobs", None)):
        if getattr(params, name) != allowed:
            raise InvalidArgumentError(
                name, getattr(params, name), f"{allowed} where an answer goes on from its middle"
            )
    rest = params.clone()
    if rest.max_tokens is not None:
        rest.max_tokens = max(0, rest.max_tokens - len(written))
    rest.min_tokens = max(0, rest.min_tokens - len(written))
    request.prompt_token_ids = [*request.prompt_token_ids, *written]
    request.sampling_params = rest
    if request.reasoning is not None:
        request.reasoning = msgspec.structs.replace(request.reasoning, num_written=len(written))
    return Continuation(list(written), params)
