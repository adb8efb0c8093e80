"""Give the engine's memory back while it is not needed, and take it again.

python examples/scripts/sleep_mode.py
"""

from __future__ import annotations

import psutil

from nbengine import LLM, SamplingParams

PROMPT = "The largest city of Japan is"


def show_memory(llm: LLM, when: str) -> None:
    """Print how much memory the engine's process holds."""
    process = psutil.Process(llm.llm_engine.ready.pid)
    print(f"{when}: the engine holds {process.memory_info().rss >> 20} MiB")


def main() -> None:
    """Generate, sleep, wake up, and generate the same again."""
    llm = LLM(model="smollm2-135m", max_model_len=1024, enable_sleep_mode=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=12)
    (before,) = llm.generate(PROMPT, sampling_params)
    print(f"{PROMPT}{before.outputs[0].text}")
    show_memory(llm, "awake")

    # Level 1 would keep the weights in main memory; level 2 reads them again from their files.
    llm.sleep(level=2)
    show_memory(llm, "asleep")
    llm.wake_up()

    (after,) = llm.generate(PROMPT, sampling_params)
    print(f"{PROMPT}{after.outputs[0].text}")
    # The weights of a GGUF file are mapped: they take memory from the first step on.
    show_memory(llm, "awake again")
    print("the same" if before.outputs[0].token_ids == after.outputs[0].token_ids else "different")


if __name__ == "__main__":
    main()
