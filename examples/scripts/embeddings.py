"""Make a vector of each sentence, and find the sentences that are most alike.

python examples/scripts/embeddings.py
"""

from __future__ import annotations

import numpy as np

from nbengine import LLM

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Shares of the company fell after the report.",
    "Investors sold the stock when earnings came out.",
    "She plays the violin in an orchestra.",
    "He is a musician who performs with a symphony.",
]


def main() -> None:
    """Print the beginning of each vector, and each sentence's nearest neighbour."""
    llm = LLM(model="all-minilm-l6-v2")
    outputs = llm.embed(SENTENCES)
    for output in outputs:
        embedding = output.outputs.embedding
        beginning = ", ".join(f"{number:.3f}" for number in embedding[:4])
        print(f"[{beginning}, ...] ({len(embedding)} dimensions): {output.prompt}")

    vectors = np.array([output.outputs.embedding for output in outputs])
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1)
    for index, nearest in enumerate(cosines.argmax(axis=1)):
        print(f"{cosines[index, nearest]:.2f}  {SENTENCES[index]} -> {SENTENCES[nearest]}")


if __name__ == "__main__":
    main()
