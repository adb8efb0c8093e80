"""Templates that are not plain: rendered as transformers does, in a process that may not take long or grow large."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from process_support.engine_under_test import wait_for
from stopping import stop

from nbengine.errors import RequestError
from nbengine.frontend.text import template_process
from nbengine.frontend.text.template_process import TemplateCall, TemplateProcess, render_template
from tests.unit.frontend.test_chat_templates import ANSWERED, CHATML, LLAMA, PARTS, WEATHER
from tests.unit.frontend.test_template_cost import DATA, NOT_PLAIN

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def process(no_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    made = TemplateProcess(max_seconds=0.3, max_bytes=128 << 20)
    monkeypatch.setattr(template_process, "_process", made)
    yield made
    made.shutdown()


def call_of(template: str, **variables: object) -> TemplateCall:
    return TemplateCall(template, ANSWERED, [WEATHER], variables)


def outcome_of(call: TemplateCall) -> str:
    try:
        return render_template(call)
    except RequestError as error:
        return str(error)


def test_the_process_renders_as_transformers_does(process: TemplateProcess) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"bos_token": "<s>", "flag": True, "numbers": [1, 2.5, None]}
    for template in (CHATML, LLAMA, PARTS):
        template += "{{ flag }}{{ numbers }}"
        (expected,), _ = render_jinja_template(
            conversations=[ANSWERED],
            tools=[WEATHER],
            chat_template=template,
            add_generation_prompt=True,
            **variables,
        )
        assert process.render(call_of(template, **variables)) == expected
        assert render_template(call_of(template, **variables)) == expected


def test_no_template_takes_long_or_much(process: TemplateProcess) -> None:
    """Each gives a text or a reason, and the next one is rendered as ever."""
    before = psutil.Process().memory_info().rss
    for name, template in NOT_PLAIN.items():
        start = time.monotonic()
        assert len(outcome_of(call_of(template))) < 128 << 20, name
        assert time.monotonic() - start < 60
    assert psutil.Process().memory_info().rss - before < 300 << 20
    assert process.render(call_of("{{ messages[0].role * 2 }}")) == "useruser"


def test_a_template_without_end_is_refused_by_its_time_and_one_that_grows_by_its_memory(
    process: TemplateProcess,
) -> None:
    with pytest.raises(RequestError, match=r"it takes more than 0\.3 s to render"):
        process.render(call_of(ENDLESS))
    with pytest.raises(RequestError, match="it takes too much memory to render"):
        process.render(call_of("{{ 'x' * 10**10 }}"))


def test_an_interrupt_leaves_no_answer_for_the_next_question(no_leftovers: None) -> None:
    process = TemplateProcess(max_seconds=60)
    try:
        assert process.render(call_of("{{ 'a' * 2 }}")) == "aa"
        slow = (
            "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}{{ 'stale' * 1 }}"
        )
        child = psutil.Process(pid_of(process))
        begun = child.cpu_times().user + 0.05

        def interrupt() -> None:
            wait_for(lambda: child.cpu_times().user > begun, "that the process renders")
            _thread.interrupt_main()

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            process.render(call_of(slow))
        interrupter.join()
        assert process.render(call_of("{{ 'b' * 2 }}")) == "bb"
    finally:
        process.shutdown()


def test_another_process_takes_the_place_of_one_that_is_stopped(
    process: TemplateProcess, caplog: pytest.LogCaptureFixture
) -> None:
    assert process.render(call_of("{{ 'a' * 2 }}")) == "aa"
    stopped = pid_of(process)
    stop(stopped)
    # Nothing wakes the first one: the answer is another's.
    assert process.render(call_of("{{ 'b' * 2 }}")) == "bb"
    assert not psutil.pid_exists(stopped)
    assert f"the process that renders chat templates (pid {stopped}) is stopped (SIGSTOP?)" in caplog.text


def pid_of(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_threads_get_their_own_texts(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: process.render(call_of("{{ n * 2 }}", n=n)), range(40)))
    assert texts == [str(2 * n) for n in range(40)]


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="it has 300,000 characters, at most 262,144 are allowed"):
        render_template(TemplateCall("x" * 300_000, DATA["messages"], None, {}))
