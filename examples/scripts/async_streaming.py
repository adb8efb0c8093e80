"""Stream several requests at once, each as it comes.

python examples/scripts/async_streaming.py
"""

from __future__ import annotations

import asyncio

from nbengine import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is"]


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    """Print a request's text piece by piece and return all of it."""
    sampling_params = SamplingParams(
        max_tokens=24, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    text = ""
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            text += completion.text
            print(f"[{request_id}] {completion.text!r}", flush=True)
        if output.finished:
            print(f"[{request_id}] finished: {output.outputs[0].finish_reason}")
    return text


async def main() -> None:
    """Read all streams at the same time, then print what each came to."""
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2-135m", max_model_len=1024)) as engine:
        texts = await asyncio.gather(
            *[stream(engine, prompt, f"stream-{number}") for number, prompt in enumerate(PROMPTS, 1)]
        )
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"{prompt}{text}")


if __name__ == "__main__":
    asyncio.run(main())
