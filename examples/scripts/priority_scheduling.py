"""Let urgent requests overtake others when there is not room for all at once.

python examples/scripts/priority_scheduling.py
"""

from __future__ import annotations

from nbengine import LLM, SamplingParams

JOBS = [("summary of the week", 2), ("newsletter", 2), ("reply to a customer", 0), ("translation", 1)]


def main() -> None:
    """Run the jobs one at a time, so that their order shows, and print them as they ended."""
    llm = LLM(model="smollm2-135m", max_model_len=1024, max_num_seqs=1, scheduling_policy="priority")
    sampling_params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(
        [f"A {name}:" for name, _ in JOBS], sampling_params, priority=[priority for _, priority in JOBS]
    )
    done = sorted(zip(JOBS, outputs, strict=True), key=lambda pair: pair[1].metrics.finished_time)
    for position, ((name, priority), output) in enumerate(done, 1):
        waited = output.metrics.first_token_time - output.metrics.arrival_time
        print(f"{position}. priority {priority}, {name}: first token after {waited:.2f} s")


if __name__ == "__main__":
    main()
