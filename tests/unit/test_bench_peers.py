"""The comparison with other engines takes the medians, ratios and floors that its table claims."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_peers
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from peers import engines, make_gguf, memory, worker
from peers.cases import IN_USE, Case, cases, tokens_needed
from peers.costs import ModelCosts, Rates, read_costs
from peers.memory import read_smaps
from peers.protocol import Answer, Job, Timing
from peers.quality import divergence
from peers.table import Figures, as_json, memory_rows, row

from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config

DECODE = Case("decode", "decode", 1, 64, 11)
COSTS = ModelCosts(
    layer_bytes=600,
    layer_values=1000,
    output_bytes=400,
    output_values=500,
    file_bytes=1100,
    kv_values=8,
    query_values=16,
    vocabulary=50,
)
READS_SLOWLY = Rates(read=1000.0, matrix=1e12)
COMPUTES_SLOWLY = Rates(read=1e12, matrix=1000.0)


def answer(*timings: Timing) -> Answer:
    return Answer("1", list(timings), first_token_at=7.5, memory={"pss": 3 * 2**20})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("decode", 5.0), ("prefill", 64.0), ("streams", 11 / 3), ("start", 2.5), ("memory", 3.0)],
)
def test_a_case_takes_the_figure_of_its_kind_from_the_middle_run(kind: str, expected: float) -> None:
    # 10 tokens in 2 seconds after the first; the prompt of 64 in 1 second.
    found = answer(Timing(9.0, 99.0), Timing(1.0, 3.0), Timing(0.1, 0.2))
    case = replace(DECODE, kind=kind)
    assert case.figure(found, spawned_at=5.0) == pytest.approx(expected)


def test_the_floor_of_a_decoding_step_is_its_bytes_by_the_rate_of_reading() -> None:
    # 1,000 bytes of weights, and 16 bytes a token of context: from 65 to 74 tokens.
    seconds = sum(1000 + 16 * (64 + n) for n in range(1, 11)) / 1000
    assert DECODE.floor(COSTS, READS_SLOWLY, 0) == pytest.approx(10 / seconds)


def test_the_floor_of_a_prompt_is_its_operations_by_the_rate_of_computing() -> None:
    operations = 2 * (64 * 1000 + 500) + 4 * 64 * 32 * 16
    case = replace(DECODE, kind="prefill")
    assert case.floor(COSTS, COMPUTES_SLOWLY, 0) == pytest.approx(64 * 1000 / operations)


def test_the_floor_of_many_streams_reads_the_weights_once_a_step() -> None:
    one, eight = (Case("", "streams", n, 1, 2).floor(COSTS, READS_SLOWLY, 0) for n in (1, 8))
    assert one < eight < 8 * one


def test_the_floor_of_memory_is_the_file_and_the_room_for_keys_and_values() -> None:
    case = replace(DECODE, kind="memory")
    assert case.floor(COSTS, READS_SLOWLY, 100) == pytest.approx((1100 + (64 + 11) * 16) / 2**20)


def figures(case: Case, floor: float, **rounds: list[float]) -> Figures:
    return Figures(case, floor, rounds)


def test_the_advantage_is_the_median_of_the_ratios_of_neighbouring_rounds() -> None:
    # The machine slowed down by half in the second round; the medians alone would give 2.
    found = figures(DECODE, 400.0, nbengine=[300.0, 150.0, 300.0], llama_cpp=[100.0, 50.0, 150.0])
    assert found.advantage("llama_cpp") == 3
    assert found.share_of_floor("nbengine") == 0.75


def test_figures_are_written_where_nbengine_itself_has_failed() -> None:
    written = as_json(figures(DECODE, 400.0, llama_cpp=[100.0]))
    assert written["engines"]["llama_cpp"]["median"] == 100
    assert "nbengine better by" not in written["engines"]["llama_cpp"]


def test_an_engine_that_takes_too_long_has_failed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TIMEOUT", 0.1)
    with pytest.raises(engines.FailedRunError, match=r"nbengine had not ended after 0\.1 s"):
        engines.Processes({}).output("timeit", "-n", "1", "import time; time.sleep(60)", threads=1)


def test_of_seconds_and_bytes_less_is_better() -> None:
    found = figures(replace(DECODE, kind="start"), 1.0, nbengine=[2.0], llama_cpp=[4.0])
    assert found.advantage("llama_cpp") == 2
    assert found.share_of_floor("nbengine") == 0.5


def test_a_row_names_engines_that_are_missing_or_failed() -> None:
    found = figures(DECODE, 400.0, nbengine=[200.0], llama_cpp=[100.0], other=[50.0])
    found.unable = {"mistralrs"}
    engines = ["nbengine", "llama_cpp", "other", "openvino", "mistralrs", "transformers"]
    cells = row(found, engines, {"openvino": "how to get it"})
    assert cells == {
        "what": "decode",
        "unit": "tok/s",
        "floor": 400.0,
        "nbengine": "200 (50%)",
        "llama_cpp": "100 (25%)",
        "other": "50 (12%)",
        "openvino": "missing",
        "mistralrs": "cannot",
        "transformers": "failed",
        "nbengine / llama_cpp": "2.00 ×",
        "nbengine / other": "4.00 ×",
        "nbengine / openvino": "",
        "nbengine / mistralrs": "",
        "nbengine / transformers": "",
        "nbengine / best": "2.00 ×",
    }


def test_every_engine_gets_room_for_the_largest_case() -> None:
    chosen = cases(quick=False)
    room = tokens_needed(chosen)
    assert all(case.streams * (case.prompt + case.new_tokens) <= room for case in chosen)
    assert {case.streams for case in chosen if case.kind == "streams"} == {1, 8, 32}


@pytest.mark.parametrize("quick", [False, True])
def test_memory_is_measured_with_the_same_tokens_in_use_whatever_else_is_measured(quick: bool) -> None:
    chosen = cases(quick)
    (case,) = (case for case in chosen if case.kind == "memory")
    others = [each for each in chosen if each is not case]
    assert tokens_needed(chosen) == tokens_needed(others)
    for kv_tokens in (tokens_needed([case]), tokens_needed(chosen)):
        job = case.job("m.gguf", 2, vocabulary=300, kv_tokens=kv_tokens)
        assert job.kv_tokens == sum(map(len, job.prompts)) + job.new_tokens == IN_USE
        assert job.wants_memory
    assert all(peer.takes(case.streams) for peer in engines.PEERS.values())
    assert not any(each.job("m.gguf", 2, 300, 64).wants_memory for each in others)


class NoEngine:
    """Answers at once, and consists of this process."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        return Timing(0.0, 1.0)

    def logits(self, prompts: list[list[int]], first: int) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        pass


def test_memory_is_read_while_an_engine_runs_and_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(engines.BENCHMARKS))
    job = Job("m.gguf", 1, [[1]], 1)
    assert worker.answer(NoEngine(), job, "1").memory == {}
    found = worker.answer(NoEngine(), replace(job, wants_memory=True), "1").memory
    assert found["processes"] == {str(os.getpid()): found["pss"]}
    assert found["pss"] > 0


def test_memory_is_that_of_the_last_reading_before_the_run_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin, end = os.pipe()
    readings = iter([100, 200, 300])

    def resident(pids: list[int], model: str) -> dict[str, int]:
        pss = next(readings)
        if pss == 300:
            os.close(end)
        return {"pss": pss}

    monkeypatch.setattr(memory, "resident", resident)
    with os.fdopen(stdin) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        memory.watch([1], "m.gguf")
    assert json.loads(capsys.readouterr().out) == {"pss": 200}


def test_a_job_gives_every_engine_the_same_ids_of_the_vocabulary() -> None:
    case = Case("", "streams", 3, 20, 4)
    job, again = (case.job("m.gguf", 2, vocabulary=300, kv_tokens=64) for _ in range(2))
    assert Job.decode(job.encode()) == job == again
    assert all(len(prompt) == 20 and max(prompt) < 300 for prompt in job.prompts)


def test_an_answer_comes_back_as_it_was() -> None:
    found = answer(Timing(1.0, 2.0))
    assert Answer.decode(found.encode()) == found


def test_memory_is_told_apart_by_what_the_pages_belong_to() -> None:
    head = "00000000-{end} r--p 00000000 08:01 5 {path}\nRss: {kb} kB\nPss: {half} kB\nVmFlags: rd"
    parts = [("/models/m.gguf", 8), ("/lib/libtorch.so", 16), ("/dev/shm/nbe", 32), ("[heap]", 64), ("", 128)]
    text = "\n".join(
        head.format(end="00400000", path=path, kb=kb, half=kb // 2).replace("5 \n", "5\n")
        for path, kb in parts
    )
    found = read_smaps(text, "/models/m.gguf")
    assert found["rss"].total() == 248 * 1024
    assert found["pss"] == {
        "weights": 4 * 1024,
        "libraries": 8 * 1024,
        "shared memory": 16 * 1024,
        "anonymous": 96 * 1024,
    }


def test_the_memory_table_has_torch_by_itself() -> None:
    def taken(mib: int) -> dict[str, object]:
        return {
            "rss": 2 * mib << 20,
            "pss": mib << 20,
            "kinds": {"libraries": mib << 20},
            "processes": {"1": mib << 20},
        }

    rows = memory_rows({"nbengine": taken(500)}, taken(150))
    assert [(cells["what"], cells["RSS"], cells["PSS"]) for cells in rows] == [
        ("nbengine", "1000", "500"),
        ("importing torch alone", "300", "150"),
    ]


def test_an_engine_that_cannot_be_imported_is_missing_with_a_command(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2\nexit 1\n")
    python.chmod(0o700)
    processes = engines.Processes({"llama_cpp": str(python)})
    with pytest.raises(engines.MissingPeerError, match="No module named 'llama_cpp'"):
        processes.version("llama_cpp")
    command = engines.install_command(engines.PEERS["llama_cpp"], processes.python("llama_cpp"))
    assert command.startswith(f"{python} -m pip install 'llama-cpp-python[server]==")
    assert all(engines.install_command(peer, "python") for peer in engines.PEERS.values())


def measured_by_make(*variables: str) -> list[argparse.Namespace]:
    """Return the arguments with which make would measure, one after the other."""
    command = ["make", "--no-print-directory", "-n", "-o.venv/.installed-peers", "bench-peers", *variables]
    root = engines.BENCHMARKS.parent
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"bench_peers\.py (.+?)(?: \|\| .+)?$", printed, re.MULTILINE)
    return [bench_peers.options().parse_args(shlex.split(line)) for line in lines]


def test_make_measures_each_file_into_a_table_of_its_own_or_one_that_is_given() -> None:
    default, *made = measured_by_make()
    assert (default.model, default.shape) == ("smollm2-135m", None)
    assert [(each.shape, each.types) for each in made] == [("0.6b", "Q4_K_M"), ("0.6b", "Q8_0")]
    assert all(each.folder is not None for each in made)
    assert len({each.json for each in (default, *made)}) == 3
    (given,) = measured_by_make("MODEL=given.gguf")
    assert (given.model, given.shape) == ("given.gguf", None)


def test_an_engine_is_tried_with_fewer_threads_than_there_are() -> None:
    assert engines.thread_choices(16) == [16, 8, 4]
    assert engines.thread_choices(2) == [2, 1]
    assert engines.thread_choices(1) == [1]


@pytest.mark.parametrize("types", make_gguf.TYPES)
def test_random_blocks_have_the_deviation_that_is_asked_for(types: str) -> None:
    blocks = make_gguf.random_blocks(Kind[types], 500, 0.05, np.random.default_rng(3))
    values = gguf.dequantize(blocks, Kind[types])
    assert values.std() == pytest.approx(0.05, rel=0.06)
    assert abs(values.mean()) < 0.002


def test_a_made_file_has_the_sizes_that_its_costs_are_read_from(tmp_path: Path) -> None:
    shape = make_gguf.SHAPES["tiny"]
    path = make_gguf.make(tmp_path, "tiny", "Q4_K_M", layers=2)
    costs = read_costs(path)
    expected = make_gguf.expected_bytes(replace(shape, layers=2), "Q4_K_M")
    assert costs.layer_bytes + costs.output_bytes == expected
    assert costs.kv_values == 2 * 2 * shape.kv_heads * 64
    assert costs.vocabulary == shape.vocabulary
    before = path.read_bytes()
    path.unlink()
    assert make_gguf.make(tmp_path, "tiny", "Q4_K_M", layers=2).read_bytes() == before


def test_an_8b_file_has_the_mixture_of_types_of_q4_k_m() -> None:
    shape = make_gguf.SHAPES["8b"]
    kinds = {
        name: make_gguf.kind_of(name, "Q4_K_M", shape, columns)
        for name, _, columns in make_gguf.matrices(shape)
    }
    assert kinds["output.weight"] is Kind.Q6_K
    assert kinds["token_embd.weight"] is kinds["blk.0.attn_q.weight"] is Kind.Q4_K
    more = [name for name, kind in kinds.items() if name.endswith("ffn_down.weight") and kind is Kind.Q6_K]
    assert len(more) == 16
    # The file of Llama 3 8B as Q4_K_M has 4.92 GB.
    assert make_gguf.expected_bytes(shape, "Q4_K_M") == pytest.approx(4.92e9, rel=0.01)


def test_a_file_of_a_qwen_3_has_heads_of_their_own_size_with_norms(tmp_path: Path) -> None:
    shape = make_gguf.SHAPES["0.6b"]
    # The file of Qwen3 0.6B as Q4_K_M has 397 MB.
    assert make_gguf.expected_bytes(shape, "Q4_K_M") == pytest.approx(397e6, rel=0.03)
    small = replace(shape, layers=2, hidden=256, inner=512, vocabulary=512)
    costs = read_costs(make_gguf.write(tmp_path / "small.gguf", small, "Q4_K_M"))
    assert costs.query_values == 2 * 16 * 128
    assert costs.layer_bytes + costs.output_bytes == make_gguf.expected_bytes(small, "Q4_K_M")
    found = hf_config(read_header(tmp_path / "small.gguf"))
    assert (found["model_type"], found["head_dim"]) == ("qwen3", 128)


def test_an_engine_with_one_request_at_a_time_is_not_asked_for_more() -> None:
    assert engines.PEERS["mistralrs"].takes(1)
    assert not engines.PEERS["mistralrs"].takes(8)
    assert engines.PEERS["llama_cpp"].takes(32)


def test_the_divergence_of_equal_logits_is_nought_and_of_others_their_kullback_leibler_sum() -> None:
    exact = np.log(np.array([[[0.5, 0.25, 0.25]]], np.float32))
    other = np.log(np.array([[[0.25, 0.5, 0.25]]], np.float32)) + 3
    same = divergence(exact, exact + 5)
    assert same.mean == pytest.approx(0, abs=1e-7)
    assert same.same_top == 1
    found = divergence(exact, other)
    assert found.mean == pytest.approx(0.25 * np.log(2))
    assert found.same_top == 0
