"""Time OutputProcessor.process_outputs: N requests, one token each a step, deltas into collectors.

    python benchmarks/bench_output_processor.py [--json PATH]

The shape is that of the peer's benchmark: prompts of 128 tokens, 20 steps of warm-up, 200 timed ones, three
times over, the tokens of a real text. The rows with other settings show what a part costs.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

from common import parser, report
from tokenizers import Tokenizer

from nbengine.config import ModelConfig
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import RequestOutputKind, SamplingParams

PROMPT_TOKENS = 128
WARMUP_STEPS = 20
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"

SETTINGS: dict[str, dict[str, Any]] = {
    "deltas": {},
    "cumulative": {"output_kind": RequestOutputKind.CUMULATIVE},
    "a stop string": {"stop": ["ZZZZ"]},
    "no detokenization": {"detokenize": False},
    "5 log probabilities": {"logprobs": 5},
}


class Streams:
    """The requests of one setting and the tokens that they are going to get."""

    def __init__(
        self, tokenizer: Tokenizer, ids: list[int], requests: int, steps: int, options: dict[str, Any]
    ) -> None:
        self.processor = OutputProcessor(TextDecoding(tokenizer))
        self.queues: list[RequestOutputCollector] = []
        self.tokens: list[tuple[str, list[int]]] = []
        self.text = [""] * requests
        self.logprobs: int | None = options.get("logprobs")
        options = {"output_kind": RequestOutputKind.DELTA, **options}
        for index in range(requests):
            begin = index * 37 % (len(ids) - PROMPT_TOKENS - steps)
            params = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True, **options)
            request_id = f"cmpl-{index:032x}"
            prompt, rest = ids[begin : begin + PROMPT_TOKENS], ids[begin + PROMPT_TOKENS :]
            request = EngineCoreRequest(
                request_id, prompt, params, arrival_time=time.monotonic(), external_req_id=f"external-{index}"
            )
            queue = RequestOutputCollector(params.output_kind, f"external-{index}", request_id)
            self.processor.add_request(request, None, queue)
            self.queues.append(queue)
            self.tokens.append((request_id, rest[:steps]))

    def step(self, index: int) -> int:
        """Process one token of every request and read the outputs; return the nanoseconds of the former."""
        outputs = [EngineCoreOutput(request_id, [tokens[index]]) for request_id, tokens in self.tokens]
        if self.logprobs is not None:
            for output in outputs:
                (token_id,) = output.new_token_ids
                row = [token_id, *range(token_id, token_id + self.logprobs)]
                output.new_logprobs = LogprobsLists([row], [[-1.0] * len(row)], [1])
        start = time.perf_counter_ns()
        self.processor.process_outputs(outputs)
        elapsed = time.perf_counter_ns() - start
        for number, queue in enumerate(self.queues):
            output = queue.get_nowait()
            if output is not None:
                self.text[number] += output.outputs[0].text
        return elapsed


def measure(
    tokenizer: Tokenizer, ids: list[int], requests: int, steps: int, rounds: int, options: dict[str, Any]
) -> list[float]:
    """Return the microseconds of every timed step."""
    times = []
    for _ in range(rounds):
        streams = Streams(tokenizer, ids, requests, WARMUP_STEPS + steps, options)
        gc.collect()
        gc.freeze()
        elapsed = [streams.step(index) for index in range(WARMUP_STEPS + steps)]
        gc.unfreeze()
        times += [nanoseconds / 1e3 for nanoseconds in elapsed[WARMUP_STEPS:]]
        if not options and not tokenizer.decode(streams.tokens[-1][1]).startswith(streams.text[-1]):
            raise SystemExit("the deltas do not join to the text of the tokens")
    return times


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments.set_defaults(rounds=3)
    options = arguments.parse_args()
    tokenizer = load_tokenizer(resolve_model(ModelConfig("smollm2-135m"))).backend_tokenizer
    ids = tokenizer.encode(TEXT.read_text() * 10).ids
    rows = []
    for requests in options.requests:
        for setting in options.settings:
            times = measure(tokenizer, ids, requests, options.steps, options.rounds, SETTINGS[setting])
            median = statistics.median(times)
            rows.append(
                {
                    "requests": requests,
                    "setting": setting,
                    "median_us": median,
                    "p90_us": statistics.quantiles(times, n=10)[-1],
                    "us_per_request": median / requests,
                }
            )
    report("output_processor", rows, options.json)


if __name__ == "__main__":
    main()
