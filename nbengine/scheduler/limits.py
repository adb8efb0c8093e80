"""The limits within which a request can be run to its end."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.errors import RequestError
from nbengine.kv_cache.sizing import longest_step
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.request import Request
from nbengine.scheduler.stop import token_limit


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that a request must keep to, so that it can be run to its end, if need be alone."""

    max_model_len: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    num_blocks: int
    """0 if the model has no KV cache."""
    block_size: int
    num_lookahead_tokens: int
    groups: CacheGroups = ONE_GROUP
    longest_step: int = 0
    """Most tokens of a request for which a step needs room."""

    @classmethod
    def of(
        cls,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        options: SchedulerOptions,
    ) -> RequestLimits:
        """Return the limits of a scheduler with these blocks."""
        return cls(
            max_model_len,
            scheduler.max_num_batched_tokens,
            scheduler.enable_chunked_prefill,
            num_blocks,
            cache.block_size,
            options.num_lookahead_tokens,
            options.groups,
            longest_step(scheduler) + options.num_lookahead_tokens,
        )

    def check(self, request: Request) -> None:
        """Refuse a request that exceeds a limit.

        Raises:
            RequestError: the request exceeds a limit; the message says which.
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
        if not is_pooling and self.max_model_len == 1:
            raise RequestError(
                f"request {request.request_id}: max_model_len=1 leaves no room for an output after a prompt; "
                "it must be at least 2"
            )
        if not is_pooling and num_prompt >= self.max_model_len:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"max_model_len={self.max_model_len} at most {self.max_model_len - 1} "
                "leave room for an output"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise RequestError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, but with "
                f"enable_chunked_prefill=False it must fit in one step of "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        limit = token_limit(num_prompt, request.sampling_params, self.max_model_len)
        # The last token is never computed, and needs no slot.
        num_slots = min(limit - 1 + self.num_lookahead_tokens, self.max_model_len)
        num_needed = self.groups.most_blocks(num_slots, self.block_size, self.longest_step)
        if self.num_blocks and num_needed > self.num_blocks:
            raise RequestError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens with "
                f"{limit - num_prompt} output tokens needs {num_needed} KV blocks, "
                f"and there are {self.num_blocks}; lower max_tokens"
            )
