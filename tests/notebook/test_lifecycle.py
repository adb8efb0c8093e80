"""Engines and kernels that come, go, die and find each other again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import engine_processes
import psutil
from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

from nbengine.runtime.connection import ConnectionInfo, list_connections

StartKernel = Callable[[], Kernel]
RANDOM_TINY = "%engine start random-tiny --num-blocks 256 --dtype float32"
LONG_PROMPT = "the quick brown fox jumps over the lazy dog " * 20


def engine_called(name: str) -> ConnectionInfo:
    return next(info for info in list_connections() if info.name == name)


def processes_of(info: ConnectionInfo) -> list[psutil.Process]:
    found = engine_processes.processes_of(info)
    assert len(found) == 2, found
    return found


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_start_generate_status_stop_with_a_real_model(kernel: Kernel, clean_afterwards: None) -> None:
    started = kernel.run(RANDOM_TINY + " -o llm")
    for stage in ("fetch", "load", "profile", "kv", "ready"):
        assert f"✓ {stage}" in started.text
    assert "KV cache 256 blocks of 16 tokens" in started.text
    assert len(started.outputs) == 1
    kernel.run(f"%%generate -o first --temperature 0 --max-tokens 20 --raw\n{LONG_PROMPT}")
    kernel.run(f"%%generate -o second --temperature 0 --max-tokens 20 --raw\n{LONG_PROMPT}")
    same, cached, prompt = kernel.value(
        "(first.token_ids == second.token_ids, second.num_cached_tokens, second.num_prompt_tokens)"
    )
    assert same
    assert cached >= prompt - 16
    assert (
        f"{cached} of {prompt} prompt tokens reused"
        in kernel.run(f"%%generate --temperature 0 --max-tokens 20 --raw\n{LONG_PROMPT}").text
    )
    status = kernel.run("%engine status").text
    assert "0 of 256 in use" in status
    assert "0 running, 0 waiting" in status
    ps = kernel.run("%engine ps")
    assert "random-tiny" in ps.outputs[0]["data"]["text/html"]
    assert "ready: engine core 0" in kernel.run("%engine logs").text
    processes = processes_of(engine_called("random-tiny"))
    stopped = kernel.run("%engine stop").text
    assert "2 processes are gone" in stopped
    assert "MiB of memory came back" in stopped
    assert_gone(processes)
    assert list_connections() == []


def test_a_restarted_kernel_finds_its_engine_warm_and_its_old_request_ended(
    start_kernel: StartKernel,
) -> None:
    kernel = start_kernel()
    kernel.run(start_line(tokens_per_second=100))
    kernel.run(f"%%generate --max-tokens 3 --raw\n{LONG_PROMPT}")
    kernel.run("%%generate -a --max-tokens 3000\nhi\n")
    processes = processes_of(engine_called("random-tiny"))
    # The cell would go on for 30 seconds.
    assert kernel.restart() < 20
    attached = kernel.run("%engine attach")
    assert "attached to engine 'random-tiny'" in attached.text
    cell = kernel.run(f"%%generate -o answer --max-tokens 3 --raw\n{LONG_PROMPT}")
    cached, prompt = kernel.value("(answer.num_cached_tokens, answer.num_prompt_tokens)")
    assert cached >= prompt - 16
    assert f"{cached} of {prompt} prompt tokens reused" in cell.text
    assert "0 running, 0 waiting" in kernel.run("%engine status").text
    assert processes == processes_of(engine_called("random-tiny"))
    kernel.run("%engine stop")


def test_running_all_cells_again_starts_no_second_engine(kernel: Kernel, start_kernel: StartKernel) -> None:
    other, kernel = kernel, start_kernel()
    start, fewer = (start_line(blocks=blocks, tokens_per_second=1000) for blocks in (256, 128))
    cells = [start, "%generate -o answer --max-tokens 3 --raw hi"]
    for now in (None, False, True):
        if now is not None:
            kernel.restart(now=now)
            # It is not attached yet, and is this notebook's all the same.
            refusal = kernel.run_any(fewer).text
            assert "is running already, and differs: num_gpu_blocks_override is 256 there" in refusal
        for source in cells * 2:
            cell = kernel.run(source)
            if source == start:
                assert ("runs already, with these arguments" in cell.text) is (
                    now is not None or "ready after" not in cell.text
                )
    assert len(list_connections()) == 1
    assert "`%engine attach random-tiny` joins it" in other.run_any(start).text
    differs = kernel.run_any(fewer).text
    assert "num_gpu_blocks_override is 256 there, 128 here" in differs
    assert "`%engine load random-tiny" in differs
    assert "is ready after" in kernel.run(f"{start} --new").text
    assert len(list_connections()) == 2
    kernel.run("%engine stop")
    kernel.run("%engine stop random-tiny")


def test_a_killed_kernel_leaves_an_engine_that_another_notebook_can_take_over(
    kernel: Kernel, start_kernel: StartKernel
) -> None:
    first, second = start_kernel(), kernel
    first.run(start_line(tokens_per_second=100))
    first.run("%%generate -a --max-tokens 3000\nhi\n")
    first.kill()
    second.run("%engine attach")
    assert "3 tokens" in second.run("%%generate --max-tokens 3\nhi\n").text
    assert "processes are gone" in second.run("%engine stop").text


def test_two_notebooks_share_one_engine_and_have_another_each(
    kernel: Kernel, start_kernel: StartKernel
) -> None:
    first, second = start_kernel(), kernel
    first.run(start_line(tokens_per_second=200))
    first.run(start_line(name="own", tokens_per_second=200))
    second.run("%engine attach random-tiny")
    second.run(start_line(name="other", tokens_per_second=200))
    slow = first.start("%%generate --engine random-tiny --max-tokens 3000\nhi\n")
    first.wait_for_text(slow, "ABC")
    for name in ("random-tiny", "other"):
        second.run(f"%%generate -o answer --engine {name} --max-tokens 5\nhi\n")
        assert second.value("answer.text") == "ABCDE"
    ps = {line.split()[0]: line for line in second.run("%engine ps").text.splitlines()}
    assert ps["random-tiny"].endswith("attached")
    assert ps["other"].endswith("default")
    assert ps["own"].split()[3] == "1"
    second.run("%engine detach random-tiny")
    first.interrupt()
    assert first.finish(slow).status == "error"
    assert "not attached here" in second.run_any("%%generate --engine random-tiny\nhi\n").text
    second.run("%engine stop")
    first.run("%engine stop own\n%engine stop random-tiny")
    assert list_connections() == []


def test_an_interrupted_start_leaves_nothing(kernel: Kernel, clean_afterwards: None) -> None:
    cell = kernel.start(start_line(load_seconds=60))
    kernel.wait_for_text(cell, "the model that writes the alphabet")
    processes = processes_of(engine_called("random-tiny"))
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.outputs[-1]["traceback"] == [
        "KeyboardInterrupt: start interrupted; what had been started is ended"
    ]
    assert "✗ load" in cell.text
    assert_gone(processes)
    assert list_connections() == []


def test_a_start_that_fails_says_why(kernel: Kernel, clean_afterwards: None) -> None:
    cell = kernel.run_any("%engine start random-tiny --num-blocks 2 --max-model-len 2048")
    assert cell.status == "error"
    assert "max_model_len" in cell.text
    missing = kernel.run_any("%engine start /no/such/model")
    assert missing.outputs[-1]["text"].startswith("UsageError: %engine start: ")
    assert "/no/such/model" in missing.text
    assert list_connections() == []


def test_shutting_a_kernel_down_is_quick_while_it_streams(start_kernel: StartKernel) -> None:
    kernel = start_kernel()
    kernel.run(start_line(tokens_per_second=100) + " --keep-alive 0")
    kernel.run("%%generate -a --max-tokens 3000\nhi\n")
    processes = processes_of(engine_called("random-tiny"))
    # The cell would go on for 30 seconds.
    assert kernel.close() < 20
    assert_gone(processes)


def test_unloading_detaches_and_loading_finds_the_engine_again(
    kernel: Kernel, clean_afterwards: None
) -> None:
    kernel.run(start_line(tokens_per_second=100))
    kernel.run("%generate -a -o later --max-tokens 3000 hi")
    assert "goes on without this notebook" in kernel.run("%unload_ext nbengine").text
    assert kernel.value("later.result(60).finish_reason") == "abort"
    assert "not found" in kernel.run_any("%engine status").text
    kernel.run("%load_ext nbengine\n%engine attach")
    kernel.run("%%generate --max-tokens 3\nhi\n")
    kernel.run("%engine stop")


def test_reap_ends_engines_that_nobody_is_attached_to(kernel: Kernel, clean_afterwards: None) -> None:
    kernel.run(start_line(tokens_per_second=100))
    kernel.run(start_line(name="lonely", tokens_per_second=100))
    kernel.run("%engine detach lonely")
    assert kernel.run("%engine reap").text.strip() == "nothing to reap"
    assert "ended engine 'lonely', which nobody was attached to" in kernel.run("%engine reap --all").text
    assert [info.name for info in list_connections()] == ["random-tiny"]
    kernel.run("%engine stop")


def test_an_engine_that_dies_while_nobody_asks_is_noticed(kernel: Kernel, clean_afterwards: None) -> None:
    kernel.run(start_line(tokens_per_second=100))
    processes = processes_of(engine_called("random-tiny"))
    os.kill(processes[0].pid, signal.SIGKILL)
    assert_gone(processes)
    cell = kernel.run_any("%generate hi")
    assert cell.outputs[-1]["ename"] == "EngineDeadError"
    assert "no engine is running here" in kernel.run_any("%generate hi").text
