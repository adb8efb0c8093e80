"""Measure structured outputs: compiling grammars and building masks, in llguidance and, if there, xgrammar.

    python benchmarks/bench_structured.py [--json PATH]

34 JSON schemas of varied shape, a regular expression, a choice and a Lark grammar, in the default model's
vocabulary of 49,152 tokens. Compiling: one thread, nothing cached; ours goes through the checking process.
Masks: batches of requests follow the schemas' examples token by token; microseconds a request of a step,
after one walk through all of them. Keywords: the number of schemas that forbid an instance and are enforced,
refused with an error, or ignored in silence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from common import parser, report
from tokenizers import Tokenizer

from nbengine.config import ModelConfig
from nbengine.engine.core.structured import StructuredOutputManager
from nbengine.errors import RequestError
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams

CASES = json.loads((Path(__file__).parents[1] / "tests/data/json_schemas.json").read_text(encoding="utf-8"))
VOCAB_SIZE = 49_152
EOS = 2
BATCHES = (1, 8, 32)
OTHERS = [
    ("regex", r"[a-z]{3,9}@[a-z]{3,9}\.(com|org)", "someone@example.org"),
    ("choice", ["positive", "negative", "neutral"], "neutral"),
    ("grammar", 'start: "(" start ")" | /[0-9]+/\n', "((2024))"),
]
FORBIDDEN: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    ({"not": {"type": "string"}}, "a"),
    ({"if": {"type": "integer"}, "then": {"minimum": 5}}, 1),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}}, [1]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, {}),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, {"A": 1}),
    ({"type": "integer", "multipleOf": 5}, 7),
    ({"type": "string", "pattern": "^[a-z]*$", "maxLength": 3}, "abcd"),
    ({"type": "string", "format": "ipv4"}, "1.2.3"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 1.5),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 3),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 9),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, {"b": 1}),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "abcd"),
]
"""The schemas, each with an instance that it forbids."""


class Library(Protocol):
    """The operations of a library that are measured."""

    def compile(self, kind: str, value: Any) -> Any:
        """Compile without a cache; whatever is raised is a refusal."""

    def start(self, compiled: Any) -> Any:
        """Make a matcher for one request."""

    def fill(self, matchers: Sequence[Any]) -> np.ndarray:
        """Build the masks of a step."""

    def accept(self, matcher: Any, token_id: int) -> bool:
        """Advance a matcher."""

    def close(self) -> None:
        """Release what is held."""


class Ours:
    """The library llguidance, as the engine uses it."""

    def __init__(self, config: ModelConfig) -> None:
        self._manager = StructuredOutputManager(config, VOCAB_SIZE, max_num_seqs=max(BATCHES))
        self.compile("regex", "a")

    def compile(self, kind: str, value: Any) -> Any:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: value}), eos_token_id=EOS)
        self._manager._cache.clear()
        self._manager.compile(params)
        return params

    def start(self, compiled: Any) -> Any:
        return self._manager.compile(compiled)

    def fill(self, matchers: Sequence[Any]) -> np.ndarray:
        return self._manager.fill_bitmasks(matchers)

    def accept(self, matcher: Any, token_id: int) -> bool:
        return matcher.accept_tokens([token_id])

    def close(self) -> None:
        self._manager.shutdown()


class XGrammar:
    """The library xgrammar with its defaults, but that it may not use more threads than we do and that extra
    properties are allowed."""

    def __init__(self, config: ModelConfig) -> None:
        import torch
        import xgrammar

        self._library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(
            load_tokenizer(config), vocab_size=VOCAB_SIZE, stop_token_ids=[EOS]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()
        self._mask = torch.zeros((max(BATCHES), VOCAB_SIZE // 32), dtype=torch.int32)

    def compile(self, kind: str, value: Any) -> Any:
        match kind:
            case "json":
                return self._compiler.compile_json_schema(json.dumps(value), strict_mode=False)
            case "regex":
                return self._compiler.compile_regex(value)
            case "choice":
                return self._compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, value)))
            case _:
                return self._compiler.compile_lark(value)

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def fill(self, matchers: Sequence[Any]) -> np.ndarray:
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(self._mask)
        else:
            self._batch.batch_fill_next_token_bitmask(list(matchers), self._mask)
        return self._mask.numpy()[: len(matchers)]

    def accept(self, matcher: Any, token_id: int) -> bool:
        return matcher.accept_token(token_id)

    def close(self) -> None:
        pass


def milliseconds(function: Any, *arguments: Any) -> tuple[Any, float]:
    started = perf_counter()
    result = function(*arguments)
    return result, (perf_counter() - started) * 1e3


def compile_all(
    library: Library, texts: list[tuple[str, Any, str]]
) -> tuple[list[float], list[Any], list[str]]:
    """Return the milliseconds of each, the result (None where it was refused), and the refusals."""
    times, compiled, refused = [], [], []
    for kind, value, _ in texts:
        try:
            result, time = milliseconds(library.compile, kind, value)
            times.append(time)
        except (RequestError, RuntimeError, ValueError) as error:
            result = None
            refused.append(str(error))
        compiled.append(result)
    return times, compiled, refused


def walk(library: Library, compiled: Any, token_ids: Sequence[int]) -> bool:
    """Return whether a text is allowed, token by token."""
    matcher = library.start(compiled)
    for token_id in token_ids:
        (mask,) = library.fill([matcher])
        if not mask[token_id >> 5] >> (token_id & 31) & 1:
            return False
        library.accept(matcher, token_id)
    return True


def steps(library: Library, texts: list[tuple[Any, list[int]]], batch: int) -> Iterator[float]:
    """Yield the microseconds a request of every step in which `batch` requests go through all texts; one that
    ends is replaced by the next."""
    queue = iter(texts * -(-4 * batch // len(texts)) if batch > 1 else texts)
    running: list[tuple[Any, Iterator[int]]] = []
    while True:
        for compiled, token_ids in itertools.islice(queue, batch - len(running)):
            running.append((library.start(compiled), iter(token_ids)))
        if len(running) < batch:
            return
        matchers = [matcher for matcher, _ in running]
        _, time = milliseconds(library.fill, matchers)
        yield time * 1e3 / batch
        going = []
        for matcher, token_ids in running:
            token_id = next(token_ids, None)
            if token_id is not None and library.accept(matcher, token_id):
                going.append((matcher, token_ids))
        running = going


def keywords(library: Library, tokenizer: Tokenizer) -> str:
    enforced = refused = ignored = 0
    for schema, instance in FORBIDDEN:
        try:
            compiled = library.compile("json", schema)
        except (RequestError, RuntimeError, ValueError):
            refused += 1
            continue
        if walk(library, compiled, [*tokenizer.encode(json.dumps(instance)).ids, EOS]):
            ignored += 1
        else:
            enforced += 1
    return f"{enforced} / {refused} / {ignored}"


def size_of(distributions: Sequence[str]) -> float:
    """Return the MiB of the files of installed packages."""
    files = [path for name in distributions for path in importlib.metadata.files(name) or ()]
    return sum(path.locate().stat().st_size for path in files if path.locate().exists()) / (1 << 20)


def measure(name: str, kind: Any, distributions: Sequence[str], rounds: int) -> dict[str, Any]:
    config = resolve_model(ModelConfig("smollm2-135m"))
    tokenizer = Tokenizer.from_file(str(Path(config.directory) / "tokenizer.json"))
    library, setup = milliseconds(kind, config)
    texts = [
        ("json", case["schema"], json.dumps(case["example"], ensure_ascii=False)) for case in CASES.values()
    ]
    times, compiled, refused = compile_all(library, [*texts, *OTHERS])
    pairs = [
        (grammar, tokenizer.encode(text).ids)
        for grammar, (_, _, text) in zip(compiled, [*texts, *OTHERS], strict=True)
        if grammar is not None
    ]
    allowed = [(grammar, token_ids) for grammar, token_ids in pairs if walk(library, grammar, token_ids)]
    row: dict[str, Any] = {
        "library": f"{name} {importlib.metadata.version(distributions[0])}",
        "installed MiB": round(size_of(distributions), 1),
        "set-up ms": round(setup),
        "compile ms median / worst": f"{statistics.median(times):.2f} / {max(times):.1f}",
        "refused": len(refused),
        "valid text forbidden": len(pairs) - len(allowed),
        "keywords enforced / refused / ignored": keywords(library, tokenizer),
    }
    for batch in BATCHES:
        figures = sorted(figure for _ in range(rounds) for figure in steps(library, allowed, batch))
        median, mean = statistics.median(figures), statistics.mean(figures)
        tail = figures[int(0.99 * len(figures))]
        row[f"mask µs, batch {batch}: median / mean / p99 / worst"] = (
            f"{median:.1f} / {mean:.1f} / {tail:.0f} / {figures[-1]:.0f}"
        )
    library.close()
    return row


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rows = [measure("llguidance", Ours, ["llguidance"], arguments.rounds)]
    if importlib.util.find_spec("xgrammar") is not None:
        rows.append(measure("xgrammar", XGrammar, ["xgrammar", "apache-tvm-ffi"], arguments.rounds))
    report("structured outputs", rows, arguments.json)


if __name__ == "__main__":
    main()
