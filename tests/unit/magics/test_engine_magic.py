"""`%engine`, against engines that only pretend."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.client.engines.directory import ReapReport
from nbengine.errors import EngineDeadError, EngineStartError
from nbengine.magics.engines.ledger import Ledger
from nbengine.magics.engines.reports import cache_words
from nbengine.runtime.connection import log_dir
from nbengine.runtime.logs import worker_log_path
from tests.unit.magics.conftest import FakeBackend, FakeClient, RecordingPublisher, make_ready

Capture = pytest.CaptureFixture[str]


def error_line(shell: InteractiveShell, code: str, capsys: Capture) -> str:
    """Run code that must fail with a usage error, and return what is shown."""
    capsys.readouterr()
    assert isinstance(shell.run_cell(code).error_in_exec, UsageError)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.out
    return printed.err


def test_start_shows_each_stage_with_its_seconds_and_what_it_got(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --num-blocks 64 --seed 3 -o llm").raise_error()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "starting random-tiny"
    assert [line.split()[1] for line in lines[1:6]] == ["fetch", "load", "profile", "kv", "ready"]
    assert all(re.match(r"  ✓ \w+ +\d\.\d s  ", line) for line in lines[1:6]), lines
    assert "engine 'random-tiny' is ready after" in lines[6]
    assert "KV cache 64 blocks of 16 tokens (1 MiB), context 1,024 tokens" in lines[6]
    client = backend.clients["random-tiny"]
    assert shell.user_ns["llm"] is client
    assert client.config.model.seed == 3
    assert client.config.cache.num_gpu_blocks_override == 64
    assert not client.config.bound
    assert client.session == f"ipython-{os.getpid()}"


def test_start_replaces_one_output_in_a_notebook(
    kernel_shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    backend.on_start = lambda: publisher.wait_for("▸ ready")
    kernel_shell.run_cell("%engine start random-tiny").raise_error()
    (output,) = publisher.outputs()
    assert "✓ profile" in output["text/plain"]
    assert output["text/plain"].endswith("context 1,024 tokens")
    assert "✓ profile" in output["text/html"]
    assert capsys.readouterr().out == ""


def test_a_start_takes_the_default_model_and_values_from_variables(
    shell: InteractiveShell, backend: FakeBackend
) -> None:
    shell.user_ns.update(size=128, overrides='{"rope_theta": 1}', template="{{messages[0].content}}")
    shell.run_cell(
        "%engine start --max-model-len {size} --hf-overrides {overrides} --chat-template {template}"
    ).raise_error()
    config = backend.clients["smollm2-135m"].config
    assert config.model.max_model_len == 128
    assert config.model.hf_overrides == {"rope_theta": 1}
    assert config.model.chat_template == "{{messages[0].content}}"


def test_a_second_start_is_refused_unless_named(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    line = error_line(shell, "%engine start", capsys)
    assert "engine 'random-tiny' is running already" in line
    assert "model is random-tiny there, smollm2-135m here. `%engine load smollm2-135m …`" in line
    assert "another --name" in line
    assert "and differs: model is" in error_line(shell, "%engine start --name random-tiny", capsys)
    shell.run_cell("%engine start --name second").raise_error()
    assert set(backend.clients) == {"random-tiny", "second"}


def test_the_name_of_somebody_elses_engine_is_refused(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine detach")
    line = error_line(shell, "%engine start --name random-tiny", capsys)
    assert "`%engine attach random-tiny`, and then `%engine load smollm2-135m …`" in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%engine strat", "no command 'strat'; did you mean start?"),
        ("%engine start --max-modl-len 3", "did you mean --max-model-len?"),
        ("%engine start --max-model-len 0", "max_model_len must be at least 1, got 0"),
        ("%engine start --dp 0", "data_parallel_size must be at least 1, got 0"),
        ("%engine start --quantization awq", "quantization must be None, 'int8' or 'int4'"),
        ("%engine start --seed 1.5", "invalid int value"),
        ("%engine start --set seed=1.5", "seed must be int"),
        ("%engine load other", "no engine is running here"),
        ("%engine load", "which MODEL?"),
        ("%engine fit --name x other", "unknown flag --name"),
        ("%engine fit no-such-model", "no model 'no-such-model'"),
        ("%engine fit -o 1-x random-tiny", "'1-x' is not a variable name"),
        ("%engine start random-tiny -o 1-x", "'1-x' is not a variable name"),
        ("%engine fit ~nobody-here/x", "no model '~nobody-here/x': Could not determine home directory"),
        ("%engine config", "no engine is running here"),
        ("%engine stop", "no engine is running here"),
        ("%engine stop nobody", "there is no engine 'nobody'"),
        ("%engine status", "no engine is running here"),
        ("%engine restart", "no engine is running here"),
        ("%engine detach", "no engine is running here"),
        ("%engine attach", "no engine runs on this machine"),
        ("%engine attach nobody", "no engine is called 'nobody'"),
        ("%engine logs nobody", "no engine called 'nobody' has left a log"),
        ("%engine ps now", "unexpected 'now'"),
        ("%engine help strat", "no command 'strat'; did you mean start?"),
    ],
)
def test_a_usage_error_is_one_line(shell: InteractiveShell, capsys: Capture, line: str, message: str) -> None:
    assert message in error_line(shell, line, capsys)


def test_a_failed_start_raises_with_its_cause(
    shell: InteractiveShell, backend: FakeBackend, capsys: Capture
) -> None:
    def fail() -> None:
        raise EngineStartError("out of memory", "the last log line")

    backend.on_start = fail
    outcome = shell.run_cell("%engine start random-tiny")
    assert isinstance(outcome.error_in_exec, EngineStartError)
    printed = capsys.readouterr().out
    assert "✗ ready" in printed
    assert "the last log line" in printed
    assert "out of memory" in printed
    backend.on_start = lambda: None
    shell.run_cell("%engine start random-tiny").raise_error()


def test_an_interrupted_start_says_so(shell: InteractiveShell, backend: FakeBackend, capsys: Capture) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    backend.on_start = interrupt
    assert isinstance(shell.run_cell("%engine start random-tiny").error_in_exec, KeyboardInterrupt)
    printed = capsys.readouterr().out
    assert "KeyboardInterrupt: start interrupted" in printed
    assert "Traceback" not in printed


def test_stop_waits_and_says_what_came_back(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine stop --drain").raise_error()
    assert engine.calls == ["shutdown drain=True"]
    assert "engine 'random-tiny' stopped in" in (printed := capsys.readouterr().out)
    assert "of memory came back" in printed
    assert "no engine is running" in error_line(shell, "%generate hi", capsys)


def test_restart_keeps_name_and_arguments(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start random-tiny --name second --num-blocks 9 --seed 4").raise_error()
    shell.run_cell("%engine restart --seed 5").raise_error()
    config = backend.clients["second"].config
    assert (config.cache.num_gpu_blocks_override, config.model.seed) == (9, 5)
    assert engine.calls == []


def test_a_restart_with_wrong_arguments_leaves_the_engine_running(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    error_line(shell, "%engine restart --max-model-len 0", capsys)
    assert engine.calls == []


def test_a_start_of_several_engine_cores_says_what_they_hold_together(
    shell: InteractiveShell, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --dp 2").raise_error()
    last = capsys.readouterr().out.splitlines()[-1]
    assert "2 engine cores on cpu float32, KV cache 128 blocks of 16 tokens (2 MiB), context 1,024" in last


def test_slots_for_recurrent_state_are_named_and_blocks_only_where_there_are_some() -> None:
    both = msgspec.structs.replace(make_ready(0), num_state_slots=6)
    assert cache_words([both, both]) == "128 blocks of 16 tokens and 12 slots for recurrent state (2 MiB)"
    alone = msgspec.structs.replace(both, num_blocks=0)
    assert cache_words([alone]) == "6 slots for recurrent state (1 MiB)"


def test_detach_leaves_the_engine_running(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine detach").raise_error()
    assert engine.calls == ["detach"]
    assert "goes on without this notebook" in capsys.readouterr().out
    line = error_line(shell, "%generate hi", capsys)
    assert "`%engine attach` joins one that runs already (random-tiny)" in line
    line = error_line(shell, "%generate --engine random-tiny hi", capsys)
    assert "`%engine attach random-tiny` does that" in line


def test_attach_joins_the_only_engine(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine detach")
    shell.run_cell("%engine attach").raise_error()
    assert backend.attached == ["random-tiny"]
    shell.run_cell("%generate hi").raise_error()


def test_attach_prefers_the_notebooks_own_engines_and_asks_otherwise(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    for name in ("second", "third"):
        shell.run_cell(f"%engine start random-tiny --name {name}").raise_error()
    for name in ("random-tiny", "second", "third"):
        shell.run_cell(f"%engine detach {name}").raise_error()
    assert "which one? These run: random-tiny, second, third" in error_line(shell, "%engine attach", capsys)
    # What a kernel finds that was restarted while it was attached to two of three.
    for name in ("third", "second"):
        Ledger(f"ipython-{os.getpid()}").add(backend.clients[name].connection)
    shell.run_cell("%engine attach").raise_error()
    assert backend.attached == ["third", "second"]
    shell.run_cell("%generate hi")
    assert len(backend.clients["second"].requests) == 1


def test_attaching_again_makes_it_the_default(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start random-tiny --name second")
    shell.run_cell("%engine attach random-tiny").raise_error()
    assert backend.attached == []
    shell.run_cell("%generate hi")
    assert len(engine.requests) == 1


def test_a_dead_engine_does_not_stand_in_the_way(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    engine.die()
    shell.run_cell("%engine start random-tiny").raise_error()
    assert backend.clients["random-tiny"] is not engine
    assert engine.calls == ["shutdown drain=False"]


def test_an_engine_found_dead_by_status_leaves_the_session(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(timeout: float) -> None:
        raise EngineDeadError("gone")

    monkeypatch.setattr(engine, "stats_within", dead)
    with pytest.raises(EngineDeadError):
        shell.run_cell("%engine status").raise_error()
    shell.run_cell("%engine start random-tiny").raise_error()


def test_logs_show_the_last_lines(shell: InteractiveShell, engine: FakeClient, capsys: Capture) -> None:
    shell.run_cell("%engine logs -n 2").raise_error()
    assert capsys.readouterr().out == "line two\nline three\n"
    (log_dir() / "gone-20260101-000000-1.log").write_text("old")
    (log_dir() / "gone-2-20270101-000000-1.log").write_text("another engine's")
    shell.run_cell("%engine logs gone").raise_error()
    assert capsys.readouterr().out == "old\n"


def test_logs_show_how_the_engine_has_started(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    start = "2026-01-01 00:00:00,000 INFO [core 0] nbengine.engine.start_log: start: load took 3.50 s"
    Path(engine.connection.log_path).write_text(f"{start}\nmore\n")
    shell.run_cell("%engine logs").raise_error()
    assert capsys.readouterr().out == f"{start}\nmore\n"


def test_logs_of_a_worker_are_asked_for_by_its_rank(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine logs --rank 0 -n 1").raise_error()
    assert capsys.readouterr().out == "line three\n"
    for rank in range(2):
        worker_log_path(engine.connection.log_path, rank).write_text(f"first\nworker {rank}\n")
    shell.run_cell("%engine logs random-tiny --rank 1 -n 1").raise_error()
    assert capsys.readouterr().out == "worker 1\n"
    with pytest.raises(UsageError, match="%engine logs: rank must be one of 0, 1, got 2"):
        shell.run_cell("%engine logs --rank 2").raise_error()


def test_reap_says_what_it_did(
    shell: InteractiveShell, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def fake_reap(*, end_unattached: bool) -> ReapReport:
        asked.append(end_unattached)
        return ReapReport(["a"], ["b"], [1, 2], ["/x"]) if end_unattached else ReapReport()

    monkeypatch.setattr("nbengine.magics.engine.reap", fake_reap)
    shell.run_cell("%engine reap").raise_error()
    assert capsys.readouterr().out == "nothing to reap\n"
    shell.run_cell("%engine reap --all").raise_error()
    assert capsys.readouterr().out == (
        "cleaned up after engine 'a', which had died\n"
        "ended engine 'b', which nobody was attached to\n"
        "killed 2 processes without a host\n"
        "removed 1 directory of sockets\n"
    )
    assert asked == [False, True]


def test_help_explains_every_command(shell: InteractiveShell, capsys: Capture) -> None:
    for code in ("%engine", "%engine help", "%engine -h"):
        shell.run_cell(code).raise_error()
        printed = capsys.readouterr().out
        for command in ["start", "stop", "restart", "status", "ps", "attach", "detach", "logs", "reap"]:
            assert f"%engine {command}" in printed
    for code in ("%engine start -h", "%engine help start"):
        shell.run_cell(code).raise_error()
        printed = capsys.readouterr().out
        for flag in ("--max-model-len", "--tp N", "--pp N", "--distributed-init-method X"):
            assert flag in printed
    shell.run_cell("%engine help attach").raise_error()
    assert "restart of its kernel" in capsys.readouterr().out


def test_detaching_forgets_the_engine(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    ledger = Ledger(f"ipython-{os.getpid()}")
    assert ledger.among([engine.connection]) == [engine.connection]
    shell.run_cell("%engine detach")
    assert ledger.among([engine.connection]) == []
