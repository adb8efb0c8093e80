"""Give the engine's memory back while it is not needed, and take it again.

python examples/scripts/sleep_mode.py
"""

from __future__ import annotations

from nbengine import LLM, SamplingParams

PROMPT = "The largest city of Japan is"


def main() -> None:
    """Generate, sleep, wake up, and generate the same again."""
    llm = LLM(model="smollm2-135m", max_model_len=1024, enable_sleep_mode=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=12)

    (before,) = llm.generate(PROMPT, sampling_params)
    print(f"before: {before.outputs[0].text!r}")

    llm.sleep(level=1)
    print("asleep: the KV cache is given back, the weights lie in ordinary memory")

    llm.wake_up()
    (after,) = llm.generate(PROMPT, sampling_params)
    print(f"after:  {after.outputs[0].text!r}")
    print("the same" if before.outputs[0].token_ids == after.outputs[0].token_ids else "different")


if __name__ == "__main__":
    main()
