"""Which requests can be run to their end."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.errors import RequestError
from nbengine.scheduler.request import Request
from nbengine.scheduler.stop import token_limit


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request must keep to, so that it can be run to its end if need be alone."""

    max_model_len: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    num_blocks: int
    """0: the model has no KV cache."""
    block_size: int
    num_lookahead_tokens: int

    def check(self, request: Request) -> None:
        """Refuse a request that exceeds a limit.

        Raises:
            RequestError: the message says which limit.
        """
        num_prompt = request.num_prompt_tokens
        if not num_prompt:
            raise RequestError(f"request {request.request_id}: the prompt has no tokens")
        is_pooling = request.pooling_params is not None
        if is_pooling and num_prompt > self.max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, more than "
                f"max_model_len={self.max_model_len}"
            )
        if not is_pooling and num_prompt >= self.max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"max_model_len={self.max_model_len} at most {self.max_model_len - 1} leave room for an output"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"enable_chunked_prefill=False it must fit in one step of "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        limit = token_limit(num_prompt, request.sampling_params, self.max_model_len)
        num_slots = min(limit - 1 + self.num_lookahead_tokens, self.max_model_len)
        num_needed = -(-num_slots // self.block_size)
        if self.num_blocks and num_needed > self.num_blocks:
            raise RequestError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens with {limit - num_prompt} output "
                f"tokens needs {num_needed} KV blocks, and there are {self.num_blocks}; lower max_tokens"
            )
