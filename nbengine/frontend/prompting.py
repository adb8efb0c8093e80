"""What `AsyncLLM` and `LLMEngine` offer for making prompts: the tokenizer, the chat template, the defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.client.base import EngineCoreClient
from nbengine.config import EngineConfig
from nbengine.frontend.chat import Message, has_chat_template, render_chat
from nbengine.frontend.input_processor import InputProcessor
from nbengine.frontend.tokenizer import load_tokenizer
from nbengine.frontend.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Prompting:
    """Base of the frontends, which set its attributes when their engine is ready."""

    engine_core: EngineCoreClient
    input_processor: InputProcessor
    _tokenizer: PreTrainedTokenizerFast

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, its model resolved."""
        return self.engine_core.config

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
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
    ) -> dict[str, Any]:
        """Render a conversation to a prompt, with "prompt" and "prompt_token_ids"; arguments and errors of `LLM.chat`."""
        return render_chat(
            self._tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            chat_template_kwargs=chat_template_kwargs,
        )

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling parameters that the model's generation config recommends."""
        return self.input_processor.default_sampling_params()

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer, in a copy of the caller's own: what is set on it, such as truncation, stays there."""
        return self._callers_tokenizer

    @functools.cached_property
    def _callers_tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.config.model)
