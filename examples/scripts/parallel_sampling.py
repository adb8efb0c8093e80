"""Make several completions of one prompt: its keys and values are computed once and shared.

python examples/scripts/parallel_sampling.py
"""

from __future__ import annotations

from nbengine import LLM, SamplingParams

PROMPT = "Write the first sentence of a story about a lighthouse keeper. The story begins:"


def main() -> None:
    """Print the completions of one prompt, numbered."""
    llm = LLM(model="smollm2-135m", max_model_len=1024)
    sampling_params = SamplingParams(n=4, temperature=1.0, top_p=0.95, max_tokens=24, seed=1)
    (output,) = llm.generate(PROMPT, sampling_params)
    for completion in output.outputs:
        print(f"[{completion.index}] {completion.text.strip()!r}")
    print(f"{len(output.outputs)} completions, {len({c.text for c in output.outputs})} of them different")


if __name__ == "__main__":
    main()
