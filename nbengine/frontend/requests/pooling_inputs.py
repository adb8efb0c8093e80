"""The part of an input processor that completes pooling parameters from the model's files, and truncates and
pairs texts as its tokenizer does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nbengine.checks import require_utf8
from nbengine.config import EngineConfig
from nbengine.errors import InvalidArgumentError
from nbengine.models.configs.encoder_config import head_pooling, is_encoder
from nbengine.models.configs.hf_config import label_names, positive
from nbengine.models.configs.pooling_config import load_pooling_defaults
from nbengine.plain import is_ordered
from nbengine.sampling_params import PoolingParams

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from nbengine.frontend.requests.prompt_embeds import PromptEmbeds


class PoolingInputs:
    """The part of an `InputProcessor` that pooling requests need. It is safe to use from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        hf_config: Mapping[str, Any],
        tokenizer: Tokenizer,
        max_model_len: int,
        supported_tasks: Sequence[str],
    ) -> None:
        self.max_model_len = max_model_len
        self.supported_tasks = tuple(supported_tasks)
        self._model = config.model.model
        self._hf_config = hf_config
        self._tokenizer = tokenizer
        self._defaults = load_pooling_defaults(config.model.directory, hf_config)
        self._head_pooling = head_pooling(hf_config)

    @property
    def has_head(self) -> bool:
        """Return whether the model has a classification head."""
        return "classify" in self.supported_tasks

    @property
    def labels(self) -> list[str]:
        """Return the names of the classification head's labels, in the order of their probabilities."""
        return label_names(self._hf_config)

    def check_task(self, task: str) -> None:
        """Raise `InvalidArgumentError` unless the model can be asked for `task`."""
        if task not in self.supported_tasks:
            allowed = f"one of {', '.join(self.supported_tasks)}, which {self._model} can do"
            raise InvalidArgumentError("task", task, allowed)

    def completed(self, params: PoolingParams) -> PoolingParams:
        """Return a copy of the parameters in which nothing is left to the model.

        Raises:
            InvalidArgumentError: the model cannot do the task, or a parameter has no meaning for the task.
        """
        task = params.task or next((task for task in self.supported_tasks if task != "generate"), "embed")
        self.check_task(task)
        if task == "score" and not self.has_head:
            raise InvalidArgumentError(
                "task", task, "embed: a score of this model needs two texts (LLM.score)"
            )
        _check_meaning(params, task)
        completed = msgspec.structs.replace(params, task=task)
        if task == "embed":
            self._complete_embed(completed)
        elif task == "encode":
            completed.normalize = bool(params.normalize)
        else:
            completed.pooling = self._head_pooling
            completed.use_activation = params.use_activation is not False
        return completed

    def truncated(self, prompt: Any, params: PoolingParams) -> Any:
        """Return the prompt, tokenized if it has to be cut to `truncate_prompt_tokens`.

        The first tokens are kept, and with a text also the special tokens around it.

        Raises:
            InvalidArgumentError: that is longer than the model's context, or a text's special tokens are more.
        """
        asked = params.truncate_prompt_tokens
        if asked is None:
            return prompt
        length = self._checked_length(asked)
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            return list(prompt)[:length] if is_ordered(prompt) else prompt
        tokens = prompt.get("prompt_token_ids")
        if tokens is None and isinstance(prompt.get("prompt"), str):
            tokens = self._encode(prompt["prompt"], None, asked).ids
        return prompt if tokens is None else {**prompt, "prompt_token_ids": list(tokens)[:length]}

    def fitted_embeds(self, embeds: PromptEmbeds, params: PoolingParams) -> PromptEmbeds:
        """Return the first rows of a prompt given as embeddings, as many as `truncate_prompt_tokens` says.

        Raises:
            InvalidArgumentError: the model is an encoder, which adds more to a token than the embedding of
                its id.
        """
        if is_encoder(self._hf_config):
            raise InvalidArgumentError("prompt", "prompt_embeds", "text or token ids for an encoder")
        length = params.truncate_prompt_tokens
        return embeds if length is None else embeds[: self._checked_length(length)]

    def paired(self, text_1: str, text_2: str, params: PoolingParams) -> tuple[dict[str, Any], PoolingParams]:
        """Return the prompt that a cross-encoder judges, and the parameters that say where the second text
        begins.

        With `truncate_prompt_tokens` the longer text is cut first.

        Raises:
            InvalidArgumentError: that is longer than the model's context, or the special tokens are more.
        """
        encoding = self._encode(text_1, text_2, params.truncate_prompt_tokens)
        start = encoding.type_ids.index(1) if 1 in encoding.type_ids else None
        pair = msgspec.structs.replace(params, second_segment_start=start, truncate_prompt_tokens=None)
        return {"prompt_token_ids": encoding.ids}, pair

    def _complete_embed(self, params: PoolingParams) -> None:
        pooling = params.pooling or self._defaults.pooling
        if pooling is None:
            allowed = "mean, cls or last (the model's own kind of pooling is not supported)"
            raise InvalidArgumentError("pooling", None, allowed)
        params.pooling = pooling
        if params.normalize is None:
            params.normalize = self._defaults.normalize
        if params.dimensions is not None:
            size = positive(self._hf_config, "hidden_size")
            if params.dimensions > size:
                raise InvalidArgumentError(
                    "dimensions", params.dimensions, f"at most {size}, the model's own"
                )

    def _checked_length(self, length: int) -> int:
        if length > self.max_model_len:
            allowed = f"at most max_model_len ({self.max_model_len}), or -1"
            raise InvalidArgumentError("truncate_prompt_tokens", length, allowed)
        return self.max_model_len if length == -1 else length

    def _room(self, asked: int, *, is_pair: bool) -> int:
        """Return how many tokens of its texts a prompt cut to `asked` tokens has beside the special ones."""
        length = self._checked_length(asked)
        special = self._tokenizer.num_special_tokens_to_add(is_pair)
        if length < special:
            name = "max_model_len" if asked == -1 else "truncate_prompt_tokens"
            texts = "two texts judged together" if is_pair else "a text"
            raise InvalidArgumentError(name, length, f"at least {special}, the special tokens around {texts}")
        return length - special

    def _encode(self, text: str, pair: str | None, truncate: int | None) -> Encoding:
        tokenizer = self._tokenizer
        require_utf8("prompt", text)
        if pair is not None:
            require_utf8("prompt", pair)
        if truncate is None:
            [whole] = tokenizer.encode_batch_fast([text if pair is None else (text, pair)])
            return whole
        room = self._room(truncate, is_pair=pair is not None)
        texts = [text] if pair is None else [text, pair]
        first, *others = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        second = others[0] if others else None
        if second is None:
            first.truncate(room)
        else:
            # The tokenizer cuts the longer text first; if both are cut to the same length, the longer keeps
            # the odd token.
            shorter, longer = (second, first) if len(first) > len(second) else (first, second)
            shorter.truncate(room // 2)
            longer.truncate(room - len(shorter))
        return tokenizer.post_process(first, second)


def _check_meaning(params: PoolingParams, task: str) -> None:
    meaningless = {
        "embed": ("use_activation",),
        "encode": ("use_activation", "pooling", "dimensions"),
    }.get(task, ("pooling", "normalize", "dimensions"))
    for name in meaningless:
        value = getattr(params, name)
        if value is not None:
            raise InvalidArgumentError(name, value, f"None with the task {task!r}")
