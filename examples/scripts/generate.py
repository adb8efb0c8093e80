"""Complete several prompts in one batch.

python examples/scripts/generate.py
"""

from __future__ import annotations

from nbengine import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7)


def main() -> None:
    """Print each prompt with its completion, in the order of the prompts."""
    llm = LLM(model="smollm2-135m", max_model_len=1024)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        completion = output.outputs[0]
        print(f"prompt:     {output.prompt!r}")
        print(f"completion: {completion.text!r}  [{completion.finish_reason}]")
        print("-" * 60)


if __name__ == "__main__":
    main()
