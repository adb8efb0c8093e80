"""Measure how far next-token distributions are from the exact ones: nbengine's quantised path and llama.cpp's.

    python benchmarks/bench_quality.py [--model FILE.gguf] [--prompts 200] [--positions 20] [--random-ids]
        [--python llama_cpp=/venv/bin/python] [--alone] [--kv-cache-dtype int8] [--activation-dtype int16]
    python benchmarks/bench_quality.py --block-types [Q4_0 Q4_K ...] [--folder DIR]

The exact distributions are those of transformers in float32, on the dequantised weights of the same file. All get
the same token ids: places of this project's pages, or seeded random ones (--random-ids). nbengine decodes them step by step, its engine's own path (a logits processor writes
the logits down); llama.cpp computes each prompt as one batch, as its perplexity tool does. "KL" is the mean of
D(exact || engine) in nats. With --block-types a small model with random weights is made for each type of block.
The exit status is 1 if nbengine's mean is above llama.cpp's, or its most likely token is the exact one at less
than the part of positions given by --top.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report
from peers.costs import read_costs
from peers.engines import OURS, PEERS, MissingPeerError, Processes, install_command
from peers.make_gguf import TYPES, make
from peers.protocol import Job
from peers.quality import Divergence, divergence

from nbengine.config import ModelConfig
from nbengine.config.cache import KV_CACHE_DTYPES
from nbengine.config.model import ACTIVATION_DTYPES
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.models.checkpoints.files import resolve_model

EXACT, PEER = "transformers", "llama_cpp"
CONTEXT = 16
"""Tokens before the first position that counts."""
PART_BYTES = 1 << 30
"""Prompts are divided so that the logits of a part take at most this much."""


def options() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    result = parser(__doc__)
    result.add_argument("--out", dest="json", type=Path, help="the same as --json")
    result.add_argument("--model", default="smollm2-135m", help="a .gguf file, or an alias")
    result.add_argument(
        "--block-types",
        nargs="*",
        choices=TYPES,
        metavar="TYPE",
        help=f"of {', '.join(TYPES)}; none given: all",
    )
    result.add_argument("--shape", default="tiny", help="of the models of --block-types")
    result.add_argument(
        "--folder",
        type=Path,
        help="where --block-types makes its files, or finds them (default: a temporary one)",
    )
    result.add_argument("--random-ids", action="store_true", help="random tokens in place of a text's")
    result.add_argument("--prompts", type=int, default=200)
    result.add_argument("--positions", type=int, default=20, help="of each prompt")
    result.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    result.add_argument(
        "--top",
        type=float,
        help="at least this part of top tokens has to be exact (default: 0.99; of random weights or ids, which "
        "give too many near ties, 0)",
    )
    result.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of nbengine")
    result.add_argument("--activation-dtype", choices=ACTIVATION_DTYPES, default="auto", help="of nbengine")
    result.add_argument("--alone", action="store_true", help="only nbengine")
    result.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the interpreter of an engine"
    )
    return result


def document_ids(config: ModelConfig) -> list[int]:
    """Return the tokens of this project's pages, by the model's own tokenizer."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids: list[int] = load_tokenizer(config)("\n".join(page.read_text() for page in pages))["input_ids"]
    return ids


def choose_prompts(text: list[int] | None, vocabulary: int, count: int, length: int) -> list[list[int]]:
    """Take prompts from places of the text, or random ids if there is none; always the same."""
    chooser = random.Random(0)
    if text is None:
        return [[chooser.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
    starts = [chooser.randrange(len(text) - length) for _ in range(count)]
    return [text[start : start + length] for start in starts]


def together(parts: list[Divergence]) -> Divergence:
    """Put the parts of the prompts together, which have the same number of positions each (the last one may
    have fewer); the median is that of the parts' medians."""
    positions = [part.positions for part in parts]
    return Divergence(
        float(np.average([part.mean for part in parts], weights=positions)),
        float(np.median([part.median for part in parts])),
        max(part.largest for part in parts),
        float(np.average([part.same_top for part in parts], weights=positions)),
        sum(positions),
    )


def measure(
    processes: Processes,
    model: Path,
    engines: list[str],
    prompts: list[list[int]],
    threads: int,
    vocabulary: int,
    engine_arguments: dict[str, str],
) -> dict[str, Divergence]:
    """Return each engine's divergence from the exact distributions."""
    found: dict[str, list[Divergence]] = {engine: [] for engine in engines}
    size = max(1, PART_BYTES // ((len(prompts[0]) - CONTEXT) * vocabulary * 4))
    for begin in range(0, len(prompts), size):
        batch = prompts[begin : begin + size]
        with tempfile.TemporaryDirectory() as directory:
            logits = {}
            for engine in (EXACT, *engines):
                path = Path(directory) / f"{engine}.npy"
                room = sum(len(ids) + 16 for ids in batch)
                job = Job(
                    str(model),
                    threads,
                    batch,
                    1,
                    kv_tokens=room,
                    logits_from=CONTEXT,
                    logits_path=str(path),
                    arguments=engine_arguments,
                )
                processes.answer(engine, job)
                logits[engine] = np.load(path, mmap_mode="r")
            for engine in engines:
                found[engine].append(divergence(logits[EXACT], logits[engine]))
    return {engine: together(parts) for engine, parts in found.items()}


def row(name: str, found: dict[str, Divergence], least_top: float) -> dict[str, Any]:
    """Make a model's row; `kept` says whether nbengine is as good as it has to be."""
    ours, peer = found[OURS], found.get(PEER)
    cells: dict[str, Any] = {"model": name, "positions": ours.positions}
    for engine, value in found.items():
        cells |= {f"{engine} KL": f"{value.mean:.3g}", f"{engine} same top": f"{value.same_top:.2%}"}
    if peer is not None:
        cells["KL ratio"] = ours.mean / peer.mean
    kept = ours.same_top >= least_top and (peer is None or ours.mean <= peer.mean)
    return cells | {"kept": "yes" if kept else "no"}


def present_engines(parse: argparse.ArgumentParser, processes: Processes, *, alone: bool) -> list[str]:
    """List the engines to be measured; without the peer there is an error, unless nbengine is to be alone."""
    if alone:
        return [OURS]
    try:
        processes.version(PEER)
    except MissingPeerError as reason:
        command = install_command(PEERS[PEER], processes.python(PEER))
        parse.error(
            f"{PEER} is missing ({reason}); install it with: {command}\n--alone measures nbengine by itself"
        )
    return [OURS, PEER]


def main() -> int:
    """Measure one file, or one of each block type."""
    parse = options()
    arguments = parse.parse_args()
    pythons = dict(item.split("=", 1) for item in arguments.python if "=" in item)
    if len(pythons) < len(arguments.python) or set(pythons) - {PEER, EXACT}:
        parse.error(f"--python takes NAME=PATH, with a NAME of {PEER} or {EXACT}")
    processes = Processes(pythons)
    engines = present_engines(parse, processes, alone=arguments.alone)
    text: list[int] | None = None
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as directory:
        if arguments.block_types is None:
            config = resolve_model(ModelConfig(arguments.model))
            path = Path(config.weights[0])
            models = {path.name: path}
            text = None if arguments.random_ids else document_ids(config)
        else:
            folder = arguments.folder or Path(directory)
            types = arguments.block_types or TYPES
            models = {each: make(folder, arguments.shape, each) for each in types}
        least_top = (0.0 if text is None else 0.99) if arguments.top is None else arguments.top
        for name, path in models.items():
            vocabulary = read_costs(path).vocabulary
            prompts = choose_prompts(text, vocabulary, arguments.prompts, CONTEXT + arguments.positions)
            found = measure(
                processes,
                path.resolve(),
                engines,
                prompts,
                arguments.threads,
                vocabulary,
                {name: getattr(arguments, name) for name in ("kv_cache_dtype", "activation_dtype")},
            )
            rows.append(row(name, found, least_top))
            figures[name] = {engine: asdict(value) for engine, value in found.items()}
    report("next-token distributions beside the exact ones", rows, arguments.json, figures=figures)
    return 0 if all(cells["kept"] == "yes" for cells in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
