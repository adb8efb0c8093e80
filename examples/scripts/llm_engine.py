"""Drive the engine step by step: requests are added while others run, each with its own parameters.

python examples/scripts/llm_engine.py
"""

from __future__ import annotations

from nbengine import EngineArgs, LLMEngine, RequestOutput, SamplingParams

WORK = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=16)),
    (
        "To be or not to be,",
        SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=16, seed=1),
    ),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=16, seed=2)),
    ("The first three prime numbers are", SamplingParams(temperature=0.0, max_tokens=16, stop=["\n"])),
]


def show(output: RequestOutput, step: int) -> None:
    """Print a finished request."""
    for completion in output.outputs:
        print(
            f"step {step:2}, request {output.request_id}.{completion.index}: {output.prompt + completion.text!r}"
        )


def main() -> None:
    """Add a request every other step and take a step until nothing is left."""
    engine = LLMEngine.from_engine_args(EngineArgs(model="smollm2-135m", max_model_len=1024))
    waiting = list(WORK)
    step = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 2 == 0:
            prompt, sampling_params = waiting.pop(0)
            engine.add_request(str(len(WORK) - len(waiting)), prompt, sampling_params)
        for output in engine.step():
            if output.finished:
                show(output, step)
        step += 1
    print(f"{len(WORK)} requests in {step} steps")


if __name__ == "__main__":
    main()
