"""Measure nbengine beside other engines, on the same file, with the same threads and token ids, in turn.

    python benchmarks/bench_peers.py [--model FILE.gguf] [--peers llama_cpp openvino mistralrs] [--rounds 3]
        [--threads N] [--quick] [--only WORD …] [--out PATH] [--python llama_cpp=/venv/bin/python] [--alone]
        [--activation-dtype int16]
    python benchmarks/bench_peers.py --shape 8b --folder DIR [--types Q4_K_M] [--layers N]

Every measurement is a fresh process that loads the file, runs the batch once to warm up and then to be counted;
within a round the engines follow one another, and a ratio is the median of those of the rounds. A first round
warms the disk's cache, finds the best number of threads for engines that are given several, and does not count.

A cell has the figure and, in brackets, its share of the floor: what the machine could do at most, by the rates
at which it reads and multiplies (torch's fastest matrix product), which the same run measures. `peers.costs` says
what counts. In the ratios more than 1 means that nbengine is better.

Engines that are not installed are named, with the command that installs them; one may have an environment of
its own (--python). Without any there is an error, unless --alone asks for nbengine by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import parser, report
from peers.cases import Case, cases, tokens_needed
from peers.chart import draw
from peers.costs import ModelCosts, Rates, read_costs
from peers.engines import (
    OURS,
    PEERS,
    FailedRunError,
    MissingPeerError,
    Processes,
    install_command,
    thread_choices,
)
from peers.make_gguf import add_arguments, make
from peers.protocol import Answer
from peers.table import Figures, as_json, memory_rows, row

from nbengine.config import ModelConfig
from nbengine.config.model import ACTIVATION_DTYPES
from nbengine.models.checkpoints.files import resolve_model


def options() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    result = parser(__doc__)
    result.set_defaults(rounds=3)
    result.add_argument("--out", dest="json", type=Path, help="the same as --json; a chart goes beside it")
    result.add_argument("--model", default="smollm2-135m", help="a .gguf file, or an alias")
    result.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    result.add_argument(
        "--alone", action="store_true", help="measure nbengine by itself, before and after a change"
    )
    result.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    result.add_argument("--quick", action="store_true", help="fewer streams, shorter answers, one round")
    result.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="the cases whose name has one of these words"
    )
    result.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the interpreter of an engine"
    )
    result.add_argument("--activation-dtype", choices=ACTIVATION_DTYPES, default="auto", help="of nbengine")
    result.add_argument("--folder", type=Path, help="where --shape makes its file, or finds it")
    add_arguments(result)
    return result


class Comparison:
    """The engines that are there, and the figures so far."""

    def __init__(
        self, processes: Processes, engines: Sequence[str], model: Path, threads: int, activation_dtype: str
    ) -> None:
        self._processes = processes
        self._engines = engines
        self._model = model
        self._threads = threads
        self._arguments = {"activation_dtype": activation_dtype}
        self.rates: list[dict[str, Any]] = []
        self.memory: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self._costs: ModelCosts = read_costs(model)

    def measure(self, case: Case, rounds: int, kv_tokens: int) -> Figures:
        """Measure a case in as many rounds, after one that does not count."""
        self._measure_rates()
        figures = Figures(case)
        figures.unable = {
            engine for engine in self._engines if engine in PEERS and not PEERS[engine].takes(case.streams)
        }
        alive = [engine for engine in self._engines if engine not in figures.unable]
        for number in range(rounds + 1):
            for engine in list(alive):
                try:
                    value = self._round(case, engine, figures, kv_tokens, is_first=number == 0)
                except FailedRunError as error:
                    self.failures.append(f"{case.name}: {error}")
                    alive.remove(engine)
                    figures.engines.pop(engine, None)
                    continue
                if number:
                    figures.engines.setdefault(engine, []).append(value)
        return figures

    def set_floors(self, found: Sequence[Figures], kv_tokens: int) -> None:
        """Give every case its floor, by the best rates that the machine has shown in the whole run."""
        rates = Rates(
            max(each["read"] for each in self.rates),
            max(rate for each in self.rates for rate in each["matrix"].values()),
        )
        for figures in found:
            figures.floor = figures.case.floor(self._costs, rates, kv_tokens)

    def _measure_rates(self) -> None:
        self.rates.append(
            json.loads(self._processes.output("peers.floors", str(self._threads), threads=self._threads))
        )

    def _round(self, case: Case, engine: str, figures: Figures, kv_tokens: int, *, is_first: bool) -> float:
        if is_first and engine in PEERS and PEERS[engine].tries_threads and case.kind != "memory":
            found = {n: self._one(case, engine, n, kv_tokens)[0] for n in thread_choices(self._threads)}
            best = max if case.more_is_better else min
            figures.threads[engine] = best(found, key=found.__getitem__)
        threads = figures.threads.get(engine, self._threads)
        value, answer = self._one(case, engine, threads, kv_tokens)
        if case.kind == "memory":
            self.memory[engine] = answer.memory
        return value

    def _one(self, case: Case, engine: str, threads: int, kv_tokens: int) -> tuple[float, Answer]:
        vocabulary = self._costs.vocabulary
        job = replace(case.job(str(self._model), threads, vocabulary, kv_tokens), arguments=self._arguments)
        answer, spawned_at = self._processes.answer(engine, job)
        value = case.figure(answer, spawned_at)
        print(f"{case.name}: {engine}, {threads} threads: {value:.4g} {case.unit}", file=sys.stderr)
        return value, answer


def installed(processes: Processes, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions of the engines that are there, and of the others how to install them."""
    versions, missing = {OURS: processes.version(OURS)}, {}
    for name in names:
        try:
            versions[name] = processes.version(name)
        except MissingPeerError as reason:
            command = install_command(PEERS[name], processes.python(name))
            missing[name] = f"{name} is missing ({reason}); install it with: {command}"
    return versions, missing


def main() -> int:
    """Compare; return 1 if an engine that is there failed."""
    parse = options()
    arguments = parse.parse_args()
    pythons = dict(item.split("=", 1) for item in arguments.python if "=" in item)
    if len(pythons) < len(arguments.python) or set(pythons) - set(PEERS):
        parse.error(f"--python takes NAME=PATH, with a NAME of {', '.join(PEERS)}")
    processes = Processes(pythons)
    names = [] if arguments.alone else arguments.peers
    versions, missing = installed(processes, names)
    for line in missing.values():
        print(line, file=sys.stderr)
    if names and not set(names) & set(versions):
        parse.error("no other engine is installed; --alone measures nbengine by itself")
    if arguments.shape:
        if arguments.folder is None:
            parse.error("--shape needs a --folder for its file")
        model = make(arguments.folder, arguments.shape, arguments.types, arguments.layers, arguments.seed)
    else:
        model = Path(resolve_model(ModelConfig(arguments.model)).weights[0])
    chosen = [case for case in cases(arguments.quick) if any(word in case.name for word in arguments.only)]
    if not chosen:
        parse.error(f"no case has {' or '.join(map(repr, arguments.only))} in its name")
    engines = [OURS, *(name for name in names if name in versions)]
    comparison = Comparison(
        processes, engines, model.resolve(), arguments.threads, arguments.activation_dtype
    )
    kv_tokens = tokens_needed(chosen)
    rounds = 1 if arguments.quick else arguments.rounds
    found = [comparison.measure(case, rounds, kv_tokens) for case in chosen]
    comparison.set_floors(found, kv_tokens)
    rows = [row(figures, [OURS, *names], missing) for figures in found]
    if comparison.memory:
        torch = json.loads(processes.output("peers.memory", "torch", threads=arguments.threads))
        report("resident memory at the last token, MiB", memory_rows(comparison.memory, torch), None)
    report(
        f"{model.name}, {arguments.threads} threads",
        rows,
        arguments.json,
        figures=[as_json(figures) for figures in found],
        rates=comparison.rates,
        memory=comparison.memory,
        versions=versions,
        missing=missing,
    )
    print("\n" + "\n".join([*missing.values(), *comparison.failures]))
    if arguments.json is not None:
        arguments.json.with_suffix(".svg").write_text(draw(found))
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
