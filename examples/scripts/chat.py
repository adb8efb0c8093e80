"""Answer one conversation, then several in one batch.

python examples/scripts/chat.py
"""

from __future__ import annotations

from nbengine import LLM, SamplingParams

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant who answers in one short sentence."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help you?"},
    {"role": "user", "content": "What is the capital of France?"},
]
QUESTIONS = ["What is 2 + 3?", "What is the opposite of hot?", "Say good morning in French."]


def main() -> None:
    """Print the answers."""
    llm = LLM(model="smollm2-135m", max_model_len=1024)
    sampling_params = SamplingParams(temperature=0, max_tokens=32)

    outputs = llm.chat(CONVERSATION, sampling_params)
    print(f"{CONVERSATION[-1]['content']} -> {outputs[0].outputs[0].text.strip()}")

    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(conversations, sampling_params), strict=True):
        print(f"{question} -> {output.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
