"""Engines of one model have its packed weights in memory once."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, SamplingParams

pytestmark = pytest.mark.timeout(180)


def mapped(pid: int) -> dict[str, int]:
    """The KiB of a process that are pages of files of packed weights, by the names of smaps."""
    found: dict[str, int] = {}
    is_inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:
            is_inside = line.endswith(".weights")
        elif is_inside and rest.endswith(" kB"):
            found[name] = found.get(name, 0) + int(rest.split()[0])
    return found


def test_two_engines_of_a_model_share_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBENGINE_CACHE_DIR", str(tmp_path))

    def start() -> LLM:
        return LLM("random-tiny", device="cpu", quantization="int8", num_gpu_blocks_override=64)

    def answer(llm: LLM) -> list[int]:
        sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        return list(llm.generate(["hello"], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    with start() as first:
        answers = [answer(first)]
        pids = [first.llm_engine.ready.pid]
        wait_for(lambda: mapped(pids[0]), "the first engine maps what it has written", 60)
        answers.append(answer(first))
        with start() as second:
            answers.append(answer(second))
            pids.append(second.llm_engine.ready.pid)
            weights_kib = second.llm_engine.ready.weights_bytes >> 10
            for pages in map(mapped, pids):
                assert pages["Rss"] >= weights_kib
                assert pages["Anonymous"] == 0
                assert pages["Pss"] <= 0.6 * pages["Rss"]
    assert answers == [answers[0]] * 3
