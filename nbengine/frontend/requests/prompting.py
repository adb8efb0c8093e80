"""The part of `AsyncLLM` and `LLMEngine` that makes prompts: the tokenizer, the chat template, the
defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.checks import require_line
from nbengine.client.base import EngineCoreClient
from nbengine.config import EngineConfig
from nbengine.frontend.parsing.formats import AUTO
from nbengine.frontend.parsing.reading import ANSWER_KEY, answer_reading, special_tokens_of
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.reasoning import reasoning_marks
from nbengine.frontend.text.chat import Message, has_chat_template, render_chat
from nbengine.frontend.text.stored_templates import template_for
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.frontend.text.tools import Tool, tool_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Prompting:
    """The base of the frontends, which set its attributes when their engine is ready."""

    engine_core: EngineCoreClient
    input_processor: InputProcessor
    _tokenizer: PreTrainedTokenizerFast

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration, its model resolved."""
        return self.engine_core.config

    @property
    def has_chat_template(self) -> bool:
        """Return whether the engine or its model has a chat template."""
        return has_chat_template(self._tokenizer)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_parser: str = AUTO,
        tool_parser: str = AUTO,
        truncated: bool = False,
    ) -> dict[str, Any]:
        """Render a conversation to a dict with "prompt" and "prompt_token_ids", which `generate` takes as a
        prompt; arguments and errors are those of `LLM.chat`.

        Where the format of the answer is known, "answer" says how it is to be read (`AnswerReading`), and the
        outputs of a request with this prompt have `reasoning`, `content` and `tool_calls`. If that format has
        reasoning, "reasoning" has the marks around it, None if this answer has none. With `truncated`
        the prompt may be of any length: it is to be cut (`truncate_prompt_tokens`).
        """
        require_line("reasoning_parser", reasoning_parser)
        require_line("tool_parser", tool_parser)
        schemas = None if tools is None else tool_schemas(tools)
        rendered = render_chat(
            self._tokenizer,
            messages,
            tools=schemas,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            chat_template_kwargs=chat_template_kwargs,
            encoder=self.input_processor.chat_encoder,
            limit=None if truncated else self.input_processor.limit,
        )
        template = template_for(self._tokenizer.chat_template, chat_template, has_tools=bool(schemas))
        reading = answer_reading(
            template,
            rendered["prompt"],
            schemas or (),
            self._special_tokens,
            reasoning_parser=reasoning_parser,
            tool_parser=tool_parser,
        )
        if reading is not None:
            rendered[ANSWER_KEY] = reading
            if (family := reading.format.reasoning_parser) is not None:
                marks = reasoning_marks(family, template)
                rendered["reasoning"] = marks.behind(rendered["prompt"], may_begin=add_generation_prompt)
        return rendered

    def default_sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation config recommends; none if the engine has
        `generation_config="none"`."""
        return self.input_processor.default_sampling_params()

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a copy of the model's tokenizer for the caller: what is set on it, such as truncation, stays
        there."""
        return self._callers_tokenizer

    @functools.cached_property
    def _special_tokens(self) -> frozenset[str]:
        return special_tokens_of(self._tokenizer)

    @functools.cached_property
    def _callers_tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.config.model)
