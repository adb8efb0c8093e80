"""This module takes a batch of prompts through the engine, until all of them have their outputs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nbengine.checks import require_bool
from nbengine.errors import NBEngineError
from nbengine.frontend.outputs.output_collector import PromptCallback
from nbengine.outputs import RequestOutput
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from nbengine.frontend.llm_engine import LLMEngine
    from nbengine.frontend.requests.input_processor import PromptType

TqdmChoice = bool | Callable[..., Any]
Output = RequestOutput | PoolingRequestOutput[PoolingOutput]
T = TypeVar("T", RequestOutput, PoolingRequestOutput[PoolingOutput])


class Offline:
    """The base of `LLM`, which owns `llm_engine`: it runs one batch at a time, on whatever thread calls."""

    llm_engine: LLMEngine

    def __init__(self) -> None:
        self._request_counter = itertools.count()
        self._busy = threading.Lock()

    def _run(
        self,
        kind: type[T],
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: TqdmChoice,
        priorities: Sequence[int] = (),
        on_prompt_progress: PromptCallback | None = None,
    ) -> list[T]:
        """Return the outputs of all prompts, in their order; an error, or an interrupt, leaves no request
        running."""
        if not callable(use_tqdm):
            use_tqdm = require_bool("use_tqdm", use_tqdm, "True, False, or what makes a progress bar")
        total = sum(own.n if isinstance(own, SamplingParams) else 1 for own in params)
        with self._busy:
            try:
                positions = self._add(prompts, params, priorities or [0] * len(prompts), on_prompt_progress)
                with _Bar(total, use_tqdm) as bar:
                    return self._collect(kind, positions, bar)
            except BaseException:
                self.llm_engine.abort_all()
                raise

    def _add(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: Sequence[int],
        on_prompt_progress: PromptCallback | None,
    ) -> dict[str, int]:
        positions = {}
        for position, (prompt, own, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            request_id = str(next(self._request_counter))
            self.llm_engine.add_request(
                request_id, prompt, own, priority=priority, on_prompt_progress=on_prompt_progress
            )
            positions[request_id] = position
        return positions

    def _collect(self, kind: type[T], positions: dict[str, int], bar: _Bar) -> list[T]:
        outputs: dict[int, T] = {}
        while self.llm_engine.has_unfinished_requests():
            for output in self.llm_engine.step():
                position = positions.get(output.request_id)
                # The engine may have other requests, which were added without this class.
                if position is not None and isinstance(output, kind):
                    outputs[position] = output
                    bar.advance(output)
        if len(outputs) < len(positions):
            raise NBEngineError(f"{len(positions) - len(outputs)} requests ended without an output")
        return [outputs[position] for position in range(len(positions))]


class _Bar:
    """The progress over the completions or the prompts, with the rates of tokens where some are generated."""

    def __init__(self, total: int, use_tqdm: TqdmChoice) -> None:
        self._bar: Any = None
        self._tokens_in = 0
        self._tokens_out = 0
        if use_tqdm and total:
            from tqdm.auto import tqdm

            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, output: Output) -> None:
        """Count the completions or the prompt of an output that is finished."""
        if self._bar is None:
            return
        if isinstance(output, RequestOutput):
            self._show_rates(output)
            self._bar.update(len(output.outputs))
        else:
            self._bar.update(1)

    def _show_rates(self, output: RequestOutput) -> None:
        self._tokens_in += len(output.prompt_token_ids or ())
        self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.set_postfix_str(
                f"in {self._tokens_in / elapsed:.0f} tok/s, out {self._tokens_out / elapsed:.0f} tok/s",
                refresh=False,
            )
