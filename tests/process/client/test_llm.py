"""The blocking frontend over real processes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, SamplingParams
from nbengine.errors import EngineDeadError, RequestError, UtilityError
from nbengine.ipc.messages import EngineCoreRequest
from tests.process.client.conftest import left_idle

StartLLM = Callable[..., LLM]
Script = Callable[[str], "subprocess.Popen[str]"]

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def counting(first: int, count: int = 5) -> list[int]:
    return list(range(first, first + count))


@pytest.fixture(scope="module")
def shared(start_shared: Callable[..., LLM]) -> LLM:
    """An engine that takes long enough for a step to be caught in the middle of a request."""
    return start_shared(LLM, knobs={"step_seconds": 0.02})


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine, for the tests that leave it as it is."""
    with left_idle(shared):
        yield shared


def test_a_batch_is_generated_and_the_engine_is_idle_and_then_gone(start_llm: StartLLM) -> None:
    llm = start_llm()
    prompts = [{"prompt_token_ids": [10 * number]} for number in range(1, 20)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [counting(10 * n + 1) for n in range(1, 20)]
    (engine,) = llm.stats().engines
    assert engine.num_free_blocks == engine.num_blocks == 64
    assert engine.num_running_reqs == engine.num_waiting_reqs == 0
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("x", GREEDY)


def test_text_is_what_the_tokenizer_makes_of_the_tokens(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    last = tokenizer.encode("hello")[-1]
    assert output.outputs[0].token_ids == counting(last + 1)
    assert output.outputs[0].text == tokenizer.decode(counting(last + 1))


async def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_two_engines_run_side_by_side(llm: LLM, start_llm: StartLLM) -> None:
    first, second = llm, start_llm()
    names = {each.llm_engine.engine_core.info.name for each in (first, second)}  # type: ignore[attr-defined]
    assert len(names) == 2
    for each in (first, second, first):
        assert each.generate({"prompt_token_ids": [5]}, GREEDY, use_tqdm=False)[0].outputs[
            0
        ].token_ids == counting(6)


def test_threads_that_generate_at_once_get_their_own_outputs(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def generate(first: int) -> None:
        (output,) = llm.generate({"prompt_token_ids": [first]}, GREEDY, use_tqdm=False)
        results[first] = output.outputs[0].token_ids

    threads = [threading.Thread(target=generate, args=(first,)) for first in (20, 40, 60, 80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {first: counting(first + 1) for first in (20, 40, 60, 80)}


def test_an_interrupt_aborts_the_requests_and_the_llm_stays_usable(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)

    def interrupt_when_running() -> None:
        wait_for(lambda: llm.stats().engines_running, "running requests")
        os.kill(os.getpid(), signal.SIGINT)

    before = llm.stats().engines[0].num_generation_tokens
    interrupter = threading.Thread(target=interrupt_when_running)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "world"], endless, use_tqdm=False)
    interrupter.join()
    wait_for(lambda: not llm.stats().engines_running, "the end of the aborted requests")
    # They have not come to their ends.
    assert llm.stats().engines[0].num_generation_tokens - before < 2 * 400
    (output,) = llm.generate({"prompt_token_ids": [7]}, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == counting(8)


def test_stop_strings_end_a_request_at_the_engine_too(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    first = tokenizer.encode("a")[0]
    params = SamplingParams(max_tokens=200, stop=["de"], ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [first]}, params, use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("bc", "stop", "de")
    wait_for(lambda: not llm.stats().engines_running, "the end of the stopped request")


def test_utility_calls_return_or_raise_what_the_engine_says(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.call_utility("ping", timeout=60) == "pong"
    assert engine.get_supported_tasks() == ("generate",)
    with pytest.raises(UtilityError, match="no utility method 'nonsense'"):
        engine.call_utility("nonsense", timeout=60)
    with pytest.raises(UtilityError, match="cannot be encoded"):
        engine.call_utility("ping", object(), timeout=60)


def test_a_request_that_the_engine_refuses_fails_alone(llm: LLM) -> None:
    engine = llm.llm_engine
    good = engine.add_request("good", {"prompt_token_ids": [5]}, GREEDY)
    # Past the frontend's own checks.
    bad = EngineCoreRequest("bad", [10_000], GREEDY.clone(), external_req_id="bad")
    engine.output_processor.add_request(bad, None)
    engine.engine_core.add_request(bad)
    finished: list[Any] = []
    errors = []
    while engine.has_unfinished_requests():
        try:
            finished += [output for output in engine.step() if output.finished]
        except RequestError as error:
            errors.append(str(error))
    assert [output.outputs[0].token_ids for output in finished] == [counting(6)]
    assert good.startswith("good-")
    assert len(errors) == 1
    assert "request bad: prompt_token_ids has the token id 10000" in errors[0]


def test_the_prefix_cache_is_used_and_can_be_reset(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(1, 60))}
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 48
    assert llm.generate({**prompt, "cache_salt": "other"}, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_script_needs_no_main_guard_and_its_engine_ends_with_it(script: Script) -> None:
    process = script(
        "from nbengine import LLM, SamplingParams\n"
        "llm = LLM(**OPTIONS)\n"
        "print(llm.llm_engine.engine_core.info.host_pid)\n"
        "print(llm.generate({'prompt_token_ids': [5]}, SamplingParams(temperature=0), use_tqdm=False)"
        "[0].outputs[0].token_ids)\n"
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert err == ""
    pid, tokens = out.splitlines()
    assert tokens == str(counting(6, 16))
    wait_for(lambda: not _runs(int(pid)), "the end of the script's engine")


def test_a_terminal_is_told_how_far_the_start_is(script: Script) -> None:
    process = script(
        "import os, pty, sys\nfrom nbengine import LLM\n"
        "terminal, end = pty.openpty()\n"
        "sys.stderr = os.fdopen(end, 'w')\n"
        "LLM(**OPTIONS)\n"
        "sys.stderr.close()\n"
        "sys.stderr = sys.__stderr__\n"
        # A read may return a part; the one after the last, when nobody has the terminal open, fails.
        "text = b''\n"
        "try:\n"
        "    while True:\n"
        "        text += os.read(terminal, 4096)\n"
        "except OSError:\n"
        "    print(ascii(text))\n"
    )
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    begin, *lines = ast.literal_eval(out).decode().split("\r\x1b[K")
    assert begin == lines.pop() == ""
    assert lines
    assert all(line.startswith("starting ") for line in lines)


def test_a_bound_engine_ends_when_its_script_is_killed(script: Script) -> None:
    process = script(
        "import time\nfrom nbengine import LLM\n"
        "llm = LLM(**OPTIONS)\nprint(llm.llm_engine.engine_core.info.host_pid)\ntime.sleep(60)\n"
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert _runs(pid)
    process.kill()
    wait_for(lambda: not _runs(pid), "the end of the killed script's engine")


def test_an_llm_that_nobody_refers_to_ends_its_engine(start_llm: StartLLM, started_llms: list[LLM]) -> None:
    info = start_llm().llm_engine.engine_core.info  # type: ignore[attr-defined]
    assert info.host_alive
    started_llms.clear()
    wait_for(lambda: not info.host_alive, "the end of the dropped engine")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
