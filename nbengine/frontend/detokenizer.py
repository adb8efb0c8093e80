"""Token ids to text, while they arrive."""

from __future__ import annotations

import logging

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nbengine.frontend.stop_strings import StopMatch, StopStringMatcher
from nbengine.ipc.messages import FinishReason
from nbengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class IncrementalDetokenizer:
    """Keeps a request's token ids; this base class, for `detokenize=False`, makes no text of them."""

    __slots__ = ("token_ids",)

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @staticmethod
    def from_new_request(tokenizer: Tokenizer | None, params: SamplingParams) -> IncrementalDetokenizer:
        """The detokenizer that `params` ask for."""
        if tokenizer is None or not params.detokenize:
            return IncrementalDetokenizer()
        return FastIncrementalDetokenizer(tokenizer, params)

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        """Take in what the engine sampled; return the stop string that this completed, if any."""
        del finish_reason
        self.token_ids.extend(new_token_ids)
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text so far, or with `delta` what is new since the last call.

        Until `finished`, characters that may become part of a stop string are held back.
        """
        del finished, delta
        return ""


class FastIncrementalDetokenizer(IncrementalDetokenizer):
    """Decodes with the tokenizers library's `DecodeStream`.

    Tokens that end within a character are held back until it is complete; the end of the request flushes them, so
    that the whole text is `tokenizer.decode(token_ids)`. The token that ended the request (end of sequence or one
    of `stop_token_ids`) and the stop string are left out unless `include_stop_str_in_output`.
    """

    __slots__ = (
        "_decoded_ids",
        "_held",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_num_characters",
        "_parts",
        "_pending",
        "_skip_special",
        "_stream",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=self._skip_special)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matcher = StopStringMatcher(params.stop) if params.stop else None
        self._parts: list[str] = []
        self._decoded_ids = self.token_ids
        self._num_characters = 0
        self._held = 0
        self._pending = False

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        ends_in_stop_token = finish_reason is FinishReason.STOP and not self._include_stop
        last = len(new_token_ids) - 1
        for position, token_id in enumerate(new_token_ids):
            if ends_in_stop_token and position == last:
                self._decoded_ids = self.token_ids.copy()
                self.token_ids.append(token_id)
                break
            self.token_ids.append(token_id)
            chunk = self._decode(token_id)
            if chunk is None:
                self._pending = True
                continue
            self._pending = False
            match = self._append(chunk)
            if match is not None:
                self.token_ids.extend(new_token_ids[position + 1 :])
                return match.stop
        if finish_reason is not None:
            return self._flush()
        if self._matcher is not None and not self._include_stop:
            self._held = self._matcher.held()
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text = "".join(self._parts)
        end = len(text) if finished else len(text) - self._held
        if delta:
            self._parts = [text[end:]]
        else:
            self._parts = [text]
        return text[:end]

    def _append(self, chunk: str) -> StopMatch | None:
        self._parts.append(chunk)
        self._num_characters += len(chunk)
        if self._matcher is None:
            return None
        match = self._matcher.feed(chunk, may_stop=len(self.token_ids) >= self._min_tokens)
        if match is not None:
            text = "".join(self._parts)
            cut = match.end_from_end if self._include_stop else match.start_from_end
            self._parts = [text[: len(text) - cut]]
        return match

    def _decode(self, token_id: int) -> str | None:
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer, token_id)
            except Exception as error:  # noqa: BLE001 (the library raises no narrower class)
                logger.debug("DecodeStream refused token %d (%s); decoding from the start", token_id, error)
                self._stream = None
        text = self._decode_all()
        return None if text.endswith("\ufffd") else text[self._num_characters :]

    def _decode_all(self) -> str:
        return self._tokenizer.decode(self._decoded_ids, skip_special_tokens=self._skip_special)

    def _flush(self) -> str | None:
        if not self._pending:
            return None
        self._pending = False
        match = self._append(self._decode_all()[self._num_characters :])
        return None if match is None else match.stop
