"""`%generate` and `%%generate` where the cell blocks: a terminal, or code."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, InvalidArgumentError, RequestError
from nbengine.magics.extension import unload
from nbengine.magics.generation.result import GenerationHandle, GenerationResult
from tests.unit.magics.conftest import FakeBackend, FakeClient

Capture = pytest.CaptureFixture[str]


def test_the_answer_is_printed_once_and_the_result_is_in_underscore(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    outcome = shell.run_cell("%%generate -o answer\nSay hello\n")
    outcome.raise_error()
    printed = capsys.readouterr().out
    assert printed.startswith("Hello world\n[3 tokens")
    assert "2 of 4 prompt tokens reused" in printed
    assert printed.count("Hello world") == 1
    assert "Out[" not in printed
    result = shell.user_ns["answer"]
    assert result is shell.user_ns["_"] is outcome.result
    assert isinstance(result, GenerationResult)
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello world", [5, 4, 2], "stop")
    assert (result.num_cached_tokens, result.num_prompt_tokens, result.logprobs) == (2, 4, None)
    assert result.outputs[0].text == str(result) == "Hello world"
    assert "Hello" not in repr(result)


def test_a_terminal_prints_every_answer_once(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%%generate -n 3\nSay hello\n").raise_error()
    printed = capsys.readouterr().out
    assert printed.startswith("Hello world\n\n2.\nHello world\n\n3.\nHello world\n[9 tokens")
    assert [c.text for c in shell.user_ns["_"].outputs] == ["Hello world"] * 3


def test_log_probabilities_are_in_the_result(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%%generate --logprobs 0 -o answer\nSay hello\n").raise_error()
    answer = shell.user_ns["answer"]
    assert engine.requests[0][1].logprobs == 0
    assert answer.logprobs == answer.outputs[0].logprobs
    assert [
        entry[token_id].decoded_token
        for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True)
    ] == [
        "Hello",
        " wor",
        "ld",
    ]


def test_the_prompt_goes_through_the_chat_template_with_variables(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    shell.user_ns.update(topic="bees", persona="a poet")
    shell.run_cell(
        '%%generate --system "You are {persona}"\nOn {topic}: {"json": true} {{topic}}\n'
    ).raise_error()
    prompt, params = engine.requests[0]
    assert prompt == {"prompt": '<system>You are a poet<user>On bees: {"json": true} {topic}'}
    assert (params.temperature, params.max_tokens) == (0.5, 512)


def test_raw_prompts_bypass_the_template(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%%generate --raw\nOnce upon\n").raise_error()
    engine.has_chat_template = False
    shell.run_cell("%%generate\nOnce upon\n").raise_error()
    assert [prompt for prompt, _ in engine.requests] == ["Once upon", "Once upon"]
    for flag in ("--chat", "--system S"):
        with pytest.raises(UsageError, match="no chat template"):
            shell.run_cell(f"%%generate {flag}\nOnce upon\n").raise_error()


def test_a_prompt_reaches_the_engine_byte_for_byte(shell: InteractiveShell, engine: FakeClient) -> None:
    body = "   indented\n\t>>> print('{x}')\n   \n\\n 'quoted' \"\"\" é\u2028 %magic !ls ?\n"
    shell.run_cell("%%generate --raw\n" + body).raise_error()
    assert engine.requests[0][0] == body.removesuffix("\n")


@pytest.mark.parametrize(
    "prompt", ["What is the capital of France?", "it's 5 o'clock?", "a list: [1, 2]?", "why??"]
)
def test_a_line_prompt_may_end_with_a_question_mark(
    shell: InteractiveShell, engine: FakeClient, prompt: str
) -> None:
    shell.run_cell(f"%generate --raw {prompt}").raise_error()
    shell.run_cell(f"answer = %generate --raw {prompt}\nlength = len(answer.text)").raise_error()
    assert [sent for sent, _ in engine.requests] == [prompt, prompt]
    assert shell.user_ns["length"] == len("Hello world")


def test_a_question_inside_a_string_is_left_alone(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell('text = """\n%generate what?\n"""').raise_error()
    assert shell.user_ns["text"] == "\n%generate what?\n"
    assert engine.requests == []


def test_earlier_cells_and_results_can_be_named(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("x = 1", store_history=True)
    shell.run_cell("'two'", store_history=True)
    shell.run_cell("%%generate --raw -o first\n{In[1]} {Out[2]}\n", store_history=True).raise_error()
    shell.run_cell(
        "%%generate --raw\n{first} {Out[3].finish_reason} {In[3]}\n", store_history=True
    ).raise_error()
    assert engine.requests[0][0] == "x = 1 two"
    assert engine.requests[1][0] == "Hello world stop %%generate --raw -o first\n{In[1]} {Out[2]}"
    assert shell.user_ns["_i"] == "%%generate --raw -o first\n{In[1]} {Out[2]}"


def test_defaults_come_from_config(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("%config NBEngine.temperature = 0.7").raise_error()
    shell.run_cell("%config NBEngine.system = 'Be brief.'").raise_error()
    shell.run_cell("%generate hi").raise_error()
    prompt, params = engine.requests[0]
    assert params.temperature == 0.7
    assert prompt == {"prompt": "<system>Be brief.<user>hi"}


def test_without_an_engine_one_line_says_what_to_do(shell: InteractiveShell, capsys: Capture) -> None:
    outcome = shell.run_cell("%%generate\nhi\n")
    assert isinstance(outcome.error_in_exec, UsageError)
    printed = capsys.readouterr()
    assert printed.err == "UsageError: no engine is running here: `%engine start` starts one\n"
    assert printed.out == ""


@pytest.mark.parametrize(
    "refusal",
    [RequestError("the prompt has 9999 tokens"), InvalidArgumentError("prompt", 3, "a string")],
)
def test_a_refused_request_is_one_line(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, refusal: Any
) -> None:
    engine.refusal = refusal
    assert isinstance(shell.run_cell("%%generate\nhi\n").error_in_exec, UsageError)
    assert capsys.readouterr().err == f"UsageError: {refusal}\n"


def test_a_request_refused_by_the_engine_is_one_line_too(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    submit = engine.submit

    def refusing(*args: Any, **options: Any) -> Any:
        collector = submit(*args, **options)
        collector.put_error(RequestError("unknown token id 9"))
        return collector

    engine.submit = refusing  # type: ignore[method-assign]
    shell.run_cell("%%generate\nhi\n")
    assert capsys.readouterr().err == "UsageError: unknown token id 9\n"


def test_a_dead_engine_raises_keeps_the_text_and_leaves_the_session(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    engine.words = None
    submit = engine.submit

    def dying(*args: Any, **options: Any) -> Any:
        collector = submit(*args, **options)
        engine.emit("partial")
        collector.put_error(EngineDeadError("core 0 was killed", "log line"))
        return collector

    engine.submit = dying  # type: ignore[method-assign]
    outcome = shell.run_cell("%%generate -o answer\nhi\n")
    assert isinstance(outcome.error_in_exec, EngineDeadError)
    printed = capsys.readouterr().out
    assert "partial" in printed
    assert "EngineDeadError" in printed
    assert "log line" in printed
    assert (shell.user_ns["answer"].text, shell.user_ns["answer"].finish_reason) == ("partial", "abort")
    shell.run_cell("%engine start random-tiny").raise_error()
    assert backend.clients["random-tiny"] is not engine


def test_an_interrupt_keeps_the_text_and_aborts_the_request(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = None
    submit = engine.submit

    def interrupted(*args: Any, **options: Any) -> Any:
        collector = submit(*args, **options)
        engine.emit("some ")
        engine.emit("text")
        blocking = collector.get_blocking
        calls = iter([blocking])

        def get_blocking(timeout: float | None = None) -> Any:
            for first in calls:
                return first(timeout)
            engine.emit(" and more")
            raise KeyboardInterrupt

        monkeypatch.setattr(collector, "get_blocking", get_blocking)
        return collector

    engine.submit = interrupted  # type: ignore[method-assign]
    outcome = shell.run_cell("%%generate -o answer\nhi\n")
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    answer = shell.user_ns["answer"]
    assert (answer.text, answer.finish_reason) == ("some text and more", "abort")
    assert shell.user_ns["_"] is answer
    assert engine.aborted == [answer.request_id]
    printed = capsys.readouterr().out
    assert "some text and more\n[ended early · 3 tokens" in printed
    assert "Traceback" not in printed
    engine.submit = submit  # type: ignore[method-assign]
    engine.words = ["next"]
    shell.run_cell("%%generate -o answer\nhi\n").raise_error()
    assert shell.user_ns["answer"].text == "next"


def test_another_engine_can_be_chosen(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    shell.run_cell("%generate to the default").raise_error()
    shell.run_cell("%generate --engine random-tiny to the first").raise_error()
    assert len(backend.clients["second"].requests) == len(engine.requests) == 1
    with pytest.raises(UsageError, match=r"there is no engine 'secnd'; did you mean second\?"):
        shell.run_cell("%generate --engine secnd hi").raise_error()


def test_the_background_handle_delivers_the_result(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    shell.run_cell("%%generate -a -o later\nhi\n").raise_error()
    handle = shell.user_ns["later"]
    assert isinstance(handle, GenerationHandle)
    assert handle is shell.user_ns["_"]
    assert not handle.done
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    engine.emit("done", "stop")
    assert handle.result(timeout=60).text == handle.text == "done"
    assert handle.done


def test_a_background_generation_can_be_cancelled(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    handle = shell.run_cell("%%generate -a\nhi\n").result
    handle.cancel()
    result = handle.result(timeout=60)
    assert (result.text, result.finish_reason) == ("", "abort")
    assert engine.aborted == [handle.request_id]
    handle.cancel()
    assert len(engine.aborted) == 1


def test_a_handle_can_be_awaited_and_its_error_arrives(shell: InteractiveShell, engine: FakeClient) -> None:
    async def wait_for(handle: GenerationHandle) -> GenerationResult:
        return await handle

    engine.words = None
    good = shell.run_cell("%%generate -a\nhi\n").result
    engine.emit("fine", "stop")
    assert asyncio.run(wait_for(good)).text == "fine"
    bad = shell.run_cell("%%generate -a\nhi\n").result
    engine.collectors[-1].put_error(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(wait_for(bad))
    with pytest.raises(UsageError, match="no engine is running"):
        shell.run_cell("%generate hi").raise_error()


def test_no_thread_is_left_that_could_hold_up_the_exit(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    handle = shell.run_cell("%%generate -a\nhi\n").result
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    unload(shell)
    assert handle.result(timeout=60).finish_reason == "abort"


def test_no_stream_shows_the_answer_at_the_end(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%%generate --no-stream\nhi\n").raise_error()
    assert capsys.readouterr().out.startswith("Hello world\n[3 tokens")


def test_a_line_magic_can_be_assigned_and_looped(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("answer = %generate hi").raise_error()
    assert shell.user_ns["answer"].text == "Hello world"
    code = "found = []\nfor word in ['a', 'b']:\n    item = %generate --raw {word}\n    found.append(item.prompt)"
    shell.run_cell(code).raise_error()
    assert shell.user_ns["found"] == ["a", "b"]
    capsys.readouterr()
    shell.run_cell("answer")
    assert "Hello" not in capsys.readouterr().out


def test_help_prints_the_flags(shell: InteractiveShell, capsys: Capture) -> None:
    for code in ("%%generate -h", "%generate --help", "%%generate -h\nbody\n"):
        assert shell.run_cell(code).success
        assert "--max-tokens N" in capsys.readouterr().out


def test_a_prompt_goes_to_the_rank_that_is_named_and_the_cell_says_who_answered(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --dp 2").raise_error()
    shell.user_ns["where"] = 1
    for line in ("%%generate -o answer -t {where}\nhi\n", "%%generate\nhi\n"):
        capsys.readouterr()
        shell.run_cell(line).raise_error()
        assert f"rank {0 if '-t' not in line else 1}]" in capsys.readouterr().out
    assert backend.clients["random-tiny"].asked_ranks == [1, None]
    assert shell.user_ns["answer"].metrics.data_parallel_ranks == (1,)


def test_one_engine_core_is_not_worth_a_word(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%%generate\nhi\n").raise_error()
    assert "rank" not in capsys.readouterr().out


@pytest.mark.parametrize(("size", "ranks"), [(1, "ranks 0"), (3, "ranks 0, 1, 2")])
def test_a_rank_that_there_is_not_is_one_line_with_those_there_are(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture, size: int, ranks: str
) -> None:
    shell.run_cell(f"%engine start random-tiny --dp {size}").raise_error()
    capsys.readouterr()
    for rank in ("9", "-1"):
        shell.run_cell(f"%%generate -t {rank}\nhi\n")
        assert capsys.readouterr().err == (
            f"UsageError: -t {rank}: the engine cores of engine 'random-tiny' have the {ranks}\n"
        )
    assert backend.clients["random-tiny"].requests == []
