"""The detokenizers, which turn token ids into text while they arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nbengine.frontend.text.decoding import SpaceCleaner, TextDecoding
from nbengine.frontend.text.stop_strings import StopMatch, StopStringMatcher
from nbengine.ipc.messages import FinishReason
from nbengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class IncrementalDetokenizer:
    """A detokenizer that keeps a request's token ids; this base class, for `detokenize=False`, makes no text
    of them."""

    __slots__ = ("num_dropped_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_dropped_tokens = 0
        """The tokens of the last update that stood behind the token that completed a stop string."""

    @staticmethod
    def from_new_request(
        decoding: TextDecoding | None, params: SamplingParams, context: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """Make the detokenizer that `params` ask for; `context` has the tokens before the text
        (`TextDecoding.context_of`)."""
        if decoding is None or not params.detokenize:
            return IncrementalDetokenizer()
        if decoding.byte_ids:
            return ByteRunDetokenizer(decoding, params, context)
        if params.spaces_between_special_tokens or params.skip_special_tokens:
            return FastIncrementalDetokenizer(decoding, params, context)
        return JoinedSpecialTokens(decoding, params, context)

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        """Take in what the engine sampled; return the stop string that this completed, if any.

        Tokens behind the one that completed it are dropped: the result does not depend on the number of
        tokens in a step.
        """
        del finish_reason
        self.token_ids += new_token_ids
        return None

    def take_text(self, finished: bool) -> str:
        """Return the text that is new since the last call.

        Until `finished`, characters that may become part of a stop string are held back.
        """
        del finished
        return ""


class FastIncrementalDetokenizer(IncrementalDetokenizer):
    """A detokenizer that uses the tokenizers library's `DecodeStream`.

    Tokens that end within a character are held back until it is complete; the end of the request flushes
    them, so that the whole text is `tokenizer.decode(prompt + token_ids)` without that of the prompt, and no
    text that was given out changes later. The token that ended the request (end of sequence or one of
    `stop_token_ids`) and the stop string are left out unless `include_stop_str_in_output`.
    """

    __slots__ = (
        "_cleaner",
        "_context",
        "_hidden_stops",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_num_characters",
        "_num_of_context",
        "_parts",
        "_pending",
        "_skip_special",
        "_step",
        "_tokenizer",
    )

    def __init__(self, decoding: TextDecoding, params: SamplingParams, context: Sequence[int] = ()) -> None:
        super().__init__()
        self._tokenizer = decoding.tokenizer
        self._context = list(context)
        self._cleaner = SpaceCleaner() if decoding.clean_up else None
        self._skip_special = params.skip_special_tokens
        self._step: Callable[[Tokenizer, int | list[int]], str | None] = DecodeStream(
            ids=self._context, skip_special_tokens=self._skip_special
        ).step
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matcher = StopStringMatcher(params.stop) if params.stop else None
        self._hidden_stops: dict[int, str] = {}
        """The special tokens that have no text, although it is asked for as a stop string."""
        if params.stop and self._skip_special:
            stops = set(params.stop)
            self._hidden_stops = {
                token_id: content for token_id, content in decoding.special.items() if content in stops
            }
        self._parts: list[str] = []
        self._num_characters = 0
        self._num_of_context = 0
        """The characters of the context that the cleaner still holds."""
        self._pending = False
        if self._context:
            before = self._decode_all()
            self._num_characters = len(before)
            if self._cleaner is not None:
                self._num_of_context = self._cleaner.begin_behind(before)

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        if finish_reason is not None:
            return self._finish(new_token_ids, finish_reason)
        for position, token_id in enumerate(new_token_ids, 1):
            self.token_ids.append(token_id)
            if (
                self._hidden_stops
                and token_id in self._hidden_stops
                and len(self.token_ids) >= self._min_tokens
            ):
                self.num_dropped_tokens = len(new_token_ids) - position
                return self._end_at(self._hidden_stops[token_id])
            try:
                chunk = self._step(self._tokenizer, token_id)
            except Exception as error:  # noqa: BLE001 (the library raises no narrower class)
                chunk = self._refused(error)
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
        self._num_characters += len(chunk)
        if self._cleaner is not None:
            chunk = self._behind_context(self._cleaner.feed(chunk))
        self._parts.append(chunk)
        # Each token comes here: a further call would cost it a hundredth of its time.
        if self._matcher is None:
            return None
        match = self._matcher.feed(chunk, may_stop=len(self.token_ids) >= self._min_tokens)
        return None if match is None else self._cut_at(match)

    def _cut_at(self, match: StopMatch) -> str:
        """End the text at a stop string, and return that."""
        text = "".join(self._parts)
        cut = match.end_from_end if self._include_stop else match.start_from_end
        self._parts = [text[: len(text) - cut]]
        return match.stop

    def _finish(self, new_token_ids: list[int], finish_reason: FinishReason) -> str | None:
        # The token that ends a request is one of its tokens, but has no text.
        ends_in_stop_token = finish_reason is FinishReason.STOP and not self._include_stop
        end = new_token_ids[-1:] if ends_in_stop_token else []
        stop = self.update(new_token_ids[: len(new_token_ids) - len(end)], None)
        if stop is None:
            stop = self._flush()
        if stop is None:
            self.token_ids += end
        else:
            self.num_dropped_tokens += len(end)
        return stop

    def _flush(self) -> str | None:
        """Write what is held back, since no more text comes; return the stop string that it completes."""
        stop = self._append(self._decode_all()[self._num_characters :]) if self._pending else None
        if stop is None and self._cleaner is not None:
            rest = self._behind_context(self._cleaner.rest())
            self._parts.append(rest)
            if self._matcher is not None:
                match = self._matcher.feed(rest, may_stop=len(self.token_ids) >= self._min_tokens)
                stop = None if match is None else self._cut_at(match)
        return stop

    def _end_at(self, content: str) -> str:
        """End the text at a special token without text whose `content` is a stop string."""
        stop = self._flush()
        if stop is None and self._include_stop:
            self._parts.append(content)
        return stop or content

    def _behind_context(self, text: str) -> str:
        """Leave out what is the context's of the text that the cleaner gives out."""
        left_out = min(self._num_of_context, len(text))
        self._num_of_context -= left_out
        return text[left_out:]

    def _refused(self, error: Exception) -> str | None:
        """Go on without the library's stream, which a decoder with a rule of its own has surprised."""
        logger.debug("DecodeStream refused a token (%s); decoding from the start", error)
        self._step = self._decode_again
        return self._decode_again(self._tokenizer, self.token_ids[-1])

    def _decode_again(self, tokenizer: Tokenizer, token_id: int | list[int]) -> str | None:
        del tokenizer, token_id
        text = self._decode_all()
        # A replacement character at the end is a character whose bytes have not all come.
        return None if text.endswith("\ufffd") else text[self._num_characters :]

    def _decode_all(self) -> str:
        token_ids = [*self._context, *self.token_ids] if self._context else self.token_ids
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


class ByteRunDetokenizer(FastIncrementalDetokenizer):
    """A detokenizer for decoders with byte fallback, which write what has no piece as one token a byte.

    Such a decoder replaces every byte of a run, the valid characters at its beginning included, when the run
    as a whole is not UTF-8. The text of a run is therefore held back until another token ends the run.
    """

    __slots__ = ("_byte_ids", "_run", "_special")

    def __init__(self, decoding: TextDecoding, params: SamplingParams, context: Sequence[int] = ()) -> None:
        super().__init__(decoding, params, context)
        self._byte_ids = decoding.byte_ids
        self._special = decoding.special
        self._run: list[int] = []

    def update(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str | None:
        if finish_reason is not None:
            return self._finish(new_token_ids, finish_reason)
        for position, token_id in enumerate(new_token_ids, 1):
            if token_id in self._byte_ids or (self._run and self._has_no_piece(token_id)):
                self.token_ids.append(token_id)
                self._run.append(token_id)
                self._pending = True
                continue
            stop = self._end_run() if self._run else None
            if stop is not None:
                self.num_dropped_tokens = len(new_token_ids) - position + 1
                return stop
            stop = super().update([token_id], None)
            if stop is not None:
                self.num_dropped_tokens = len(new_token_ids) - position
                return stop
        return None

    def _has_no_piece(self, token_id: int) -> bool:
        """Return whether the decoder does not see a token, so that a run goes on behind it."""
        skipped = self._skip_special and token_id in self._special
        return skipped or self._tokenizer.id_to_token(token_id) is None

    def _end_run(self) -> str | None:
        run, self._run = self._run, []
        try:
            chunk = self._step(self._tokenizer, run)
        except Exception as error:  # noqa: BLE001 (the library raises no narrower class)
            chunk = self._refused(error)
        if chunk is None:
            # The next token, or the end, brings the text.
            return None
        self._pending = False
        return self._append(chunk)


class JoinedSpecialTokens(FastIncrementalDetokenizer):
    """A detokenizer that leaves out the space between two special tokens, for
    `spaces_between_special_tokens=False`.

    Decoders of words put that space there (`[SEP] [PAD]`), those of bytes and of pieces that begin with a
    mark do not. A space between a special token and a text stays.
    """

    __slots__ = ("_special",)

    def __init__(self, decoding: TextDecoding, params: SamplingParams, context: Sequence[int] = ()) -> None:
        super().__init__(decoding, params, context)
        self._special = decoding.special

    def _append(self, chunk: str) -> str | None:
        last_two = self.token_ids[-2:]
        if len(last_two) == 1:
            last_two = [*self._context[-1:], *last_two]
        if len(last_two) == 2 and all(token_id in self._special for token_id in last_two):
            content = self._special[last_two[1]]
            if chunk == f" {content}":
                # The base class counts the characters of the decoder's text, which has the space.
                self._num_characters += 1
                return super()._append(content)
        return super()._append(chunk)
