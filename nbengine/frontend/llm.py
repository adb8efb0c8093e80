"""Offline inference: prompts go in, finished outputs come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from nbengine.client.base import EngineCoreClient
from nbengine.client.link.ownership import Owned, is_forked_copy
from nbengine.config import EngineArgs, EngineConfig
from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.control import Control
from nbengine.frontend.llm_engine import LLMEngine
from nbengine.frontend.offline import Offline, TqdmChoice
from nbengine.frontend.options import EngineOptions, PathName, with_engine_options
from nbengine.frontend.outputs.output_collector import PromptCallback
from nbengine.frontend.parsing.formats import AUTO
from nbengine.frontend.pooling import OfflinePooling
from nbengine.frontend.progress_line import start_progress
from nbengine.frontend.requests.input_processor import PromptType, prompt_list
from nbengine.frontend.text.chat import Message, is_conversation
from nbengine.frontend.text.tools import Tool
from nbengine.outputs import RequestOutput
from nbengine.plain import is_ordered
from nbengine.sampling_params import RequestOutputKind, SamplingParams
from nbengine.widgets.processes.tree import ProcessTree
from nbengine.widgets.waves.recording import WaveRecording

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nbengine.widgets.dashboard.widget import Dashboard


class LLM(Control, OfflinePooling):
    """A model for generating text from batches of prompts, or for making vectors and scores of them.

    It works in a notebook cell, in a script without a `__main__` guard and inside a running event loop: the
    engine runs in its own processes, which end with this one. `shutdown` (or leaving a `with` block) ends
    them earlier and waits until they are gone. A notebook's cell, or in a terminal a line on stderr, shows
    how far the start is. An interrupt of `generate` aborts its requests; the LLM stays usable.

    Args:
        model: a directory (a path, too), a .gguf file, a hub id, or an alias such as "smollm2-135m" or "random-tiny".
        multiprocess: False runs the engine in this process, without sockets or threads.
        options: see `EngineArgs`.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files.
        EngineStartError: the engine did not start; the message has the reason and the end of its log.
        InvalidArgumentError, NotSupportedError: an argument; the message names it.
    """

    llm_engine = Owned[LLMEngine]()

    @with_engine_options
    def __init__(
        self,
        model: PathName = "smollm2-135m",
        *,
        multiprocess: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        engine_args = EngineArgs.from_kwargs({"model": model, **options}, "LLM", ("multiprocess",))
        config = engine_args.create_engine_config(bound=True)
        with start_progress(f"starting {model}", config.parallel) as progress:
            self.llm_engine = LLMEngine(config, multiprocess=multiprocess, progress=progress)
        Offline.__init__(self)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: TqdmChoice = True,
        priority: Sequence[int] | None = None,
        on_prompt_progress: PromptCallback | None = None,
    ) -> list[RequestOutput]:
        """Generate the completions of each prompt and return them in the order of the prompts.

        Args:
            prompts: one prompt or several, each a string, `{"prompt": str}`, `{"prompt_token_ids": [int]}` or
                `{"prompt_embeds": tensor}`, the dicts with `cache_salt` if wanted; a list of integers is a
                prompt's tokens.
            sampling_params: for all prompts, or one for each; None takes `get_default_sampling_params()`.
            use_tqdm: show a progress bar, or a callable that makes one.
            priority: of each prompt, lower goes first, with `scheduling_policy="priority"`.
            on_prompt_progress: what is called with a `PromptProgress` after each step that has read a part of a
                prompt and not all of it; `request_id` counts the prompts of all calls from 0. What it raises ends
                the call.

        Raises:
            InvalidArgumentError, NotSupportedError: a prompt or parameter; no request is left running.
            RequestError: the engine refused a prompt.
            EngineDeadError: the engine has ended; the message has the reason and the end of its log.
        """
        sequence = prompt_list(prompts)
        params = self._params_for(sampling_params, len(sequence))
        if priority is not None and not is_ordered(priority):
            raise InvalidTypeError("priority", priority, "a list of integers, or None")
        priorities = [] if priority is None else list(priority)
        if priority is not None and len(priorities) != len(sequence):
            raise InvalidArgumentError("priority", priority, f"as long as prompts ({len(sequence)})")
        return self._run(RequestOutput, sequence, params, use_tqdm, priorities, on_prompt_progress)

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
        reasoning_parser: str = AUTO,
        tool_parser: str = AUTO,
        on_prompt_progress: PromptCallback | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of several.

        The outputs have `reasoning`, `content` and `tool_calls` beside `text` where the model's way of
        writing them is known.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists. The template says
                which roles there are. A content is a string or a list of text parts, a tool's also a dict;
                the arguments of `tool_calls` may be JSON.
            tools: what the template tells the model of, each `{"type": "function", "function": {...}}` or a
                Python function with type hints and a docstring in Google's style.
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: end the prompt in the last message, for the model to go on with it; needs
                `add_generation_prompt=False`.
            chat_template: Jinja source in place of the engine's or the model's, or the name of a template that
                the model has.
            chat_template_content_format: "string" joins text parts by newlines, "openai" makes a list of
                parts of every content, "auto" leaves contents as they are if the template knows parts, else
                joins them.
            chat_template_kwargs: further variables for the template.
            reasoning_parser: the name of the parser that finds reasoning, "none", or "auto": chosen by the
                template.
            tool_parser: the name of the parser that finds calls of `tools`, "none" or "auto".
            on_prompt_progress: see `generate`.

        Raises:
            InvalidArgumentError: a message or a tool is malformed, the template refuses them
                (`ChatTemplateError`, with its own words), there is none, or there is no such parser; see
                also `generate`.
            NotSupportedError: a message has an image or another part that is no text.
        """
        is_one = is_conversation(messages) or not is_ordered(messages)
        conversations = [messages] if is_one else messages
        prompts = [
            self.llm_engine.render_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                chat_template_kwargs=chat_template_kwargs,
                reasoning_parser=reasoning_parser,
                tool_parser=tool_parser,
                truncated=_cuts_prompts(sampling_params),
            )
            for conversation in conversations
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, on_prompt_progress=on_prompt_progress
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation config recommends."""
        return SamplingParams(**self.llm_engine.default_sampling_params())

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a copy of the model's tokenizer for the caller: what is set on it, such as truncation, stays
        there."""
        return self.llm_engine.get_tokenizer()

    def process_tree(self) -> ProcessTree:
        """Return the engine's processes as they are now, and what connects them; a notebook shows a picture
        of them."""
        return self.llm_engine.process_tree()

    def dashboard(self, *, height: int = 0) -> Dashboard:
        """Make a live view of scheduler, KV cache, steps and requests, as a widget of the notebook.

        Args:
            height: in pixels; 0: as high as its content.

        Raises:
            NotSupportedError: the engine is in this process, and publishes nothing.
        """
        return self.llm_engine.dashboard(height=height)

    def record_waves(self) -> WaveRecording:
        """Return a context manager that records what each engine core does meanwhile; its `timeline` has the
        recording, a picture in a notebook."""
        return self.llm_engine.record_waves()

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration, its model resolved."""
        return self.llm_engine.config

    def _engine_client(self) -> EngineCoreClient:
        return self.llm_engine.engine_core

    def shutdown(self) -> None:
        """End the engine and wait until all its processes are gone; calling it again does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child that leaves the block too has nothing to end.
        if not is_forked_copy(self, "llm_engine"):
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


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _cuts_prompts(sampling_params: SamplingParams | Sequence[SamplingParams] | None) -> bool:
    """Return whether a prompt may be longer than the model takes, because only the end of the prompt is
    wanted."""
    several = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params]
    return any(getattr(params, "truncate_prompt_tokens", None) is not None for params in several)
