"""Scripts for this field's usual offline API: the names that they import are here, and their calls are accepted."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, LLMEngine, SamplingParams, StructuredOutputsParams, TokensPrompt

NAMES = {
    "nbengine": (
        "LLM",
        "LLMEngine",
        "AsyncLLMEngine",
        "EngineArgs",
        "AsyncEngineArgs",
        "SamplingParams",
        "PoolingParams",
        "RequestOutput",
        "CompletionOutput",
        "PoolingRequestOutput",
        "EmbeddingRequestOutput",
        "ClassificationRequestOutput",
        "ScoringRequestOutput",
        "PromptType",
        "TextPrompt",
        "TokensPrompt",
    ),
    "nbengine.inputs": ("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt"),
    "nbengine.sampling_params": ("SamplingParams", "StructuredOutputsParams", "RequestOutputKind"),
    "nbengine.outputs": ("RequestOutput", "CompletionOutput", "Logprob"),
}
SELF = object()
PROMPTS = ["Hello, my name is", "The capital of France is"]
CONVERSATION = [{"role": "user", "content": "Hello"}]
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (LLM, (), {"model": "m"}),
    (LLM, ("m",), {"max_model_len": 1024, "enforce_eager": True, "tensor_parallel_size": 1}),
    (LLM, (), {"model": "m", "dtype": "bfloat16", "gpu_memory_utilization": 0.5, "seed": 1}),
    (
        LLM,
        (),
        {"model": "m", "enable_prefix_caching": True, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    ),
    (LLM, (), {"model": "m", "trust_remote_code": True, "hf_overrides": {}, "quantization": None}),
    (LLM.generate, (SELF, PROMPTS), {}),
    (LLM.generate, (SELF, PROMPTS, SamplingParams(n=2)), {}),
    (LLM.generate, (SELF,), {"prompts": PROMPTS, "sampling_params": SamplingParams(), "use_tqdm": False}),
    (LLM.generate, (SELF, PROMPTS, [SamplingParams()] * 2), {"priority": [0, 1]}),
    (LLM.generate, (SELF, {"prompt_token_ids": [1, 2]}, SamplingParams()), {}),
    (LLM.generate, (SELF, TokensPrompt(prompt_token_ids=[1, 2])), {}),
    (LLM.chat, (SELF, CONVERSATION), {}),
    (LLM.chat, (SELF, [CONVERSATION, CONVERSATION], SamplingParams()), {"use_tqdm": True}),
    (
        LLM.chat,
        (SELF,),
        {"messages": CONVERSATION, "sampling_params": SamplingParams(), "chat_template": "x"},
    ),
    (LLM.embed, (SELF, PROMPTS), {}),
    (LLM.encode, (SELF, PROMPTS), {"pooling_task": "embed"}),
    (LLM.classify, (SELF, PROMPTS), {}),
    (LLM.score, (SELF, PROMPTS[0], PROMPTS), {}),
    (LLMEngine.add_request, (SELF, "0", "a prompt", SamplingParams()), {}),
    (LLMEngine.abort_request, (SELF, ["0"]), {}),
    (AsyncLLM.generate, (SELF, "a prompt", SamplingParams(), "request-0"), {}),
    (
        AsyncLLM.generate,
        (SELF,),
        {"request_id": "0", "prompt": "a prompt", "sampling_params": SamplingParams(), "priority": 0},
    ),
    (AsyncLLM.abort, (SELF, "0"), {}),
]


@pytest.mark.parametrize("module", NAMES)
def test_the_names_that_scripts_import_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize(("function", "arguments", "keywords"), CALLS)
def test_a_call_as_scripts_write_it_is_accepted(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    bound = inspect.signature(function).bind(*arguments, **keywords)
    # Each has a parameter of its own: none is taken in by a `**options` that may refuse it later.
    assert keywords.items() <= bound.arguments.items()


@pytest.mark.parametrize(
    "keywords",
    [
        {"temperature": 0.8, "top_p": 0.95},
        {"n": 4, "seed": 1, "max_tokens": 64, "stop": ["\n"], "stop_token_ids": [0]},
        {"logprobs": 5, "prompt_logprobs": 1, "top_k": -1, "repetition_penalty": 1.1},
        {"bad_words": ["bad"], "logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2], "min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        {"structured_outputs": StructuredOutputsParams(choice=["Positive", "Negative"])},
        {"structured_outputs": StructuredOutputsParams(regex=r"\w+@\w+\.com\n"), "stop": ["\n"]},
        {"structured_outputs": StructuredOutputsParams(grammar='root ::= "a"')},
    ],
)
def test_sampling_parameters_as_scripts_write_them_are_accepted(keywords: dict[str, Any]) -> None:
    params = SamplingParams(**keywords)
    assert all(getattr(params, name) == value for name, value in keywords.items() if name != "top_k")
