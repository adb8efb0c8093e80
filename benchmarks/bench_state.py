"""Measure what the kinds of state are worth: checkpoints of hybrid models, and windows that give blocks back.

    python benchmarks/bench_state.py [--json PATH]

The first table is the time to the first token of a 1,000-token prompt on a hybrid model in the shape of Qwen3.5 (random
weights, 12 layers, 9 of them recurrent), alone in an engine in this process: a prompt that nothing is known of, the
same prompt with another token near its end, after three quarters, in its middle or in its first third, with yet another
one at the same place, and the same once more. The sides alternate, and every round has a prompt of its own; the ratio is
the median of those of the rounds. Beside it stand the tokens that are computed, and those that a model computes whose
layers all have full attention, of which none can be left out: these counts do not depend on the machine, and `--count`
gives them alone, with a small model.

The second table counts and does not time: the bytes of the blocks that one request of 16,384 tokens holds at its end,
and at most on its way there, in steps of 512 tokens; the models have the layers and windows of known ones and are
narrow, which changes the bytes of both sides alike. The opponent is the same model with full attention in all layers.
What the windows say is that a layer with a window keeps as many tokens as this, and any other layer all of them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from common import median_ratio, parser, report
from tokenizers import Tokenizer, models

from nbengine import LLM, SamplingParams

PROMPT = 1000
EDITS = {
    "20 before the end": PROMPT - 20,
    "after three quarters": PROMPT * 3 // 4,
    "in the middle": PROMPT // 2,
    "after 300": 300,
}
LENGTH, STEP, BLOCK_SIZE = 16_384, 512, 16
HYBRID: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 2048,
}
SMALL = {
    **HYBRID,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
"""Settings for a model with states as heavy beside keys and values as those of `HYBRID`, which computes less."""
NARROW: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
FULL, WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """A model with windows: the beginning of transformers' class names, and its settings."""

    name: str
    kind: str
    window: int
    layers: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def share(self) -> float:
        """Return the part of the bytes of full attention that the windows leave."""
        kept = sum(self.window if layer == WINDOW else LENGTH for layer in self.layers)
        return kept / (len(self.layers) * LENGTH)


MODELS = [
    Windows(
        "Gemma 3 4B: 29 of 34 layers, 1,024 tokens",
        "Gemma3",
        1024,
        tuple(FULL if (index + 1) % 6 == 0 else WINDOW for index in range(34)),
        {},
    ),
    Windows(
        "gpt-oss 20B: 12 of 24 layers, 128 tokens",
        "GptOss",
        128,
        (WINDOW, FULL) * 12,
        {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    Windows("Mistral 7B v0.1: 32 layers, 4,096 tokens", "Mistral", 4096, (WINDOW,) * 32, {}),
]


def save(kind: str, settings: dict[str, Any], directory: Path) -> None:
    """Save a random model, with a tokenizer that nobody asks."""
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model_class(model_class.config_class(**settings)).save_pretrained(directory)
    words = {str(index): index for index in range(settings["vocab_size"])}
    Tokenizer(models.WordLevel(words, "0")).save(str(directory / "tokenizer.json"))


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Return the milliseconds until the first token after a prompt, and how many of its tokens were found."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return (time.perf_counter() - start) * 1e3, output.num_cached_tokens or 0


def edited_prompts(rounds: int, *, only_count: bool) -> list[dict[str, Any]]:
    """Measure the prompts on the hybrid model."""
    settings, num_bytes = (SMALL, 171 << 20) if only_count else (HYBRID, 512 << 20)
    with tempfile.TemporaryDirectory() as directory:
        save("Qwen3_5", settings, Path(directory))
        with LLM(
            directory,
            multiprocess=False,
            dtype="float32",
            max_num_seqs=8,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=num_bytes,
        ) as llm:
            return _edited_rows(llm, 1 if only_count else 1 + rounds)


def _cases() -> list[tuple[str, int | None, int]]:
    """Return name, place of the other token and how much it differs, of all prompts of a round."""
    cases: list[tuple[str, int | None, int]] = [("cold", None, 0)]
    for name, place in EDITS.items():
        cases.append((f"another token {name}", place, 1))
        cases.append((f"yet another token {name}", place, 2))
    return [*cases, ("the same again", None, 0)]


def _edited_rows(llm: LLM, rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    vocab_size = HYBRID["vocab_size"]
    times: dict[str, list[float]] = {}
    computed: dict[str, int] = {}
    for index in range(rounds):
        prompt = torch.randint(vocab_size, (PROMPT,), generator=generator).tolist()
        for case, place, difference in _cases():
            edited = list(prompt)
            if place is not None:
                edited[place] = (edited[place] + difference) % vocab_size
            milliseconds, found = first_token(llm, edited)
            computed[case] = PROMPT - found
            # The first round warms up.
            if index or rounds == 1:
                times.setdefault(case, []).append(milliseconds)
    return [
        {
            "1,000-token prompt": case,
            "computed tokens": computed[case],
            "full attention": _with_full_attention(case, place),
            "first token ms": statistics.median(times[case]),
            "min": min(times[case]),
            "against cold (median ratio)": median_ratio(times[case], times["cold"]),
            "the least": _with_full_attention(case, place) / PROMPT,
        }
        for case, place, _ in _cases()
    ]


def _with_full_attention(case: str, place: int | None) -> int:
    """Return the tokens that a model computes which finds every whole block before the first token that differs."""
    if case == "cold":
        return PROMPT
    return PROMPT - (PROMPT - 1 if place is None else place) // BLOCK_SIZE * BLOCK_SIZE


def held_bytes(model: Windows, *, windows: bool) -> tuple[int, int]:
    """Return the bytes of the blocks that a request holds at its last token, and the most on its way."""
    settings = {**NARROW, **model.settings, "num_hidden_layers": len(model.layers)}
    settings["sliding_window"] = model.window if windows else None
    if model.kind != "Mistral":
        settings["layer_types"] = list(model.layers if windows else (FULL,) * len(model.layers))
        settings["sliding_window"] = model.window
    with tempfile.TemporaryDirectory() as directory:
        save(model.kind, settings, Path(directory))
        with LLM(
            directory,
            multiprocess=False,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=STEP,
            max_num_seqs=1,
            kv_cache_memory_bytes=256 << 20,
        ) as llm:
            return _held_bytes(llm)


def _held_bytes(llm: LLM) -> tuple[int, int]:
    engine = llm.llm_engine
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    (spec,) = core.model_executor.get_kv_cache_specs()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = [3 + index % 250 for index in range(LENGTH - 8)]
    engine.add_request("long", {"prompt_token_ids": prompt}, params)
    held = []
    while engine.has_unfinished_requests():
        engine.step()
        stats = core.stats()
        held.append(stats.num_blocks - stats.num_free_blocks)
    # The last step has given everything back.
    assert held[-1] == 0
    return held[-2] * spec.page_size_bytes, max(held) * spec.page_size_bytes


def measure_windows(model: Windows) -> dict[str, Any]:
    """Count the bytes of a model, with its windows and without."""
    (last, most), (full, _) = held_bytes(model, windows=True), held_bytes(model, windows=False)
    return {
        "model": model.name,
        "bytes at 16k": last,
        "most": most,
        "full attention": full,
        "share": last / full,
        "as the windows say": model.share,
        "deviation": last / full / model.share - 1,
    }


def main() -> None:
    """Measure both tables."""
    options = parser(__doc__)
    options.add_argument(
        "--count", action="store_true", help="count the computed tokens of edited prompts, no more"
    )
    arguments = options.parse_args()
    edited = edited_prompts(arguments.rounds, only_count=arguments.count)
    report("an edited prompt on a hybrid model", edited, None)
    if arguments.count:
        return
    windows = [measure_windows(model) for model in MODELS]
    report("bytes of a request's blocks at 16k tokens", windows, None)
    report("state", [*edited, *windows], arguments.json, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
