"""Measure texts embedded a second by all-minilm-l6-v2 and by transformers (padded batches of 32) in turn.

256 texts of varied length (8 to 250 tokens, most of them short), in the order in which they come; and as a
second row sorted by length first, which is what sentence-transformers does before it pads. float32 on both
sides; mean pooling and normalisation included, tokenization too.

python benchmarks/bench_embeddings.py [--json PATH] [--rounds N]
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import alternate, median_ratio, parser, report
from numpy.typing import NDArray
from transformers import BertModel, PreTrainedModel

from nbengine import LLM

NUM_TEXTS = 256
BATCH = 32
TOLERANCE = 1e-5
WORDS = [
    "the",
    "a",
    "cat",
    "river",
    "stone",
    "light",
    "quickly",
    "over",
    "under",
    "never",
    "always",
    "mountain",
    "paper",
    "idea",
    "number",
    "music",
]


def make_texts() -> list[str]:
    """Make texts of a length that is log-normal, in words that are one token each."""
    chooser = random.Random(0)
    lengths = [min(250, max(8, int(chooser.lognormvariate(3.4, 0.8)))) for _ in range(NUM_TEXTS)]
    return [" ".join(chooser.choices(WORDS, k=length)) for length in lengths]


class Peer:
    """transformers' model of the same files, with the pooling of sentence-transformers."""

    def __init__(self, llm: LLM) -> None:
        directory = Path(llm.llm_engine.config.model.directory)
        self.model: PreTrainedModel = BertModel.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = llm.get_tokenizer()

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Return vectors [texts, hidden size] from padded batches."""
        vectors = []
        for start in range(0, len(texts), BATCH):
            batch = self.tokenizer(
                texts[start : start + BATCH],
                padding=True,
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = self.model(**batch).last_hidden_state
                mask = batch["attention_mask"][:, :, None].float()
                means = (hidden * mask).sum(1) / mask.sum(1)
                vectors.append(torch.nn.functional.normalize(means).numpy())
        return np.concatenate(vectors)


def timed(run: Any) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure one row for each order of the texts; the vectors of both sides are compared first."""
    arguments = parser(__doc__).parse_args()
    texts = make_texts()
    rows: list[dict[str, Any]] = []
    with LLM("all-minilm-l6-v2", dtype="float32") as llm:
        peer = Peer(llm)
        ours_now = np.array([o.outputs.embedding for o in llm.embed(texts, use_tqdm=False)], np.float32)
        difference = float(np.abs(ours_now - peer.embed(texts)).max())
        if difference > TOLERANCE:
            raise SystemExit(f"the vectors differ by {difference:.2g}")
        for order, chosen in (("as they come", texts), ("sorted by length", sorted(texts, key=len))):
            ours, theirs = alternate(
                arguments.rounds,
                lambda chosen=chosen: timed(lambda: llm.embed(chosen, use_tqdm=False)),
                lambda chosen=chosen: timed(lambda: peer.embed(chosen)),
            )
            rows.append(
                {
                    "texts": order,
                    "nbengine texts/s": NUM_TEXTS / statistics.median(ours),
                    f"transformers, batches of {BATCH}, texts/s": NUM_TEXTS / statistics.median(theirs),
                    "speed-up (median ratio)": 1 / median_ratio(ours, theirs),
                    "greatest difference": difference,
                }
            )
    report(f"embedding {NUM_TEXTS} texts, all-minilm-l6-v2, float32", rows, arguments.json)


if __name__ == "__main__":
    main()
