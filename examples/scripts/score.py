"""Rank documents by how well they answer a question.

python examples/scripts/score.py
"""

from __future__ import annotations

from nbengine import LLM

QUESTION = "What is the capital of France?"
DOCUMENTS = [
    "The Great Wall of China is thousands of kilometres long.",
    "Paris is the capital and largest city of France.",
    "Bread rises because yeast makes gas.",
    "France is a country in western Europe.",
]


def main() -> None:
    """Print the documents, the best one first."""
    llm = LLM(model="all-minilm-l6-v2")
    outputs = llm.score(QUESTION, DOCUMENTS)
    print(QUESTION)
    ranked = sorted(zip(outputs, DOCUMENTS, strict=True), key=lambda pair: -pair[0].outputs.score)
    for output, document in ranked:
        print(f"{output.outputs.score:6.3f}  {document}")


if __name__ == "__main__":
    main()
