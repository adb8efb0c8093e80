"""Give the model embeddings in place of tokens: its own, and halfway between two prompts.

python examples/scripts/prompt_embeddings.py
"""

from __future__ import annotations

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from nbengine import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The capital of Spain is"]


def embedding_table(llm: LLM) -> np.ndarray:
    """Read the model's own embeddings, [vocabulary, hidden size], from its file."""
    reader = GGUFReader(llm.llm_engine.config.model.weights[0])
    table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return dequantize(table.data, table.tensor_type)


def main() -> None:
    """Print completions of tokens, of the same as embeddings, and of a mixture."""
    llm = LLM(model="smollm2-135m", dtype="float32", max_model_len=256)
    sampling_params = SamplingParams(temperature=0, max_tokens=12)
    tokenizer = llm.get_tokenizer()
    table = embedding_table(llm)

    token_ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    embeds = [table[ids] for ids in token_ids]
    from_tokens = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    from_embeds = llm.generate(
        [{"prompt_embeds": rows, "prompt": prompt} for rows, prompt in zip(embeds, PROMPTS, strict=True)],
        sampling_params,
        use_tqdm=False,
    )
    for tokens, rows in zip(from_tokens, from_embeds, strict=True):
        print(f"{rows.prompt!r} -> {rows.outputs[0].text!r}")
        print(f"  the same as from its tokens: {rows.outputs[0].text == tokens.outputs[0].text}")

    (mixture,) = llm.generate({"prompt_embeds": sum(embeds) / 2}, sampling_params, use_tqdm=False)
    print(f"halfway between them -> {mixture.outputs[0].text!r}")


if __name__ == "__main__":
    main()
