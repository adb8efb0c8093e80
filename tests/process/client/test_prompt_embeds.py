"""Prompts given as embeddings, through every client, in frames and in shared memory, and what deaths leave of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from process_support.engine_under_test import wait_for
from process_support.raw_client import RawClient
from stopping import stop

from nbengine import LLM, AsyncLLM, InvalidArgumentError, SamplingParams
from nbengine.ipc.liveness import ProcessIdentity
from nbengine.ipc.messages import EngineCoreRequest, EngineCoreRequestType, FinishReason
from nbengine.ipc.serial import EXT_TENSOR, MsgpackEncoder
from nbengine.ipc.shm_tensors import OOB_SIZE_THRESHOLD, ShmTensorSender
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.directories import MARKER
from tests.process.client.conftest import left_idle

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]
Script = Callable[[str], "subprocess.Popen[str]"]

HIDDEN_SIZE = 2048
KNOBS = {"hidden_size": HIDDEN_SIZE}
SMALL, LARGE = 3, 200
"""Prompt tokens; their embeddings have 24 KB and 1.6 MB."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def embeds(length: int, last: int) -> np.ndarray[Any, Any]:
    """Embeddings whose next tokens are `last + 1, …`."""
    rows = np.random.default_rng(last).standard_normal((length, HIDDEN_SIZE)).astype(np.float32)
    rows[-1, -1] = last
    return rows


def counting(last: int) -> list[int]:
    return list(range(last + 1, last + 5))


def arenas(info: ConnectionInfo) -> list[str]:
    return sorted(path.name for path in Path(info.tensor_dir).iterdir() if path.name != MARKER)


@pytest.fixture(scope="module")
def engine_of_all(start_shared: Callable[..., LLM]) -> LLM:
    return start_shared(LLM, knobs=KNOBS)


@pytest.fixture
def shared_llm(engine_of_all: LLM) -> Iterator[LLM]:
    """One engine for the tests that leave it as it is."""
    with left_idle(engine_of_all):
        yield engine_of_all


@pytest.fixture
def guest(shared_llm: LLM) -> Iterator[AsyncLLM]:
    """A streaming client of the shared engine."""
    llm = AsyncLLM.attach(shared_llm.llm_engine.engine_core.info.name)  # type: ignore[attr-defined]
    yield llm
    llm.detach()


@pytest.mark.parametrize("multiprocess", [True, False])
def test_a_mixed_batch_is_generated_in_order(
    shared_llm: LLM, start_llm: StartLLM, multiprocess: bool
) -> None:
    llm = shared_llm if multiprocess else start_llm(knobs=KNOBS, multiprocess=False)
    prompts = [
        {"prompt_embeds": embeds(SMALL, 10)},
        {"prompt_token_ids": [20]},
        {"prompt_embeds": torch.from_numpy(embeds(LARGE, 30)), "prompt": "shown"},
        {"prompt_embeds": torch.from_numpy(embeds(LARGE, 40)).bfloat16()},
        {"prompt_embeds": embeds(LARGE, 50).astype(np.float64)},
        [60, 70],
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        counting(last) for last in (10, 20, 30, 40, 50, 70)
    ]
    assert [output.prompt_token_ids for output in outputs] == [None, [20], None, None, None, [60, 70]]
    assert [output.prompt for output in outputs] == [None, None, "shown", None, None, None]
    (engine,) = llm.stats().engines
    assert engine.num_free_blocks == engine.num_blocks


def test_a_list_of_integers_is_one_prompt(start_llm: StartLLM) -> None:
    llm = start_llm(multiprocess=False)
    for prompts, lasts in (([5, 6], [6]), ([[5, 6], [9]], [6, 9]), ((5, 6), [6]), ([], [])):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [counting(last) for last in lasts]


def test_the_step_engine_takes_them_and_wrong_ones_raise_to_the_caller(shared_llm: LLM) -> None:
    engine = shared_llm.llm_engine
    engine.add_request("good", {"prompt_embeds": embeds(LARGE, 10)}, GREEDY)
    for wrong in (embeds(LARGE, 10)[:, 1:], np.full((2, HIDDEN_SIZE), np.inf), [[1.0]]):
        with pytest.raises(InvalidArgumentError, match="prompt_embeds must be"):
            engine.add_request("wrong", {"prompt_embeds": wrong}, GREEDY)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    assert [(output.request_id, output.outputs[0].token_ids) for output in finished] == [
        ("good", counting(10))
    ]


async def test_many_are_streamed_at_once(guest: AsyncLLM) -> None:
    async def last_of(length: int, last: int) -> list[int]:
        async for output in guest.generate({"prompt_embeds": embeds(length, last)}, GREEDY):
            tokens = output.outputs[0].token_ids
        return tokens

    lasts = range(1, 31)
    results = await asyncio.gather(*(last_of(LARGE if last % 2 else SMALL, last) for last in lasts))
    assert results == [counting(last) for last in lasts]


def test_prefixes_are_shared_by_content(shared_llm: LLM) -> None:
    llm = shared_llm
    assert llm.reset_prefix_cache()
    rows = embeds(LARGE, 10)
    changed = rows.copy()
    changed[100, 5] += 1

    def cached(prompt: dict[str, Any]) -> int:
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert cached({"prompt_embeds": rows}) == 0
    assert cached({"prompt_embeds": torch.from_numpy(rows)}) == 192
    assert cached({"prompt_embeds": changed}) == 96
    assert cached({"prompt_embeds": rows, "cache_salt": "mine"}) == 0
    assert cached({"prompt_token_ids": [0] * LARGE}) == 0


def test_several_completions_share_the_prompt(shared_llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, n=3)
    (output,) = shared_llm.generate({"prompt_embeds": embeds(LARGE, 77)}, params, use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [counting(77)] * 3
    assert output.prompt_token_ids is None


# Shared memory.


def test_only_large_tensors_take_shared_memory_which_goes_with_the_client(start_async: StartAsync) -> None:
    owner = start_async(knobs=KNOBS)
    info = owner.connection
    assert Path(info.tensor_dir).stat().st_mode & 0o777 == 0o700

    def generate(llm: AsyncLLM, length: int) -> list[int]:
        collector = llm.submit({"prompt_embeds": embeds(length, 10)}, GREEDY)
        while not (output := collector.get_blocking(timeout=60)).finished:
            pass
        return output.outputs[0].token_ids

    assert generate(owner, SMALL) == counting(10)
    assert arenas(info) == []
    assert embeds(LARGE, 10).nbytes > OOB_SIZE_THRESHOLD
    assert generate(owner, LARGE) == counting(10)
    assert [name.partition("-")[0] for name in arenas(info)] == ["1"]
    guest = AsyncLLM.attach(info.name)
    assert generate(guest, LARGE) == counting(10)
    assert len(arenas(info)) == 2
    guest.detach()
    wait_for(lambda: len(arenas(info)) == 1, "the end of the guest's arena")
    assert generate(owner, LARGE) == counting(10)
    owner.shutdown()
    assert not Path(info.tensor_dir).exists()


async def test_a_lost_lease_takes_the_arena_along_and_the_next_gets_its_own(
    start_async: StartAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heartbeats alone keep the leases of a process that the host cannot look at.
    monkeypatch.setattr("nbengine.client.link.lease.this_process", lambda: ProcessIdentity(0, 0))
    llm = start_async(knobs=KNOBS, lease=3.0)
    client, info = llm.engine_core, llm.connection
    prompt = {"prompt_embeds": embeds(LARGE, 10)}
    before = [output async for output in llm.generate(prompt, GREEDY)][-1]
    (arena,) = arenas(info)
    index, sender = client.client_index, client._tensors
    assert sender is not None
    client.link._lease.heartbeat_interval, client.link._lease.heartbeat_at = 0.2, float("inf")
    wait_for(lambda: client.client_index > index and client.standing.error is None, "a new lease")
    assert arenas(info) == []
    assert sender._arena is None
    after = [output async for output in llm.generate(prompt, GREEDY)][-1]
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert len(arenas(info)) == 1
    assert arenas(info) != [arena]


def test_without_its_directory_tensors_go_through_the_socket(start_llm: StartLLM) -> None:
    llm = start_llm(knobs=KNOBS)
    shutil.rmtree(llm.llm_engine.engine_core.info.tensor_dir)  # type: ignore[attr-defined]
    outputs = llm.generate({"prompt_embeds": embeds(LARGE, 10)}, GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == counting(10)


def test_a_client_that_is_killed_while_its_tensors_are_under_way_leaves_none(
    guest: AsyncLLM, script: Script
) -> None:
    info = guest.connection
    assert guest.ready is not None
    core = psutil.Process(guest.ready.pid)
    there = arenas(info)
    process = script(
        "import numpy as np\n"
        "from nbengine import AsyncLLM, SamplingParams\n"
        f"llm = AsyncLLM.attach({info.name!r})\n"
        "print('attached', flush=True)\n"
        "input()\n"
        "for _ in range(5):\n"
        f"    llm.submit({{'prompt_embeds': np.ones(({LARGE}, {HIDDEN_SIZE}))}}, SamplingParams())\n"
        "print('submitted', flush=True)\n"
        "input()\n"
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "attached\n"
    stop(core.pid)
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "submitted\n"
        wait_for(lambda: len(arenas(info)) == len(there) + 1, "the arena of the client")
        process.kill()
        wait_for(lambda: arenas(info) == there, "the end of the killed client's arena")
    finally:
        core.resume()
    collector = guest.submit({"prompt_embeds": embeds(LARGE, 10)}, GREEDY)
    while not (output := collector.get_blocking(timeout=60)).finished:
        pass
    assert output.outputs[0].token_ids == counting(10)


def test_an_engine_whose_processes_are_all_killed_leaves_no_tensors(start_llm: StartLLM) -> None:
    llm = start_llm(knobs=KNOBS)
    llm.generate({"prompt_embeds": embeds(LARGE, 10)}, GREEDY, use_tqdm=False)
    info = llm.llm_engine.engine_core.info  # type: ignore[attr-defined]
    assert arenas(info)
    os.killpg(info.host_pid, signal.SIGKILL)
    wait_for(lambda: not Path(info.tensor_dir).exists(), "the end of the tensor directory")


# Handles that nobody should send.


@pytest.fixture
def raw(shared_llm: LLM) -> Iterator[RawClient]:
    """A client of the shared engine, which such handles must not harm either."""
    client = RawClient(shared_llm.llm_engine.engine_core.info).attach()  # type: ignore[attr-defined]
    yield client
    client.leave()


def add_with_handle(client: RawClient, request_id: str, handle: dict[str, Any], **header: Any) -> None:
    fields = {"dtype": "float32", "shape": (LARGE, HIDDEN_SIZE), **header}
    tensor = msgspec.msgpack.Ext(
        EXT_TENSOR, msgspec.msgpack.encode((fields["dtype"], fields["shape"], handle))
    )
    request = EngineCoreRequest(request_id, None, GREEDY, prompt_embeds=tensor)
    client.send_frames(EngineCoreRequestType.ADD.value, msgspec.msgpack.encode(request))


def test_bad_handles_are_refused_to_their_sender_and_give_their_slots_back(raw: RawClient) -> None:
    sender = ShmTensorSender(raw.info.tensor_dir, raw.client_index)
    data = memoryview(embeds(LARGE, 10).tobytes())

    def taken() -> dict[str, Any]:
        handle = sender(data)
        assert handle is not None
        return handle

    secret = Path(raw.info.tensor_dir) / ("9-" + "0" * 32)
    secret.symlink_to("/etc/hostname")
    bad: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"name": "../engine.json", "offset": 0, "ticket": 1}, {}),
        ({"name": secret.name, "offset": 0, "ticket": 1}, {"shape": (1, 4)}),
        (taken() | {"ticket": 77}, {}),
        (taken() | {"offset": 2**40}, {}),
        (taken(), {"shape": (LARGE, HIDDEN_SIZE, 2**20)}),
        (taken(), {"shape": (0,)}),
        (taken(), {"dtype": "load"}),
        (taken(), {"shape": (LARGE * HIDDEN_SIZE,)}),
        (taken(), {"shape": (LARGE, HIDDEN_SIZE // 2)}),
    ]
    for number, (handle, header) in enumerate(bad):
        add_with_handle(raw, f"bad{number}", handle, **header)
    add_with_handle(raw, "good", taken())
    names = [f"bad{number}" for number in range(len(bad))]
    raw.wait_finished("good", *names)
    assert raw.tokens("good") == counting(10)
    for name in names:
        assert raw.finish_reason(name) is FinishReason.ERROR
        assert raw.outputs[name][-1].error
    # Two slots were never named rightly; every other one is free again, so that a ring of 64 MiB takes many more.
    assert raw.call("ping") == (None, "pong")
    secret.unlink()
    sender.close()


def test_fuzzed_handles_never_harm_the_engine(raw: RawClient) -> None:
    chooser = np.random.default_rng(5)
    sender = ShmTensorSender(raw.info.tensor_dir, raw.client_index)
    request = EngineCoreRequest("r", None, GREEDY, prompt_embeds=embeds(50, 10))
    encoder = MsgpackEncoder(oob_tensor_consumer=sender)
    for _ in range(60):
        (frame,) = encoder.encode(request)
        fuzzed = bytearray(frame)
        for position in chooser.integers(0, len(fuzzed), 3):
            fuzzed[position] ^= int(chooser.integers(1, 256))
        raw.send_frames(EngineCoreRequestType.ADD.value, bytes(fuzzed))
    raw.add("good", [7], max_tokens=2)
    raw.wait_finished("good")
    assert raw.tokens("good") == [8, 9]
    sender.close()
