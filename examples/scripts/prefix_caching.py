"""Ask questions about one long text: after the first, the text is found in the prefix cache.

python examples/scripts/prefix_caching.py
"""

from __future__ import annotations

import time

from nbengine import LLM, SamplingParams

TABLE = "Here is a table of the members of a chess club, with their towns and ratings.\n" + "\n".join(
    f"| {number} | Member {number:02} | Town {number * 7 % 23} | {1200 + number * 37 % 900} |"
    for number in range(1, 41)
)
QUESTIONS = [
    "Which town is Member 03 from?",
    "What is the rating of Member 17?",
    "How many members are there?",
]


def ask(llm: LLM, question: str) -> float:
    """Answer one question about the table, print how much of the prompt was found, and return the seconds."""
    start = time.perf_counter()
    (output,) = llm.generate(
        f"{TABLE}\nQuestion: {question}\nAnswer:", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    seconds = time.perf_counter() - start
    print(
        f"{question:35} {seconds:5.2f} s, {output.num_cached_tokens:4} of {len(output.prompt_token_ids)} "
        f"prompt tokens from the cache: {output.outputs[0].text.strip().splitlines()[0]!r}"
    )
    return seconds


def main() -> None:
    """Compare the first question with those that follow it."""
    llm = LLM(model="smollm2-135m", max_model_len=2048, enable_prefix_caching=True)
    first, *others = [ask(llm, question) for question in QUESTIONS]
    print(f"the first took {first / min(others):.1f} times as long as the fastest of the others")

    llm.reset_prefix_cache()
    print("after a reset of the cache:")
    ask(llm, QUESTIONS[0])


if __name__ == "__main__":
    main()
