"""`LLM` and `LLMEngine` over a client that answers from memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, SamplingParams
from nbengine.client.calls import merged_stats
from nbengine.config import EngineArgs, EngineConfig
from nbengine.config.engine import WITHOUT_EFFECT
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidArgumentError,
    InvalidTypeError,
    RequestError,
    UtilityError,
)
from nbengine.frontend.llm_engine import LLMEngine
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.metrics.stats import SchedulerStats
from nbengine.runtime.progress import ProgressCallback
from nbengine.sampling_params import RequestOutputKind

Step = Callable[["EchoClient"], EngineCoreOutputs]


def ready_message() -> EngineReady:
    return EngineReady(
        rank=0,
        num_blocks=8,
        block_size=16,
        max_model_len=64,
        kv_cache_bytes=1,
        weights_bytes=1,
        device="cpu",
        dtype="float32",
        supported_tasks=["generate"],
        pid=1,
    )


class EchoClient:
    """Answers a request with its prompt's tokens in reverse, the youngest request first, two tokens a step."""

    connection = death = stall = None
    client_index = 0

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.requests: dict[str, EngineCoreRequest] = {}
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.shutdowns = 0
        self.step: Step | None = None
        self.start_error: Exception | None = None

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        if self.start_error is not None:
            raise self.start_error
        return ready_message()

    def get_output(self, on_quiet: Callable[[], object] | None = None) -> EngineCoreOutputs:
        if self.step is not None:
            return self.step(self)
        request_id = next(reversed(self.requests))
        request = self.requests[request_id]
        left = (request.prompt_token_ids or [])[::-1]
        new, rest = left[:2], left[2:]
        self.requests[request_id].prompt_token_ids = rest[::-1]
        if not rest:
            del self.requests[request_id]
        reason = None if rest else FinishReason.LENGTH
        return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, new, finish_reason=reason)])

    def add_request(self, request: EngineCoreRequest) -> None:
        self.seen.append(request)
        self.requests[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str], *, stopped: Collection[str] = ()) -> None:
        self.stopped += [request_id for request_id in request_ids if request_id in stopped]
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.requests.pop(request_id, None)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        answers = {"stats": merged_stats([[0, 1, 2, 8, 6]]), "reset_prefix_cache": True}
        if method in answers:
            future.set_result(answers[method])
        else:
            future.set_exception(UtilityError(f"no utility method {method!r}"))
        return future

    @property
    def engine_ranks(self) -> list[int]:
        return [0]

    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        raise AssertionError("nobody scales this engine")

    def check_alive(self) -> None:
        return

    def abandon(self) -> None:
        self.shutdowns += 1

    def release(self) -> None:
        self.shutdowns += 1

    def shutdown(self, *, drain: bool = False) -> None:
        self.shutdowns += 1


@pytest.fixture
def client(engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EchoClient:
    made = EchoClient(engine_config)
    monkeypatch.setattr("nbengine.frontend.llm_engine.resolve_files", lambda config, progress: engine_config)
    monkeypatch.setattr("nbengine.frontend.llm_engine.make_client", lambda *args, **kwargs: made)
    return made


@pytest.fixture
def llm(client: EchoClient) -> LLM:
    return LLM("tiny")


def test_outputs_come_in_the_order_of_the_prompts_whatever_finishes_first(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (6, 1, 4, 3)]
    outputs = llm.generate(prompts, SamplingParams(), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        prompt["prompt_token_ids"][::-1] for prompt in prompts
    ]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["the fox", {"prompt": "the fox"}])
def test_one_prompt_gives_one_output(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, use_tqdm=False)
    assert output.prompt == "the fox"


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_parameters_can_differ_by_prompt_and_stay_the_callers(llm: LLM, client: EchoClient) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)]
    llm.generate(["the fox", "the dog"], params, use_tqdm=False, priority=[2, 1])
    sent = [request.sampling_params for request in client.seen]
    assert [p.max_tokens for p in sent if p is not None] == [3, 5]
    assert all(p.output_kind is RequestOutputKind.FINAL_ONLY for p in sent if p is not None)
    assert [request.priority for request in client.seen] == [2, 1]
    assert params == [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)]


def test_without_parameters_the_models_own_defaults_apply(llm: LLM, client: EchoClient) -> None:
    llm.generate("the fox", use_tqdm=False)
    params = client.seen[0].sampling_params
    assert params is not None
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 33)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({"prompts": ["a", "b"], "sampling_params": [SamplingParams()]}, InvalidArgumentError),
        ({"prompts": ["a"], "sampling_params": ["x"]}, InvalidTypeError),
        ({"prompts": ["a"], "sampling_params": {"n": 1}}, InvalidTypeError),
        ({"prompts": ["a"], "priority": [1, 2]}, InvalidArgumentError),
        ({"prompts": 5}, InvalidTypeError),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_runs(
    llm: LLM, client: EchoClient, kwargs: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        llm.generate(**kwargs)
    assert client.seen == []


def test_a_bad_prompt_leaves_no_request_running(llm: LLM, client: EchoClient) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt"):
        llm.generate(["the fox", ""], use_tqdm=False)
    assert client.aborted == [request.request_id for request in client.seen]
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_interrupt_aborts_the_requests_and_the_next_call_works(llm: LLM, client: EchoClient) -> None:
    def interrupted(_: EchoClient) -> EngineCoreOutputs:
        raise KeyboardInterrupt

    client.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the fox", "the dog"], use_tqdm=False)
    assert len(client.aborted) == 2
    client.step = None
    assert len(llm.generate(["the fox"], use_tqdm=False)) == 1


def test_late_outputs_of_an_interrupted_call_do_not_reach_the_next_one(llm: LLM, client: EchoClient) -> None:
    def interrupted(_: EchoClient) -> EngineCoreOutputs:
        raise KeyboardInterrupt

    client.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate("the fox", use_tqdm=False)
    late = EngineCoreOutput(client.aborted[0], [1], finish_reason=FinishReason.LENGTH)

    def late_then_normal(echo: EchoClient) -> EngineCoreOutputs:
        echo.step = None
        return EngineCoreOutputs(outputs=[late])

    client.step = late_then_normal
    (output,) = llm.generate({"prompt_token_ids": [7, 8]}, use_tqdm=False)
    assert output.outputs[0].token_ids == [8, 7]


def test_a_refusal_by_the_engine_raises_and_aborts_the_rest(llm: LLM, client: EchoClient) -> None:
    def refuse_first(echo: EchoClient) -> EngineCoreOutputs:
        echo.step = None
        refused = next(iter(echo.requests))
        del echo.requests[refused]
        step = EngineCoreOutput(refused, [], finish_reason=FinishReason.ERROR, error="no room")
        return EngineCoreOutputs(outputs=[step])

    client.step = refuse_first
    with pytest.raises(RequestError, match="no room"):
        llm.generate(["the fox", "the dog"], use_tqdm=False)
    assert len(client.aborted) == 1


def test_an_engine_step_reports_a_refusal_without_losing_the_other_outputs(client: EchoClient) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("tiny"))
    bad = engine.add_request("bad", "the fox", SamplingParams())
    good = engine.add_request("good", "the dog", SamplingParams())
    client.step = lambda _: EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(bad, [], finish_reason=FinishReason.ERROR, error="no"),
            EngineCoreOutput(good, [5], finish_reason=FinishReason.LENGTH),
        ]
    )
    assert [output.request_id for output in engine.step()] == ["good"]
    assert engine.has_unfinished_requests()
    with pytest.raises(RequestError, match="request bad: no"):
        engine.step()
    assert not engine.has_unfinished_requests()


def test_an_engine_tells_the_core_of_stop_strings_and_aborts(client: EchoClient) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("tiny"))
    ids = engine.get_tokenizer().encode("a fox")
    stopped = engine.add_request(
        "r", "the fox", SamplingParams(stop=["fox"], output_kind=RequestOutputKind.DELTA)
    )
    client.step = lambda _: EngineCoreOutputs(outputs=[EngineCoreOutput(stopped, ids)])
    (output,) = engine.step()
    assert output.outputs[0].stop_reason == "fox"
    dropped = engine.add_request("mine", "the dog", SamplingParams())
    engine.abort_request("mine")
    assert client.aborted == [stopped, dropped]
    assert client.stopped == [stopped], "the engine counts the two apart"
    assert engine.get_num_unfinished_requests() == 0


def test_a_request_that_the_core_dropped_by_itself_ends(client: EchoClient) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("tiny"))
    request_id = engine.add_request("r", "the fox", SamplingParams())
    client.step = lambda _: EngineCoreOutputs(finished_requests=[request_id])
    engine.step()
    assert not engine.has_unfinished_requests()


def test_what_a_caller_sets_on_the_tokenizer_does_not_reach_the_engine(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    full = tokenizer.encode("the quick brown fox")
    assert len(tokenizer("the quick brown fox", truncation=True, max_length=2)["input_ids"]) == 2
    (output,) = llm.generate("the quick brown fox", SamplingParams(), use_tqdm=False)
    assert output.prompt_token_ids == full
    assert llm.get_tokenizer() is tokenizer


def test_chat_renders_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "the fox"}]
    (one,) = llm.chat(conversation, SamplingParams(), use_tqdm=False)
    two = llm.chat([conversation, conversation], SamplingParams(), use_tqdm=False)
    assert one.prompt == two[0].prompt == "<|user|>the fox<|assistant|>"
    assert len(two) == 2


def test_the_bar_counts_prompts_and_can_be_replaced(llm: LLM) -> None:
    bars = []

    class Bar:
        format_dict = {"elapsed": 2.0}

        def __init__(self, **kwargs: Any) -> None:
            self.total, self.count, self.closed = kwargs["total"], 0, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.postfix = text

        def close(self) -> None:
            self.closed = True

    llm.generate([{"prompt_token_ids": [1, 2]}] * 3, SamplingParams(), use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.count, bar.closed) == (3, 3, True)
    assert bar.postfix == "in 3 tok/s, out 3 tok/s"


def test_the_bar_counts_every_completion(llm: LLM) -> None:
    counts = []

    class Bar:
        format_dict = {"elapsed": 0.0}

        def __init__(self, **kwargs: Any) -> None:
            counts.append(kwargs["total"])

        def update(self, count: int) -> None:
            counts.append(count)

        def close(self) -> None:
            return

    prompts = [{"prompt_token_ids": [1, 2]}] * 3
    llm.generate(prompts, [SamplingParams(n=n) for n in (1, 4, 2)], use_tqdm=Bar)
    assert counts[0] == sum(counts[1:]) == 7


def test_n_completions_come_in_one_output_by_index(llm: LLM, client: EchoClient) -> None:
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7]}]
    three, one = llm.generate(prompts, [SamplingParams(n=3, seed=5), SamplingParams()], use_tqdm=False)
    assert [(c.index, c.token_ids) for c in three.outputs] == [(index, [3, 2, 1]) for index in range(3)]
    assert one.outputs[0].token_ids == [7]
    assert [r.sampling_params.seed for r in client.seen if r.sampling_params] == [5, 6, 7, None]


def test_the_usual_loop_of_an_engine_sees_every_completion(client: EchoClient) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("tiny"))
    waiting = [("the fox", SamplingParams(n=2)), ("the dog", SamplingParams())]
    request_id, finished = 0, []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params, 1.0, 0)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    assert {output.request_id: len(output.outputs) for output in finished} == {"0": 2, "1": 1}
    assert all(output.metrics.arrival_time == 1.0 for output in finished)
    assert engine.get_num_unfinished_requests() == 0


def test_a_request_that_cannot_be_sent_is_not_waited_for(
    client: EchoClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs("tiny"))
    send = client.add_request

    def send_the_first(request: EngineCoreRequest) -> None:
        if client.seen:
            raise EngineDeadError("gone")
        send(request)

    monkeypatch.setattr(client, "add_request", send_the_first)
    with pytest.raises(EngineDeadError):
        engine.add_request("r", "the fox", SamplingParams(n=3))
    assert not engine.has_unfinished_requests()
    assert client.seen[0].request_id in client.aborted


def test_a_standard_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("the fox", SamplingParams())
    captured = capsys.readouterr()
    assert "Processed prompts" in captured.err
    assert captured.out == ""


def test_stats_are_the_public_ones(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.engines == [
        SchedulerStats(num_running_reqs=1, num_waiting_reqs=2, num_blocks=8, num_free_blocks=6)
    ]
    assert stats.engines_running
    assert stats.engines[0].kv_cache_usage == 0.25
    assert llm.reset_prefix_cache() is True


def test_an_unknown_utility_raises(llm: LLM) -> None:
    with pytest.raises(UtilityError, match="no_such"):
        llm.llm_engine.call_utility("no_such")


def test_leaving_the_context_ends_the_engine(client: EchoClient) -> None:
    with LLM("tiny") as llm:
        llm.generate("the fox", use_tqdm=False)
    assert client.shutdowns == 1


def test_an_engine_that_nobody_refers_to_is_let_go(client: EchoClient) -> None:
    llm = LLM("tiny")
    assert client.shutdowns == 0
    del llm
    assert client.shutdowns == 1


def test_a_failed_start_undoes_the_launch(client: EchoClient) -> None:
    client.start_error = EngineStartError("no memory")
    with pytest.raises(EngineStartError, match="no memory"):
        LLM("tiny")
    assert client.shutdowns >= 1


def test_a_dead_engine_raises_to_the_caller(llm: LLM, client: EchoClient) -> None:
    def die(_: EchoClient) -> EngineCoreOutputs:
        raise EngineDeadError("killed", "last line")

    client.step = die
    with pytest.raises(EngineDeadError, match="killed"):
        llm.generate("the fox", use_tqdm=False)


def test_unknown_and_unsupported_engine_arguments_are_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"^LLM has no argument 'max_modle_len'; did you mean max_model_len"
    ):
        LLM("tiny", max_modle_len=5)  # type: ignore[call-arg]
    with pytest.raises(
        InvalidArgumentError, match=r"^LLM has no argument 'multi_process'; did you mean multiprocess"
    ):
        LLM("tiny", multi_process=False)  # type: ignore[call-arg]
    with pytest.raises(
        InvalidArgumentError, match=r"^AsyncLLM has no argument 'sesion'; did you mean session"
    ):
        AsyncLLM("tiny", sesion="s")  # type: ignore[call-arg]
    with pytest.raises(InvalidTypeError, match="max_model_len"):
        LLM("tiny", max_model_len="5")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match=r"^quantization must be None, 'int8' or 'int4' .*got 'fp8'"
    ):
        LLM("tiny", quantization="fp8")


def test_the_signature_shows_every_engine_argument_with_its_default() -> None:
    parameters = inspect.signature(LLM).parameters
    defaults = {name: getattr(EngineArgs, name, None) for name in WITHOUT_EFFECT}
    expected = {f.name: f.default for f in fields(EngineArgs)} | {"multiprocess": True} | defaults
    assert {name: p.default for name, p in parameters.items()} == expected
