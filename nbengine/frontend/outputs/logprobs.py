"""Log probabilities as the engine core sends them, made into what callers see."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from nbengine.ipc.messages import LogprobsLists
from nbengine.outputs import Logprob
from nbengine.sampling_params import SamplingParams

_MAX_INCOMPLETE = 3
"""A character has at most 4 bytes in UTF-8: if 3 tokens have not completed one, the next completes none
either."""
_ANCHOR = "a"
_PLACE_LENGTH = 16
"""A wrong guess at where a character begins is over after a few tokens."""


class TokenTexts:
    """The text of single tokens in their place, which is not always what a tokenizer makes of them alone.

    Some decoders drop the space at the beginning of a text, so each token is decoded behind another one. A
    token that ends within a character has no text; the one that completes it has the whole character. Texts
    are kept by token id: the next time one costs a look-up.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids
        self._anchor_text = self._decode(self._anchor)
        self._texts: dict[int, str] = {}

    def text(self, token_id: int, incomplete: Sequence[int] = ()) -> str:
        """Return the text of a token behind `incomplete`, the tokens of a character that has begun."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._behind_anchor([token_id])
        if "\ufffd" not in text:
            return text
        if incomplete:
            text = self._behind_anchor([*incomplete, token_id])
        return "" if text.endswith("\ufffd") else text

    def first_text(self, token_id: int, incomplete: Sequence[int] = ()) -> str:
        """Return the text of a token at the beginning of a text, behind `incomplete` alone."""
        text = self._decode([*incomplete, token_id])
        return "" if text.endswith("\ufffd") else text

    def _behind_anchor(self, token_ids: list[int]) -> str:
        text = self._decode([*self._anchor, *token_ids])
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _Place:
    """The place of the next token of a text: what stands before it decides its text."""

    __slots__ = ("_incomplete", "_is_first", "_texts")

    def __init__(self, texts: TokenTexts | None, *, is_first: bool = False) -> None:
        self._texts = texts
        self._is_first = is_first
        self._incomplete: list[int] = []

    def texts(self, token_ids: list[int]) -> Sequence[str | None]:
        """Return the texts that tokens would have here, None without a tokenizer; the place moves behind the
        first of them."""
        if self._texts is None:
            return [None] * len(token_ids)
        before = self._incomplete
        if self._is_first:
            texts = [self._texts.first_text(token_id, before) for token_id in token_ids]
            self._is_first = not texts[0]
        else:
            texts = [self._texts.text(token_id, before) for token_id in token_ids]
        self._incomplete = [] if texts[0] or len(before) == _MAX_INCOMPLETE else [*before, token_ids[0]]
        return texts


class LogprobsProcessor:
    """The log probabilities of one request: those of new tokens until they are taken, their sum, the
    prompt's."""

    __slots__ = ("_place", "_prompt_logprobs", "_texts", "_untaken", "cumulative_logprob")

    def __init__(self, texts: TokenTexts | None, params: SamplingParams, *, is_first: bool = False) -> None:
        """Begin with the first token of an answer; `is_first` says that no text stands before it, so that its
        decoder may leave out a space."""
        asked = params.logprobs is not None
        self.cumulative_logprob = 0.0 if asked else None
        self._untaken: list[dict[int, Logprob]] | None = [] if asked else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._texts = texts
        self._place = _Place(texts, is_first=is_first)

    def begin_behind(self, written: Sequence[int]) -> None:
        """Let the first sampled token stand behind the tokens `written`."""
        # A place depends on the tokens of one character before it.
        for token_id in written[-_PLACE_LENGTH:]:
            self._place.texts([token_id])

    def update(self, rows: LogprobsLists, count: int) -> None:
        """Take in the first `count` rows of sampled tokens; a stop string cuts off what was sampled after
        it."""
        if self._untaken is None or self.cumulative_logprob is None:
            return
        for position in range(count):
            self._untaken.append(_entry(rows, position, self._place))
            self.cumulative_logprob += rows.logprobs[position][0]

    def update_prompt(self, rows: LogprobsLists, prompt_token_ids: list[int] | None) -> None:
        """Take in the rows of all prompt tokens but the first, which has None in its place."""
        place = _Place(self._texts)
        if prompt_token_ids:
            place.texts(prompt_token_ids[:1])
        entries = [_entry(rows, position, place) for position in range(len(rows.logprobs))]
        self._prompt_logprobs = [None, *entries]

    def take(self) -> list[dict[int, Logprob]] | None:
        """Return the entries of sampled tokens that were not taken before, None if they are not asked for."""
        untaken = self._untaken
        if untaken is not None:
            self._untaken = []
        return untaken

    def take_prompt(self) -> list[dict[int, Logprob] | None] | None:
        """Return the prompt's entries, once."""
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return prompt_logprobs


def _entry(rows: LogprobsLists, position: int, place: _Place) -> dict[int, Logprob]:
    """Return the sampled token with its own rank, then the most likely ones with theirs; a token that comes
    twice counts once."""
    token_ids = rows.logprob_token_ids[position]
    logprobs = rows.logprobs[position]
    texts = place.texts(token_ids)
    entry = {token_ids[0]: Logprob(logprobs[0], rows.sampled_token_ranks[position], texts[0])}
    for rank in range(1, len(token_ids)):
        if token_ids[rank] not in entry:
            entry[token_ids[rank]] = Logprob(logprobs[rank], rank, texts[rank])
    return entry
