"""Structured outputs in the engine core: what requests ask for, compiled, and the masks of a step.

The library is llguidance (the extra `structured`); it and the tokenizer are loaded with the first request that
needs them. Compiling happens on the input thread, the masks are built while the model runs.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from nbengine.config import ModelConfig
from nbengine.engine.grammar_check import WHITESPACE, GrammarChecker, GrammarSource, parser_limits
from nbengine.errors import ModelLoadError, NBEngineError, RequestError
from nbengine.models.hf_config import eos_token_ids, load_hf_config
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.scheduler.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 4 << 20
"""Of the texts of the cached grammars; what is made of them takes a few tens of KiB each and some multiple of the
text."""
PARALLEL_FROM = 16
"""Requests from which on the masks of a step are built by several threads: below that they only wait for each other."""


class GuidanceGrammar:
    """A `Grammar` of llguidance, and where the output may end.

    The end tokens of the request are allowed where the text is complete. As long as `ignore_eos` or `min_tokens`
    hold the end back, they are allowed only where nothing else can follow. When the library gives up (its limits
    are reached) it allows nothing but an end token, and refuses that.
    """

    __slots__ = ("_added", "_eos", "_min_tokens", "_num_tokens", "_plain", "_terminated", "matcher")

    def __init__(self, matcher: LLMatcher, eos_token_id: int, params: SamplingParams) -> None:
        """`eos_token_id` is what the library takes for the end."""
        end_token_ids = set(params.stop_token_ids)
        if params.eos_token_id is not None and not params.ignore_eos:
            end_token_ids.add(params.eos_token_id)
        self.matcher = matcher
        self._eos = eos_token_id
        self._added = sorted(end_token_ids - {eos_token_id})
        self._min_tokens = params.min_tokens
        self._plain = eos_token_id in end_token_ids
        """The library's end token is one of the request's."""
        self._num_tokens = 0
        self._terminated = False

    @property
    def error(self) -> str:
        return _error_of(self.matcher)

    def accept_tokens(self, token_ids: list[int]) -> bool:
        self._num_tokens += len(token_ids)
        self._terminated = self._eos in token_ids
        # One by one: the library's call for several refuses the end where nothing else can follow.
        return all(map(self.matcher.consume_token, token_ids)) and not self.matcher.is_error()

    def is_terminated(self) -> bool:
        return self._terminated

    def adjust_end_tokens(self, row: NDArray[np.uint32]) -> None:
        """Put the request's own end tokens in the place of the library's, where the text is complete."""
        holds_back = self._num_tokens < self._min_tokens
        if (self._plain and not self._added and not holds_back) or not self.matcher.is_accepting():
            return
        word, bit = self._eos >> 5, np.uint32(1 << (self._eos & 31))
        row[word] &= ~bit
        if holds_back and row.any():
            return
        for token_id in self._added:
            row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if self._plain or not row.any():
            row[word] |= bit


class StructuredOutputManager:
    """Compiles grammars, keeps the latest ones, and builds masks.

    `compile` is safe on any thread, `fill_bitmasks` is for one. `vocab_size` is the model's, which may have more
    tokens than the tokenizer; those are never allowed.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, max_num_seqs: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._checker = GrammarChecker()
        self._cache: OrderedDict[GrammarSource, LLMatcher | str] = OrderedDict()
        """A matcher at its start, or why there is none."""
        self._cached_bytes = 0
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._bitmask = np.zeros((0, -(-vocab_size // 32)), np.uint32)

    def compile(self, params: SamplingParams) -> GuidanceGrammar | None:
        """Return the grammar that a new request starts with; None: it asks for none.

        Raises:
            RequestError: what it asks for is not valid, is not supported or would cost too much, or the engine
                has no library for it.
        """
        constraint = params.structured_outputs
        if constraint is None:
            return None
        with self._lock:
            tokenizer = self._loaded_tokenizer()
            source = grammar_source(constraint)
            try:
                found = self._cached(source)
            except NBEngineError as error:
                found = str(error)
            if isinstance(found, str):
                raise RequestError(f"structured_outputs.{source.kind} cannot be used: {found}")
            matcher = found.deep_copy()
        return GuidanceGrammar(matcher, tokenizer.eos_token, params)

    def fill_bitmasks(self, grammars: Sequence[Grammar]) -> NDArray[np.int32]:
        """Return [grammars, vocabulary / 32 rounded up]: the tokens that may come next, a row a grammar.

        The next call overwrites the buffer.
        """
        # Whatever has a grammar got it from `compile`.
        ours = cast("Sequence[GuidanceGrammar]", grammars)
        count = len(ours)
        if count > len(self._bitmask):
            self._bitmask = np.zeros((max(count, self._max_num_seqs), self._bitmask.shape[1]), np.uint32)
        bitmask = self._bitmask
        address, row_bytes = bitmask.ctypes.data, bitmask.strides[0]
        if count < PARALLEL_FROM or self._executor is None:
            for row, grammar in enumerate(ours):
                grammar.matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        else:
            matchers = [(grammar.matcher, row) for row, grammar in enumerate(ours)]
            self._executor.unsafe_compute_mask_ptr(matchers, address, row_bytes, count)
        for row, grammar in enumerate(ours):
            grammar.adjust_end_tokens(bitmask[row])
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
        from llguidance import LLMatcher

        grammar = self._checker.check(source)
        matcher = LLMatcher(self._loaded_tokenizer(), grammar, log_level=0, limits=parser_limits())
        mask = np.zeros(self._bitmask.shape[1], np.uint32)
        # The copies begin with this mask's states; and some limits only show here.
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if error := _error_of(matcher):
            raise RequestError(error)
        eos = self._loaded_tokenizer().eos_token
        mask[eos >> 5] &= ~np.uint32(1 << (eos & 31))
        if not mask.any():
            raise RequestError("only the empty text follows it")
        return matcher

    def _loaded_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance where the engine runs: pip install nbengine[structured]"
            ) from error
        started = time.monotonic()
        directory = Path(self._config.tokenizer or self._config.directory)
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            eos = eos_token_ids(self._config.directory, load_hf_config(self._config))
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos[0] if eos else None)
        except (OSError, ValueError, ModelLoadError) as error:
            raise RequestError(
                f"structured_outputs cannot use the tokenizer in {directory}: {error}"
            ) from error
        self._executor = LLExecutor()
        logger.info("loaded the tokenizer for structured outputs in %.1f s", time.monotonic() - started)
        return self._tokenizer


def _error_of(matcher: LLMatcher) -> str:
    message: str = matcher.get_error()
    return message.removesuffix("<non-verbose/>").strip()


def grammar_source(constraint: StructuredOutputsParams) -> GrammarSource:
    """Return what is to be compiled: equal for equal constraints."""
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
