"""Answers with log probabilities, and an engine that writes them when it is told to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from nbengine.frontend.control import Control, ControlOf
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.requests.output_interval import FOR_READERS
from nbengine.magics.generation.request import Origin
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.tokens.branching import BranchTree
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams

PROMPT = [901, 902, 903]
Word = tuple[str, float, dict[str, float]]
"""Text of a token, its probability, and its alternatives with theirs."""

VOCABULARY: dict[str, int] = {}


def token_id(text: str) -> int:
    """Return a token id for a text, the same one for the same text."""
    return VOCABULARY.setdefault(text, len(VOCABULARY) + 10)


def entry_of(word: Word) -> dict[int, Logprob]:
    """The entry of log probabilities: the token itself, then the others."""
    text, probability, others = word
    ranked = sorted({text: probability, **others}.items(), key=lambda item: -item[1])
    ranks = {name: rank for rank, (name, _) in enumerate(ranked, 1)}
    return {
        token_id(name): Logprob(math.log(share), ranks[name], name)
        for name, share in [(text, probability), *others.items()]
    }


def delta_of(
    words: Sequence[Word],
    finish_reason: str | None = None,
    *,
    text: str | None = None,
    index: int = 0,
    finished: bool | None = None,
    cached: int = 0,
    stop_reason: int | str | None = None,
    prompt: Sequence[int] = PROMPT,
    request_id: str = "r",
) -> RequestOutput:
    """An output with these tokens; `text` where it is not simply theirs."""
    now = time.monotonic()
    completion = CompletionOutput(
        index,
        "".join(word[0] for word in words) if text is None else text,
        [token_id(word[0]) for word in words],
        None,
        [entry_of(word) for word in words],
        finish_reason,
        stop_reason,
    )
    metrics = RequestMetrics(now - 1, None, now - 0.5, now, None, 0, max(2, len(words)))
    ended = finish_reason is not None if finished is None else finished
    return RequestOutput(request_id, None, list(prompt), [completion], ended, None, cached, metrics)


class HandDrivenClient:
    """Takes branches, and answers when `write` is called."""

    name = "hand-driven"
    engine_ranks = [0]
    stall = None

    def __init__(self) -> None:
        self.requests: list[tuple[Any, SamplingParams, int | None, list[int]]] = []
        self.collectors: list[RequestOutputCollector] = []
        self.aborted: list[str] = []
        self.read: list[str] = []
        self.refusal: Exception | None = None
        self.state = SchedulerStats()
        self.utilities: list[str] = []

    def stats_within(self, timeout: float) -> tuple[EngineStats, list[int]]:
        return EngineStats(engines=[self.state]), []

    def place_within(self, request_ids: Sequence[str], timeout: float) -> None:
        """Nothing waits in a queue."""

    @property
    def control(self) -> Control:
        return ControlOf(self)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        self.utilities.append(method)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        data_parallel_rank: int | None = None,
        written: Sequence[int] = (),
        transcript: str | None = None,
        output_interval: float = 0.0,
    ) -> RequestOutputCollector:
        assert output_interval == FOR_READERS
        assert transcript == "the prompt"
        if self.refusal is not None:
            raise self.refusal
        self.requests.append((prompt, sampling_params, data_parallel_rank, list(written)))
        request_id = f"branch-{len(self.requests)}"
        self.collectors.append(RequestOutputCollector(RequestOutputKind.DELTA, request_id, request_id))
        return self.collectors[-1]

    def write(self, words: Sequence[Word], finish_reason: str | None = None, **more: Any) -> None:
        """Let the last branch go on."""
        prompt, _, _, written = self.requests[-1]
        before = [*prompt["prompt_token_ids"], *written]
        self.collectors[-1].put(delta_of(words, finish_reason, prompt=before, **more))

    def abort_soon(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def read_transcripts(self, request_ids: Sequence[str]) -> None:
        """Note that transcripts have been shown and need not be kept."""
        self.read += request_ids


def tree_of(
    words: Sequence[Word],
    finish_reason: str | None = "stop",
    params: SamplingParams | None = None,
    **more: Any,
) -> tuple[BranchTree, HandDrivenClient]:
    """The tree of an answer, and the engine that goes on with it."""
    client = HandDrivenClient()
    result = GenerationResult("first", "the prompt")
    result.tree = BranchTree(
        result, Origin(client, params or SamplingParams(temperature=0, max_tokens=50, logprobs=3))
    )
    result.absorb(delta_of(words, finish_reason, **more))
    return result.tree, client
