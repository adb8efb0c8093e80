"""An engine keeps the answers of a client that is killed, and the same session finds them again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable

import pytest

from nbengine import AsyncLLM, RequestOutput, SamplingParams
from nbengine.engine.core.transcripts import CLIENT_LEFT
from nbengine.errors import RequestLostError
from nbengine.frontend.outputs.transcripts import Transcript

StartAsync = Callable[..., AsyncLLM]
Script = Callable[[str], "subprocess.Popen[str]"]

FOREVER = 400
VICTIM = f"""
import asyncio
from nbengine import AsyncLLM, RequestOutputKind, SamplingParams

async def stream(llm, first, rank, n=1):
    params = SamplingParams(n=n, max_tokens={FOREVER}, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)
    prompt = {{"prompt_token_ids": [first]}}
    async for output in llm.generate(prompt, params, data_parallel_rank=rank, transcript=f"count from {{first}}"):
        yield output

async def main():
    llm = AsyncLLM.attach("kept", session="notebook")
    streams = [stream(llm, 1, 0), stream(llm, 20, 1), stream(llm, 40, None, n=2)]
    # They stay open: this process is about to be killed in the middle of them.
    for answers, n in zip(streams, (1, 1, 2)):
        async for output in answers:
            if len(output.outputs) == n and all(len(each.token_ids) >= 5 for each in output.outputs):
                break
    print("streaming", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def counted_from(first: int, count: int) -> list[int]:
    return [token % 260 for token in range(first + 1, first + 1 + count)]


def by_prompt(transcripts: list[Transcript]) -> dict[str, Transcript]:
    return {transcript.prompt: transcript for transcript in transcripts}


async def begin(llm: AsyncLLM, first: int, rank: int, max_tokens: int) -> AsyncGenerator[RequestOutput, None]:
    """A stream that has begun."""
    stream = llm.generate(
        {"prompt_token_ids": [first]},
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        data_parallel_rank=rank,
        transcript=f"again from {first}",
    )
    await anext(stream)
    return stream


async def drain(stream: AsyncGenerator[RequestOutput, None]) -> None:
    async for _ in stream:
        pass


async def test_what_a_killed_client_had_asked_for_is_found_by_its_successor(
    start_async: StartAsync, script: Script
) -> None:
    owner = start_async(
        name="kept", bound=False, session="owner", data_parallel_size=2, knobs={"step_seconds": 0.04}
    )
    victim = script(VICTIM)
    assert victim.stdout is not None
    assert await asyncio.to_thread(victim.stdout.readline) == "streaming\n"
    # Another client of the same user may look, while it runs.
    running = by_prompt(await owner.transcripts("notebook"))
    assert {prompt: one.output.finished for prompt, one in running.items()} == {
        "count from 1": False,
        "count from 20": False,
        "count from 40": False,
    }
    victim.kill()
    victim.wait()
    successor = AsyncLLM.attach("kept", session="notebook")
    try:
        found = await successor.transcripts()
        assert [one.prompt for one in found] == ["count from 40", "count from 20", "count from 1"]
        for one in found:
            first = int(one.prompt.removeprefix("count from "))
            assert (one.session, one.cause, one.was_read) == ("notebook", CLIENT_LEFT, False)
            assert one.num_prompt_tokens == 1
            for completion in one.output.outputs:
                written, before = completion.token_ids, running[one.prompt].output.outputs[completion.index]
                assert len(before.token_ids) <= len(written) < FOREVER
                assert len(written) >= 5
                assert written == counted_from(first, len(written))
                assert completion.text.startswith(before.text)
                assert completion.finish_reason == "abort"
        assert [[each.index for each in one.output.outputs] for one in found] == [[0, 1], [0], [0]]
        await check_reading_and_forgetting(successor, owner, found)
        await check_a_core_that_dies(successor)
    finally:
        successor.detach()


async def check_reading_and_forgetting(successor: AsyncLLM, owner: AsyncLLM, found: list[Transcript]) -> None:
    newest, *older = found
    successor.read_transcripts([newest.request_id])
    assert await successor.transcript_sessions() == {"notebook": 2}
    assert [one.was_read for one in await successor.transcripts()] == [True, False, False]
    assert await successor.forget_transcripts([newest.request_id]) == 2
    assert await owner.forget_transcripts([one.request_id for one in older]) == 0
    assert await asyncio.to_thread(successor.transcripts_blocking) == older
    assert await successor.forget_transcripts() == 2
    assert await owner.transcript_sessions() == {}


async def check_a_core_that_dies(llm: AsyncLLM) -> None:
    """Check that a core that dies loses what it had kept, and that the others have theirs."""
    for first, rank in ((60, 0), (80, 1)):
        async for output in await begin(llm, first, rank, 3):
            assert output.outputs
    assert by_prompt(await llm.transcripts()).keys() == {"again from 60", "again from 80"}
    stream, lost = await begin(llm, 100, 0, FOREVER), await begin(llm, 120, 1, FOREVER)
    os.kill(next(core.pid for core in llm.connection.ready if core.rank == 1), signal.SIGKILL)
    with pytest.raises(RequestLostError):
        await drain(lost)
    left = by_prompt(await llm.transcripts())
    assert left.keys() == {"again from 60", "again from 100"}
    assert left["again from 60"].output.outputs[0].token_ids == [61, 62, 63]
    assert left["again from 60"].output.outputs[0].finish_reason == "length"
    assert not left["again from 100"].output.finished
    await stream.aclose()
