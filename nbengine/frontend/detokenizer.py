"""Token ids to text, while they arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nbengine.frontend.stop_strings import StopStringMatcher
from nbengine.ipc.messages import FinishReason
from nbengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class IncrementalDetokenizer:
    """Keeps a request's token ids; this base class, for `detokenize=False`, makes no text of them."""

    __slots__ = ("num_dropped_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_dropped_tokens = 0
        """Of the last update, those behind the token that completed a stop string."""

    @staticmethod
    def from_new_request(tokenizer: Tokenizer | None, params: SamplingParams) -> IncrementalDetokenizer:
        """The detokenizer that `params` ask for."""
        if tokenizer is None or not params.detokenize:
            return IncrementalDetokenizer()
        return FastIncrementalDetokenizer(tokenizer, params)

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        """Take in what the engine sampled; return the stop string that this completed, if any.

        Tokens behind the one that completed it are dropped: how many a step brings makes no difference.
        """
        del finish_reason
        self.token_ids += new_token_ids
        return None

    def take_text(self, finished: bool) -> str:
        """What is new since the last call.

        Until `finished`, characters that may become part of a stop string are held back.
        """
        del finished
        return ""


class FastIncrementalDetokenizer(IncrementalDetokenizer):
    """Decodes with the tokenizers library's `DecodeStream`.

    Tokens that end within a character are held back until it is complete; the end of the request flushes them, so
    that the whole text is `tokenizer.decode(token_ids)`. The token that ended the request (end of sequence or one
    of `stop_token_ids`) and the stop string are left out unless `include_stop_str_in_output`.
    """

    __slots__ = (
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_num_characters",
        "_parts",
        "_pending",
        "_skip_special",
        "_step",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._step: Callable[[Tokenizer, int], str | None] = DecodeStream(
            skip_special_tokens=self._skip_special
        ).step
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matcher = StopStringMatcher(params.stop) if params.stop else None
        self._parts: list[str] = []
        self._num_characters = 0
        self._pending = False

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        if finish_reason is not None:
            return self._finish(new_token_ids, finish_reason)
        for position, token_id in enumerate(new_token_ids, 1):
            self.token_ids.append(token_id)
            try:
                chunk = self._step(self._tokenizer, token_id)
            except Exception as error:  # noqa: BLE001 (the library raises no narrower class)
                logger.debug("DecodeStream refused token %d (%s); decoding from the start", token_id, error)
                self._step = self._decode_again
                chunk = self._decode_again(self._tokenizer, token_id)
            if chunk is None:
                self._pending = True
                continue
            self._pending = False
            stop = self._append(chunk)
            if stop is not None:
                self.num_dropped_tokens = len(new_token_ids) - position
                return stop
        return None

    def take_text(self, finished: bool) -> str:
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        parts.clear()
        if self._matcher is not None and not finished and not self._include_stop:
            held = self._matcher.held()
            if held:
                parts.append(text[-held:])
                return text[:-held]
        return text

    def _append(self, chunk: str) -> str | None:
        self._parts.append(chunk)
        self._num_characters += len(chunk)
        if self._matcher is None:
            return None
        match = self._matcher.feed(chunk, may_stop=len(self.token_ids) >= self._min_tokens)
        if match is None:
            return None
        text = "".join(self._parts)
        cut = match.end_from_end if self._include_stop else match.start_from_end
        self._parts = [text[: len(text) - cut]]
        return match.stop

    def _finish(self, new_token_ids: list[int], finish_reason: FinishReason) -> str | None:
        ends_in_stop_token = finish_reason is FinishReason.STOP and not self._include_stop
        end = new_token_ids[-1:] if ends_in_stop_token else []
        stop = self.update(new_token_ids[: len(new_token_ids) - len(end)], None)
        if stop is None and self._pending:
            stop = self._append(self._decode_all()[self._num_characters :])
        if stop is None:
            self.token_ids += end
        else:
            self.num_dropped_tokens += len(end)
        return stop

    def _decode_again(self, tokenizer: Tokenizer, token_id: int) -> str | None:
        del tokenizer, token_id
        text = self._decode_all()
        return None if text.endswith("\ufffd") else text[self._num_characters :]

    def _decode_all(self) -> str:
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=self._skip_special)
