"""An import loads nothing heavy, and the exported names are the documented ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbengine

PUBLIC = {
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "LLMEngine",
    "EngineArgs",
    "AsyncEngineArgs",
    "EmbedsPrompt",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "UnreadableCall",
    "SamplingParams",
    "PoolingParams",
    "RequestOutputKind",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "PromptProgress",
    "RequestMetrics",
    "PoolingOutput",
    "PoolingRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "EngineStats",
    "IncompleteOutputError",
    "SchedulerStats",
    "NBEngineError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "NotSupportedError",
    "ModelNotFoundError",
    "ModelLoadError",
    "RequestError",
    "UtilityError",
    "EngineStartError",
    "EngineDeadError",
    "EngineStalledError",
    "LeaseExpiredError",
    "FitReport",
    "StatLogger",
    "LoggingStatLogger",
    "RequestLog",
    "RequestTracer",
    "fit",
    "register_model",
    "prompts",
    "runs",
    "load_ipython_extension",
    "unload_ipython_extension",
}


def run_python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip()


def test_the_exported_names_are_the_documented_ones() -> None:
    assert set(nbengine.__all__) == PUBLIC
    assert all(hasattr(nbengine, name) for name in PUBLIC)


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "zmq", "IPython", "numpy", "msgspec", "asyncio")
    code = f"import nbengine, sys; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_a_host_imports_nothing_of_models() -> None:
    wanted = ("torch", "numpy", "nbengine.models", "nbengine.frontend", "transformers")
    code = f"import nbengine.engine.host.main, sys; print([m for m in {wanted} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_the_whole_frontend_is_free_of_torch(model_directory: Path) -> None:
    code = f"""
import sys
from nbengine import LLM, AsyncLLM, EmbeddingRequestOutput, LLMEngine, PoolingParams, SamplingParams
import nbengine.client.sync_mp, nbengine.client.async_mp, nbengine.client.engines.directory, nbengine.cli
from nbengine import runs
from nbengine.config import EngineConfig, ModelConfig
from nbengine.frontend.text.chat import render_chat
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.frontend.text.tokenizer import load_tokenizer
model = ModelConfig(model="x", directory={str(model_directory)!r})
tokenizer = load_tokenizer(model)
processor = InputProcessor(EngineConfig(model=model), tokenizer, TextEncoder(tokenizer.backend_tokenizer), 64, ("generate", "embed"))
prompt = render_chat(tokenizer, [{{"role": "user", "content": "hi"}}])
processor.process_inputs("r", prompt, SamplingParams())
processor.process_inputs("r", prompt, PoolingParams(task="embed", truncate_prompt_tokens=2))
print("torch" in sys.modules)
"""
    assert run_python(code) == "False"
