"""Structured outputs in the engine core: the compiled constraints of requests, and the masks of a step.

The library is llguidance (the extra `structured`); it, numpy and the tokenizer are loaded with the first request
that needs them. The input thread compiles; the busy loop builds the masks while the model runs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nbengine.config import ModelConfig
from nbengine.engine.core.grammar_check import WHITESPACE, GrammarChecker, GrammarSource, parser_limits
from nbengine.engine.core.literal_tokens import with_hidden_special_tokens
from nbengine.engine.core.thinking import ThinkingGrammar, thinking_grammar
from nbengine.errors import ModelLoadError, NBEngineError, RefusedArgumentError, RequestError
from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.models.configs.hf_config import eos_token_ids, load_hf_config
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.scheduler.grammar import Grammar
from nbengine.scheduler.reasoning import Decode

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 4 << 20
"""Most bytes of the texts of the cached grammars; a compiled grammar takes a few tens of KiB and some
multiple of its text."""
PARALLEL_FROM = 16
"""Number of requests from which on several threads build the masks of a step: with fewer they only wait for
each other."""
_EVERY_TOKEN = 0xFFFF_FFFF
"""A word of a row."""


class GuidanceGrammar:
    """A `Grammar` of llguidance, which also decides where the output may end.

    The end tokens of the request are allowed where the text is complete. While `ignore_eos` or `min_tokens`
    hold the end back, they are allowed only where nothing else can follow. When the library gives up (its
    limits are reached) it allows nothing but an end token, and refuses that.
    """

    __slots__ = ("_added", "_eos", "_min_tokens", "_num_tokens", "_plain", "_terminated", "matcher")

    def __init__(self, matcher: LLMatcher, eos_token_id: int, params: SamplingParams) -> None:
        """Begin with `matcher` at its start, for which `eos_token_id` is the end token."""
        end_token_ids = set(params.stop_token_ids)
        if params.eos_token_id is not None and not params.ignore_eos:
            end_token_ids.add(params.eos_token_id)
        self.matcher = matcher
        self._eos = eos_token_id
        self._added = sorted(end_token_ids - {eos_token_id})
        self._min_tokens = params.min_tokens
        self._plain = eos_token_id in end_token_ids
        """True if the library's end token is one of the request's."""
        self._num_tokens = 0
        self._terminated = False

    @property
    def error(self) -> str:
        return _error_of(self.matcher)

    def accept_tokens(self, token_ids: list[int]) -> bool:
        self._num_tokens += len(token_ids)
        self._terminated = self._eos in token_ids
        # One by one, because the library's call for several refuses the end where nothing else can follow.
        return all(map(self.matcher.consume_token, token_ids)) and not self.matcher.is_error()

    def is_terminated(self) -> bool:
        return self._terminated

    def is_free(self, num_unknown: int) -> bool:  # noqa: ARG002
        return False

    @property
    def is_over(self) -> bool:
        return False

    def pass_over(self, count: int) -> None:
        """Count tokens of the output that are not the grammar's."""
        self._num_tokens += count

    def finish_row(self, row: NDArray[np.uint32]) -> None:
        """Replace the library's end token by the request's end tokens where the text is complete."""
        holds_back = self._num_tokens < self._min_tokens
        if (self._plain and not self._added and not holds_back) or not self.matcher.is_accepting():
            return
        word, bit = self._eos >> 5, 1 << (self._eos & 31)
        row[word] &= _EVERY_TOKEN ^ bit
        if holds_back and row.any():
            return
        for token_id in self._added:
            row[token_id >> 5] |= 1 << (token_id & 31)
        if self._plain or not row.any():
            row[word] |= bit


class StructuredOutputManager:
    """A manager that compiles grammars, keeps the latest ones, and builds masks.

    `compile` is safe on any thread, `fill_bitmasks` is for one. `vocab_size` is the model's, which may have
    more tokens than the tokenizer; those are never allowed.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, max_num_seqs: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._checker = GrammarChecker()
        self._cache: OrderedDict[GrammarSource, LLMatcher | str] = OrderedDict()
        """By source: a matcher at its start, or the reason why there is none."""
        self._cached_bytes = 0
        self._tokenizers: dict[bool, LLTokenizer] = {}
        """By whether text never means a special token."""
        self._executor: LLExecutor | None = None
        self._decode: Decode | None = None
        self._num_words = -(-vocab_size // 32)
        """Of a row, with a bit a token."""
        self._bitmask: NDArray[np.uint32] | None = None

    def compile(
        self, params: SamplingParams, marks: ReasoningTokens | None = None, written: Sequence[int] = ()
    ) -> GuidanceGrammar | ThinkingGrammar | None:
        """Return the grammar with which a new request starts, None if it asks for none.

        With `marks`, which say where the request's reasoning is, the constraint is for the answer behind that.
        `written` has the tokens of the output that are known already, in a request without a constraint.

        Raises:
            RequestError: the constraint is not valid, is not supported or would cost too much, the engine has
                no library for it, or the marks cannot be used.
        """
        constraint, budget = params.structured_outputs, params.thinking_budget
        if marks is None and budget is not None:
            raise RefusedArgumentError(
                "thinking_budget", "thinking_budget needs to know the tokens that end reasoning"
            )
        answer = None if constraint is None else self._compiled_answer(constraint, params)
        if marks is None or (answer is None and budget is None):
            return answer
        decode = self._decoder() if marks.ending_texts else None
        tokenize = None if answer is None else self._loaded_tokenizer().tokenize_str
        grammar = thinking_grammar(marks, params, answer, decode, tokenize)
        if written:
            grammar.go_on_behind(written)
        return None if grammar.is_over else grammar

    def _compiled_answer(
        self, constraint: StructuredOutputsParams, params: SamplingParams
    ) -> GuidanceGrammar:
        with self._lock:
            source = grammar_source(constraint)
            tokenizer = self._tokenizer_for(source)
            try:
                found = self._cached(source)
            except NBEngineError as error:
                found = str(error)
            if isinstance(found, str):
                name = f"structured_outputs.{source.kind}"
                raise RefusedArgumentError(name, f"{name} cannot be used: {found}")
            matcher = found.deep_copy()
        return GuidanceGrammar(matcher, tokenizer.eos_token, params)

    def fill_bitmasks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        """Return [grammars, vocabulary / 32 rounded up]: the tokens that may come next, one row per grammar.

        The next call overwrites the buffer.
        """
        import numpy as np

        # Every request that has a grammar got it from `compile`.
        ours = cast("Sequence[GuidanceGrammar | ThinkingGrammar]", grammars)
        count = len(ours)
        bitmask = self._bitmask
        if bitmask is None or count > len(bitmask):
            bitmask = self._bitmask = np.zeros((max(count, self._max_num_seqs), self._num_words), np.uint32)
        address, row_bytes = bitmask.ctypes.data, bitmask.strides[0]
        matchers = [
            (matcher, row) for row, grammar in enumerate(ours) if (matcher := grammar.matcher) is not None
        ]
        if len(matchers) < PARALLEL_FROM or self._executor is None:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, address, row_bytes, count)
        for row, grammar in enumerate(ours):
            grammar.finish_row(bitmask[row])
        return bitmask[:count].view(np.int32)

    def shutdown(self) -> None:
        """End the process that checks grammars."""
        with self._lock:
            self._checker.shutdown()

    def _cached(self, source: GrammarSource) -> LLMatcher | str:
        found = self._cache.get(source)
        if found is not None:
            self._cache.move_to_end(source)
            return found
        try:
            found = self._compiled(source)
        except RequestError as error:
            found = str(error)
        self._cache[source] = found
        self._cached_bytes += len(source.text)
        while len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_bytes > MAX_CACHED_BYTES:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.text)
        return found

    def _compiled(self, source: GrammarSource) -> LLMatcher:
        import numpy as np
        from llguidance import LLMatcher

        grammar = self._checker.check(source)
        tokenizer = self._tokenizer_for(source)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        mask = np.zeros(self._num_words, np.uint32)
        # Copies of the matcher begin with the states of this first mask, and some limits are met only here.
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if error := _error_of(matcher):
            raise RequestError(error)
        eos = tokenizer.eos_token
        mask[eos >> 5] &= _EVERY_TOKEN ^ (1 << (eos & 31))
        if not mask.any():
            raise RequestError("only the empty text follows it")
        return matcher

    def _tokenizer_for(self, source: GrammarSource) -> LLTokenizer:
        """Return the tokenizer for a constraint: only a grammar can name special tokens."""
        return self._loaded_tokenizer(literal=source.kind != "grammar")

    def _loaded_tokenizer(self, *, literal: bool = False) -> LLTokenizer:
        """Return the library's tokenizer; for it no text is a special token's, if `literal`."""
        found = self._tokenizers.get(literal)
        if found is not None:
            return found
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance where the engine runs: pip install nbengine[structured]"
            ) from error
        started = time.monotonic()
        directory = Path(self._config.tokenizer_files)
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            hf = load_hf_config(self._config)
            eos = eos_token_ids(self._config.directory, hf, self._config.hf_overrides)
            text = with_hidden_special_tokens(text) if literal else text
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos[0] if eos else None)
        except (OSError, ValueError, ModelLoadError) as error:
            raise RequestError(
                f"structured_outputs cannot use the tokenizer in {directory}: {error}"
            ) from error
        self._tokenizers[literal] = tokenizer
        self._executor = self._executor or LLExecutor()
        logger.info("loaded the tokenizer for structured outputs in %.1f s", time.monotonic() - started)
        return tokenizer

    def _decoder(self) -> Decode:
        """Return what makes text of tokens; it is loaded with the first request that needs it."""
        with self._lock:
            if self._decode is None:
                from tokenizers import Tokenizer

                path = Path(self._config.tokenizer_files) / "tokenizer.json"
                try:
                    tokenizer = Tokenizer.from_file(str(path))
                except Exception as error:  # the library raises nothing more specific
                    raise RequestError(f"reasoning: the tokenizer {path} cannot be read: {error}") from error
                self._decode = partial(tokenizer.decode, skip_special_tokens=False)
            return self._decode


def _error_of(matcher: LLMatcher) -> str:
    message: str = matcher.get_error()
    return message.removesuffix("<non-verbose/>").strip()


def grammar_source(constraint: StructuredOutputsParams) -> GrammarSource:
    """Return the source to be compiled, which is equal for equal constraints."""
    whitespace: str | None = WHITESPACE
    if constraint.disable_any_whitespace:
        whitespace = None
    elif constraint.whitespace_pattern is not None:
        whitespace = constraint.whitespace_pattern
    kind, value = constraint.constraint
    text = _text_of(value)
    return GrammarSource(kind, text, whitespace if kind in ("json", "json_object") else None)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
