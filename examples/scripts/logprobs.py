"""Show how likely the model finds what it writes, what it might have written, and what it was given.

python examples/scripts/logprobs.py
"""

from __future__ import annotations

from math import exp

from nbengine import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    """Print the probability of each token of the answer and of the prompt."""
    llm = LLM(model="smollm2-135m", max_model_len=1024)
    (output,) = llm.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=0)
    )

    completion = output.outputs[0]
    print("generated token      probability   the most likely ones")
    for token_id, choices in zip(completion.token_ids, completion.logprobs, strict=True):
        chosen = choices[token_id]
        best = sorted(choices.values(), key=lambda choice: choice.rank)[:3]
        others = ", ".join(f"{choice.decoded_token!r} {exp(choice.logprob):.3f}" for choice in best)
        print(f"{chosen.decoded_token!r:20} {exp(chosen.logprob):8.3f}      {others}")
    print(f"the sum of the log probabilities is {completion.cumulative_logprob:.3f}")

    print("\nprompt token         probability   rank")
    # The first token has nothing before it from which to predict it.
    for token_id, choices in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        read = choices[token_id]
        print(f"{read.decoded_token!r:20} {exp(read.logprob):8.3f}      {read.rank}")


if __name__ == "__main__":
    main()
