"""One output of a request in place of several that follow each other."""

from __future__ import annotations

import msgspec

from nbengine.ipc.messages import EngineCoreOutput, LogprobsLists


def own_copy(output: EngineCoreOutput) -> EngineCoreOutput:
    """Return a copy to `merge` into: others may hold the lists of `output`."""
    return msgspec.structs.replace(
        output,
        new_token_ids=output.new_token_ids.copy(),
        new_logprobs=_copied(output.new_logprobs),
        new_prompt_logprobs=_copied(output.new_prompt_logprobs),
    )


def merge(older: EngineCoreOutput, newer: EngineCoreOutput) -> None:
    """Make `older`, an `own_copy` that is not the request's end, the output that says what both say."""
    older.new_token_ids.extend(newer.new_token_ids)
    older.finish_reason = newer.finish_reason
    older.stop_reason = newer.stop_reason
    older.error = newer.error
    older.num_cached_tokens = newer.num_cached_tokens
    if newer.events:
        older.events = [*(older.events or ()), *newer.events]
    older.new_logprobs = _joined(older.new_logprobs, newer.new_logprobs)
    older.new_prompt_logprobs = _joined(older.new_prompt_logprobs, newer.new_prompt_logprobs)
    if newer.pooling_output is not None:
        older.pooling_output = newer.pooling_output


def _copied(logprobs: LogprobsLists | None) -> LogprobsLists | None:
    if logprobs is None:
        return None
    return LogprobsLists(
        logprobs.logprob_token_ids.copy(), logprobs.logprobs.copy(), logprobs.sampled_token_ranks.copy()
    )


def _joined(older: LogprobsLists | None, newer: LogprobsLists | None) -> LogprobsLists | None:
    if older is None or newer is None:
        return older or _copied(newer)
    older.logprob_token_ids.extend(newer.logprob_token_ids)
    older.logprobs.extend(newer.logprobs)
    older.sampled_token_ranks.extend(newer.sampled_token_ranks)
    return older
