"""Offline inference: prompts in, finished outputs back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.frontend.chat import Message, is_conversation
from nbengine.frontend.control import Control
from nbengine.frontend.input_processor import PromptType, prompt_list
from nbengine.frontend.llm_engine import LLMEngine
from nbengine.frontend.options import EngineOptions, with_engine_options
from nbengine.frontend.pooling import OfflinePooling
from nbengine.frontend.progress_line import progress_line
from nbengine.frontend.tools import Tool
from nbengine.metrics.stats import EngineStats
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from nbengine.widgets.processes.tree import ProcessTree
from nbengine.widgets.waves.recording import WaveRecording

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.widgets.dashboard.widget import Dashboard

TqdmChoice = bool | Callable[..., Any]


class LLM(Control, OfflinePooling):
    """A model for generating text from batches of prompts, or for making vectors and scores of them.

    It works in a notebook cell, in a script without a `__main__` guard and inside a running event loop: the engine
    runs in processes of its own, which end with this one. `shutdown` (or leaving a `with` block) ends them earlier
    and waits until they are gone. In a terminal a line on stderr shows how far the start is. An interrupt of
    `generate` aborts its requests; the LLM stays usable.

    Args:
        model: a directory, a .gguf file, a hub id, or an alias such as "smollm2-135m" or "random-tiny".
        multiprocess: False runs the engine in this process, without sockets or threads.
        options: see `EngineArgs`.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files.
        EngineStartError: the engine did not start; the message has the reason and the end of its log.
        InvalidArgumentError, NotSupportedError: an argument; the message names it.
    """

    @with_engine_options
    def __init__(
        self, model: str = "smollm2-135m", *, multiprocess: bool = True, **options: Unpack[EngineOptions]
    ) -> None:
        engine_args = EngineArgs.from_kwargs({"model": model, **options})
        with progress_line(f"starting {model}:") as progress:
            self.llm_engine = LLMEngine.from_engine_args(
                engine_args, multiprocess=multiprocess, progress=progress
            )
        self._request_counter = itertools.count()
        self._busy = threading.Lock()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: TqdmChoice = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate the completions of each prompt and return them in the order of the prompts.

        Args:
            prompts: one prompt or several, each a string, `{"prompt": str}`, `{"prompt_token_ids": [int]}` or
                `{"prompt_embeds": tensor}`, the dicts with `cache_salt` if wanted; a list of integers is a prompt's
                tokens.
            sampling_params: for all prompts, or one for each; None takes `get_default_sampling_params()`.
            use_tqdm: show a progress bar, or a callable that makes one.
            priority: of each prompt, lower goes first, with `scheduling_policy="priority"`.

        Raises:
            InvalidArgumentError, NotSupportedError: a prompt or parameter; no request is left running.
            RequestError: the engine refused a prompt.
            EngineDeadError: the engine has ended; the message has the reason and the end of its log.
        """
        sequence = prompt_list(prompts)
        params = self._params_for(sampling_params, len(sequence))
        if priority is not None and len(priority) != len(sequence):
            raise InvalidArgumentError("priority", priority, f"as long as prompts ({len(sequence)})")
        priorities = [0] * len(sequence) if priority is None else list(priority)
        with self._busy:
            try:
                positions = self._add_requests(sequence, params, priorities)
                return self._run_engine(positions, use_tqdm, sum(own.n for own in params))
            except BaseException:
                self.llm_engine.abort_all()
                raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: TqdmChoice = True,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of several.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists. A content is a string or a
                list of text parts; the arguments of `tool_calls` may be JSON.
            tools: what the template tells the model of, each `{"type": "function", "function": {...}}` or a Python
                function with type hints and a docstring in Google's style.
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: end the prompt in the last message, for the model to go on with it; needs
                `add_generation_prompt=False`.
            chat_template: Jinja source in place of the model's own, or the name of one of its own.
            chat_template_content_format: "string" joins text parts by newlines, "openai" makes a list of parts of
                every content, "auto" leaves contents as they are if the template knows parts, else joins them.
            chat_template_kwargs: further variables for the template.

        Raises:
            InvalidArgumentError: a message or a tool is malformed, the template refuses them, or there is none; see
                also `generate`.
            NotSupportedError: a message has an image or another part that is no text.
        """
        conversations = [messages] if is_conversation(messages) else messages
        prompts = [
            self.llm_engine.render_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters that the model's generation config recommends."""
        return SamplingParams(**self.llm_engine.default_sampling_params())

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", "embed", "score", "classify", "encode"."""
        return self.llm_engine.get_supported_tasks()

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer, in a copy of the caller's own: what is set on it, such as truncation, stays there."""
        return self.llm_engine.get_tokenizer()

    def stats(self) -> EngineStats:
        """The state of scheduler and KV cache now."""
        return self.llm_engine.stats()

    def scale(self, data_parallel_size: int, timeout: float | None = None) -> int:
        """Have so many engine cores and return their number.

        Raises:
            NBEngineError: the engine cannot be scaled; the message says why.
            TimeoutError: it has not been done within `timeout` seconds; it goes on.
        """
        return self.llm_engine.scale(data_parallel_size, timeout)

    def process_tree(self) -> ProcessTree:
        """The engine's processes as they are now, and what connects them; a notebook shows a picture of them."""
        return self.llm_engine.process_tree()

    def dashboard(self, *, height: int = 0) -> Dashboard:
        """A live view of scheduler, KV cache, steps and requests, as a widget of the notebook.

        Args:
            height: in pixels; 0: as high as its content.

        Raises:
            NotSupportedError: the engine is in this process, and publishes nothing.
        """
        return self.llm_engine.dashboard(height=height)

    def record_waves(self) -> WaveRecording:
        """A context manager that records what each engine core does meanwhile; its `timeline` has it, a picture in a
        notebook."""
        return self.llm_engine.record_waves()

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, its model resolved."""
        return self.llm_engine.config

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine core by name and wait for its result."""
        return self.llm_engine.call_utility(method, *args, timeout=timeout)

    def shutdown(self) -> None:
        """End the engine and wait until all its processes are gone; calling it again does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params_for(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [_final_only(sampling_params)] * count
        if isinstance(sampling_params, (str, Mapping)) or not isinstance(sampling_params, Sequence):
            raise InvalidTypeError("sampling_params", sampling_params, "SamplingParams or a list of them")
        if len(sampling_params) != count:
            raise InvalidArgumentError("sampling_params", sampling_params, f"as long as prompts ({count})")
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise InvalidTypeError("sampling_params", params, "SamplingParams or a list of them")
        return [_final_only(params) for params in sampling_params]

    def _add_requests(
        self, prompts: list[PromptType], params: list[SamplingParams], priorities: list[int]
    ) -> dict[str, int]:
        positions = {}
        for position, (prompt, own_params, priority) in enumerate(
            zip(prompts, params, priorities, strict=True)
        ):
            request_id = str(next(self._request_counter))
            self.llm_engine.add_request(request_id, prompt, own_params, priority=priority)
            positions[request_id] = position
        return positions

    def _run_engine(
        self, positions: dict[str, int], use_tqdm: TqdmChoice, num_completions: int
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        with _Bar(num_completions, use_tqdm) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    position = positions.get(output.request_id)
                    # The engine may have requests of its own, added without this class.
                    if position is not None and isinstance(output, RequestOutput):
                        outputs[position] = output
                        bar.advance(output)
        if len(outputs) < len(positions):
            raise NBEngineError(f"{len(positions) - len(outputs)} requests ended without an output")
        return [outputs[position] for position in range(len(positions))]


class _Bar:
    """Progress over the completions, with the rates of tokens in and out."""

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

    def advance(self, output: RequestOutput) -> None:
        """Count the completions of a finished prompt."""
        if self._bar is None:
            return
        self._tokens_in += len(output.prompt_token_ids or ())
        self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.set_postfix_str(
                f"in {self._tokens_in / elapsed:.0f} tok/s, out {self._tokens_out / elapsed:.0f} tok/s",
                refresh=False,
            )
        self._bar.update(len(output.outputs))


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
