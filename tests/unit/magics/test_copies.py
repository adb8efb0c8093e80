"""Answers are data: copied and pickled they say the same, without an engine, and live parts say what they have lost."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from answers import Word, delta_of, tree_of
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbengine import errors
from nbengine.errors import EngineDeadError, NBEngineError, RequestLostError
from nbengine.magics.answers.kept import Answer
from nbengine.magics.comparison.axes import flag_axis
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.conversations.conversation import Conversation, Exchange
from nbengine.magics.generation.result import GenerationHandle, GenerationResult
from nbengine.magics.generation.waits import WaitNotice
from nbengine.magics.tokens.view import static_bundle
from nbengine.outputs import CompletionOutput, Logprob, RequestOutput, ToolCall
from nbengine.pooling_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)

WORDS: list[Word] = [("The", 0.9, {"A": 0.05}), (" city", 0.8, {" town": 0.1})]

COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["deep", "shallow", "pickle"],
)
WHOLE_COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deep", "pickle"]
)
Copy = Callable[[Any], Any]


def result_of(finish_reason: str | None = "stop") -> GenerationResult:
    tree, _ = tree_of(WORDS, finish_reason=finish_reason, finished=finish_reason is not None)
    return tree._result


@COPIES
def test_a_copy_of_an_answer_says_the_same(copied: Copy) -> None:
    result = result_of()
    result.silence_once()
    other = copied(result)
    for name in (
        "text",
        "token_ids",
        "logprobs",
        "finish_reason",
        "metrics",
        "prompt",
        "value",
        "num_prompt_tokens",
    ):
        assert getattr(other, name) == getattr(result, name), name
    assert (str(other), repr(other), other.outputs) == (str(result), repr(result), result.outputs)
    assert other.diff("A city").html == result.diff("A city").html


@WHOLE_COPIES
def test_a_copy_of_a_tree_has_all_branches_and_says_why_it_cannot_grow(copied: Copy) -> None:
    tree, client = tree_of(WORDS)
    branch = tree.branch(1, " town")
    client.write([(" hall", 0.5, {})], "stop", text="The town hall")
    branch.result(60)
    other = copied(tree)
    assert str(other) == str(tree)
    assert [node.token_ids for node in other] == [node.token_ids for node in tree]
    assert [node.text for node in other.paths()[-1]] == [node.text for node in tree.paths()[-1]]
    assert other[1].result(0) is other[1]
    assert static_bundle(other, footer=True)["text/plain"] == static_bundle(tree, footer=True)["text/plain"]
    assert other.origin.client.name == client.name
    with pytest.raises(NBEngineError, match="cannot branch: it is a copy, without the engine"):
        other.branch(1, " town")
    assert len(tree) == 2


@COPIES
def test_a_copy_of_an_answer_under_way_has_ended(copied: Copy) -> None:
    result = result_of(None)
    other = copied(result)
    assert (other.text, other.finished, other.finish_reason) == (result.text, True, "abort")
    assert (result.finished, result.finish_reason) == (False, None)
    other.tree[0].cancel()


@COPIES
def test_a_copy_of_a_handle_has_the_result_or_says_what_it_lost(copied: Copy) -> None:
    done = GenerationHandle(result_of(), lambda: None, WaitNotice())
    done.settle()
    assert copied(done).result(0).text == "The city"
    failed = GenerationHandle(result_of(), lambda: None, WaitNotice())
    failed.settle(EngineDeadError("the engine is gone", "log"))
    with pytest.raises(EngineDeadError, match="the engine is gone"):
        copied(failed).result(0)
    running = GenerationHandle(result_of(None), pytest.fail, WaitNotice())
    lost = copied(running)
    assert (lost.done, lost.text) == (True, "The city")
    with pytest.raises(NBEngineError, match="copy of a handle whose generation was under way"):
        lost.result(0)
    lost.cancel()
    assert not running.done


@COPIES
def test_comparisons_conversations_and_kept_answers_are_data(copied: Copy) -> None:
    axis = flag_axis("--temperature", "temperature", [0, 1], "%%generate")
    comparison = ComparisonResult(
        [axis], [{"temperature": 0}, {"temperature": 1}], [result_of(), result_of()]
    )
    comparison.errors[1] = RequestLostError(0, "gone")
    other = copied(comparison)
    assert other.rows() == comparison.rows()
    assert (repr(other), str(other.errors[1])) == (repr(comparison), "gone")
    handle = ComparisonHandle(comparison, lambda: None, WaitNotice())
    handle.settle()
    assert copied(handle).results[0].text == "The city"

    conversation = Conversation("talk", "be kind")
    conversation.add(Exchange("hi", "hello", "hm"))
    conversation.last = result_of()
    again = copied(conversation)
    assert (again.to_dict(), again.last.text) == (conversation.to_dict(), "The city")
    kept = copied(Answer("r", result_of(), "engine", 1.0, 2.0))
    assert (kept.ending, kept.result.text) == ("complete", "The city")


@COPIES
def test_outputs_of_scripts_are_data(copied: Copy) -> None:
    call = ToolCall("1", "f", "{}")
    entry = {1: Logprob(-0.5, 1, "a")}
    completion = CompletionOutput(0, "a", [1], -0.5, [entry], "stop", "x", "r", "c", [call])
    output = RequestOutput("r", "p", [1], [completion], True, [None, entry])
    assert copied(output) == output
    delta = delta_of(WORDS, "stop")
    assert copied(delta) == delta
    embedding = EmbeddingRequestOutput("r", EmbeddingOutput([0.5]), [1], True)
    assert copied(embedding) == embedding
    pooled = PoolingRequestOutput("r", PoolingOutput(np.zeros(2, np.float32)), [1], True)
    assert copied(pooled).outputs.data.tolist() == [0, 0]


ERRORS = {
    "RefusedArgumentError": ("prompt", "text"),
    "RequestLostError": (1, "lost"),
    "ProtocolMismatchError": ("other", 3),
    "InvalidArgumentError": ("n", 1, "2"),
    "InvalidTypeError": ("n", 1, "2"),
    "UnknownArgumentError": ("f", "n", "; there is m"),
    "ChatTemplateError": ([], "no", "line 1"),
    "EngineStartError": ("cause", "log"),
    "EngineDeadError": ("cause", "log"),
    "EngineEndError": ("cause", "log"),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, NBEngineError)
    ],
)
def test_errors_come_back_as_they_were(name: str) -> None:
    error = getattr(errors, name)(*ERRORS.get(name, ("text",)))
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


READER = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config, ipython_dir=sys.argv[1])
shell.run_line_magic("load_ext", "storemagic")
shell.run_line_magic("store", "-r answer")
answer = shell.user_ns["answer"]
tree = answer.tree
shown = [shell.display_formatter.format(value)[0] for value in (answer, tree)]
print(json.dumps([answer.text, answer.finish_reason, tree[0].text, *shown]))
"""


def test_an_answer_that_a_notebook_has_stored_is_shown_by_another_python(tmp_path: Path) -> None:
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config, ipython_dir=str(tmp_path))
    shell.run_line_magic("load_ext", "storemagic")
    result = result_of()
    shell.user_ns["answer"] = result
    shell.run_line_magic("store", "answer")
    command = [sys.executable, "-c", READER, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert not printed.returncode, printed.stderr
    shown = [shell.display_formatter.format(value)[0] for value in (result, result.tree)]
    assert json.loads(printed.stdout) == ["The city", "stop", result.tree[0].text, *shown]
    assert shown[0]["text/plain"].startswith("GenerationResult(")


def test_joblib_keeps_answers_and_knows_them_again(tmp_path: Path) -> None:
    result = result_of()
    joblib.dump({"answer": result, "tree": result.tree}, tmp_path / "kept")
    kept = joblib.load(tmp_path / "kept")
    assert (kept["answer"].text, str(kept["tree"])) == (result.text, str(result.tree))
    calls: list[str] = []

    def judge(answer: GenerationResult) -> int:
        calls.append(answer.text)
        return len(answer.text)

    memory = joblib.Memory(tmp_path / "memory", verbose=0)
    judged = memory.cache(judge)
    assert judged(result) == judged(joblib.load(tmp_path / "kept")["answer"]) == len("The city")
    assert calls == ["The city"]
