"""Branches of an answer: what they ask the engine for, and the tree that they make."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from answers import PROMPT, HandDrivenClient, Word, delta_of, token_id, tree_of

from nbengine.errors import EngineDeadError, InvalidArgumentError, InvalidTypeError, NBEngineError
from nbengine.frontend.requests.reasoning import ReasoningMarks
from nbengine.magics.generation import waits
from nbengine.magics.generation.request import Origin
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.waits import WaitNotice
from nbengine.magics.tokens.branch import Branch
from nbengine.magics.tokens.branching import BranchTree
from nbengine.metrics.stats import SchedulerStats
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

WORDS: list[Word] = [
    ("The", 0.9, {"A": 0.05}),
    (" city", 0.8, {" town": 0.1}),
    (" is", 0.7, {" was": 0.2}),
    (" Paris", 0.5, {" Lyon": 0.3, " Nice": 0.1}),
]
TEXT = "The city is Paris"


def ids(*texts: str) -> list[int]:
    return [token_id(text) for text in texts]


def finish(client: HandDrivenClient, branch: Branch, words: list[Word], text: str, **more: Any) -> Branch:
    client.write(words, more.pop("finish_reason", "stop"), text=text, **more)
    return branch.result(60)


def test_a_branch_asks_for_the_same_answer_with_another_token() -> None:
    params = SamplingParams(
        temperature=0.7,
        seed=5,
        n=2,
        max_tokens=50,
        logprobs=3,
        stop=["!"],
        truncate_prompt_tokens=10,
        prompt_logprobs=2,
    )
    tree, client = tree_of(WORDS, params=params, finished=False)
    branch = tree.branch(3, " Lyon")
    prompt, asked, rank, written = client.requests[0]
    assert prompt == {"prompt_token_ids": PROMPT}
    assert written == ids("The", " city", " is", " Lyon")
    assert rank is None
    assert (asked.n, asked.truncate_prompt_tokens, asked.prompt_logprobs) == (1, None, None)
    assert (asked.temperature, asked.seed, asked.max_tokens, asked.logprobs, asked.stop) == (
        0.7,
        5,
        50,
        3,
        ["!"],
    )
    assert asked.output_kind is RequestOutputKind.DELTA
    assert params.n == 2
    finish(client, branch, [(" now", 0.5, {})], "The city is Lyon now", cached=4)
    assert (branch.text, branch.finish_reason) == ("The city is Lyon now", "stop")
    assert branch.token_ids == ids("The", " city", " is", " Lyon", " now")
    assert (branch.num_cached_tokens, branch.num_prompt_tokens) == (4, 7)
    assert branch.metrics.num_generation_tokens == 2


@pytest.mark.parametrize(("is_kept", "calls"), [(False, ["wake_up"]), (True, [])])
def test_a_branch_wakes_an_engine_that_sleeps_unless_it_is_kept_asleep(
    is_kept: bool, calls: list[str]
) -> None:
    tree, client = tree_of(WORDS)
    client.state = SchedulerStats(sleep_level=1, is_kept_asleep=is_kept)
    branch = tree.branch(3, " Lyon")
    assert client.utilities == calls
    finish(client, branch, [(" now", 0.5, {})], "The city is Lyon now")


def test_a_branch_says_that_its_engine_is_paused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, client = tree_of(WORDS)
    client.state = SchedulerStats(is_paused=True)
    said = threading.Event()
    tell = WaitNotice._tell_reasons

    def telling(notice: WaitNotice, reasons: dict[str, str]) -> None:
        tell(notice, reasons)
        said.set()

    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(WaitNotice, "_tell_reasons", telling)
    branch = tree.branch(3, " Lyon")
    assert said.wait(60)
    assert client.utilities == []
    # Who waits for the branch would be told as well.
    client.state = SchedulerStats()
    finish(client, branch, [(" now", 0.5, {})], "The city is Lyon now")
    said_once = "engine 'hand-driven' is paused: `%engine resume hand-driven` lets it go on"
    assert capsys.readouterr().out.count(said_once) == 1


def test_log_probabilities_of_a_branch_begin_with_its_own_tokens() -> None:
    tree, client = tree_of(WORDS)
    branch = finish(client, tree.branch(3, " Lyon"), [(" now", 0.5, {})], "The city is Lyon now")
    assert branch.logprobs is not None
    assert [next(iter(entry)) for entry in branch.logprobs] == branch.token_ids
    assert set(branch.logprobs[3]) == set(ids(" Paris", " Lyon", " Nice"))
    assert math.exp(branch.logprobs[3][token_id(" Lyon")].logprob) == pytest.approx(0.3)
    stranger = finish(client, tree.branch(3, 999), [], "The city is ?")
    assert stranger.logprobs is not None
    assert math.isnan(stranger.logprobs[3][999].logprob)
    assert stranger.label == "token 999"


def test_the_tree_is_walked_and_printed() -> None:
    tree, client = tree_of(WORDS)
    lyon = finish(client, tree.branch(3, " Lyon"), [(" now", 0.5, {" ever": 0.2})], "The city is Lyon now")
    town = finish(client, tree.branch(1, " town"), [], "The town", finish_reason="length")
    ever = finish(client, lyon.branch(4, " ever"), [], "The city is Lyon ever")
    root = tree[0]
    assert [node.id for node in tree] == [0, 1, 2, 3]
    assert (lyon.parent, ever.parent, root.parent) == (root, lyon, None)
    assert root.children == [lyon, town]
    assert tree.leaves == [town, ever]
    assert tree.paths() == [[root, town], [root, lyon, ever]]
    assert tree.roots == [root]
    assert str(tree).splitlines() == [
        "0  'The city is Paris'  stop, 4 tokens",
        "├─ 1  ' Lyon' at 3: 'The city is Lyon now'  stop, 5 tokens",
        "│  └─ 3  ' ever' at 4: 'The city is Lyon ever'  stop, 5 tokens",
        "└─ 2  ' town' at 1: 'The town'  length, 2 tokens",
    ]
    assert repr(tree) == str(tree)
    assert str(lyon) == lyon.text
    assert repr(lyon) == "Branch(1, ' Lyon' at 3, 5 tokens, finish_reason='stop')"


def test_a_branch_before_a_branch_belongs_to_who_wrote_that_token() -> None:
    tree, client = tree_of(WORDS)
    lyon = finish(client, tree.branch(3, " Lyon"), [(" now", 0.5, {})], "The city is Lyon now")
    sibling, early, later = lyon.branch(3, " Nice"), lyon.branch(0, "A"), lyon.branch(4, 77)
    assert [(node.parent, node.position) for node in (sibling, early, later)] == [
        (tree[0], 3),
        (tree[0], 0),
        (lyon, 4),
    ]
    assert [request[3] for request in client.requests[1:]] == [
        ids("The", " city", " is", " Nice"),
        ids("A"),
        [*ids("The", " city", " is", " Lyon"), 77],
    ]
    for node in (sibling, early, later):
        node.cancel()
        assert node.result(60).finish_reason == "abort"
    assert client.aborted == ["branch-2", "branch-3", "branch-4"]


async def test_branches_are_awaited_and_listeners_told() -> None:
    tree, client = tree_of(WORDS)
    seen: list[tuple[int, int, bool]] = []
    tree.listeners.append(lambda node: seen.append((node.id, len(node.token_ids), node.done)))
    branch = tree.branch(2, " was")
    assert not branch.done
    assert seen == [(1, 3, False)]
    client.write([(" x", 0.5, {})], "stop", text="The city was x")
    async with asyncio.timeout(60):
        assert await branch is branch
    assert branch.done
    assert seen[-1] == (1, 4, True)
    assert await tree[0] is tree[0]
    assert tree[0].result() is tree[0]


def test_an_engine_that_dies_is_the_branch_error() -> None:
    tree, client = tree_of(WORDS)
    branch = tree.branch(3, " Lyon")
    client.collectors[0].put_error(EngineDeadError("out of memory", "log"))
    with pytest.raises(EngineDeadError, match="out of memory"):
        branch.result(60)
    assert branch.error == "EngineDeadError: out of memory"
    assert branch.finish_reason == "abort"
    client.refusal = EngineDeadError("gone")
    with pytest.raises(EngineDeadError):
        tree.branch(3, " Nice")
    assert len(tree) == 2


@pytest.mark.parametrize(
    ("position", "token", "kind", "message"),
    [
        (
            4,
            " Lyon",
            InvalidArgumentError,
            r"position must be in \[0, 4\), for the answer has 4 tokens, got 4",
        ),
        (-1, " Lyon", InvalidArgumentError, r"position must be in \[0, 4\)"),
        (True, " Lyon", InvalidTypeError, "position must be an integer, got True"),
        ("3", " Lyon", InvalidTypeError, "position must be an integer"),
        (3, -1, InvalidArgumentError, "token must be a token id, 0 or greater, got -1"),
        (3, 1.5, InvalidTypeError, "token must be a token id, or the text of an alternative"),
        (3, True, InvalidTypeError, "token must be a token id"),
        (
            3,
            "Lyon",
            InvalidArgumentError,
            r"one of the texts at position 3: \[' Paris', ' Lyon', ' Nice'\], got 'Lyon'",
        ),
    ],
)
def test_wrong_positions_and_tokens_are_named(
    position: Any, token: Any, kind: type[Exception], message: str
) -> None:
    tree, client = tree_of(WORDS)
    with pytest.raises(kind, match=message):
        tree.branch(position, token)
    assert client.requests == []


def test_without_log_probabilities_a_branch_needs_a_token_id() -> None:
    result = GenerationResult("r", "the prompt")
    client = HandDrivenClient()
    result.tree = BranchTree(result, Origin(client, SamplingParams(temperature=0)))
    with pytest.raises(InvalidArgumentError, match="position must be the position of a token, got 0"):
        result.branch(0, 5)
    output = delta_of(WORDS, "stop")
    output.outputs[0].logprobs = None
    result.absorb(output)
    with pytest.raises(InvalidArgumentError, match="alternatives are known by their text with --logprobs"):
        result.branch(0, "A")
    branch = result.branch(0, 5)
    assert client.requests[0][3] == [5]
    client.collectors[0].put(RequestOutput("x", None, [1], [], True))
    assert branch.result(60).logprobs is None


def test_grammars_and_embeddings_do_not_branch() -> None:
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
    tree, client = tree_of(WORDS, params=grammar)
    with pytest.raises(NBEngineError, match="cannot branch: its answer follows a grammar"):
        tree.branch(3, " Lyon")
    tree, client = tree_of(WORDS, prompt=[])
    with pytest.raises(NBEngineError, match="its prompt has no tokens"):
        tree.branch(3, " Lyon")
    assert client.requests == []


def test_a_result_without_an_engine_says_so() -> None:
    with pytest.raises(NBEngineError, match="does not know its engine"):
        GenerationResult("r", "p").branch(0, 1)


def test_several_answers_are_several_roots_and_the_salt_and_rank_stay() -> None:
    client = HandDrivenClient()
    client.engine_ranks = [0, 1, 2]
    result = GenerationResult("r", "the prompt")
    result.tree = BranchTree(result, Origin(client, SamplingParams(n=2, temperature=1), "salt"))
    output = delta_of(WORDS, "stop", finished=False)
    result.absorb(output)
    second = delta_of([("No", 1.0, {"Yes": 0.1})], "stop", index=1)
    second.metrics.data_parallel_ranks = (2,)
    result.absorb(second)
    assert [root.text for root in result.tree.roots] == [TEXT, "No"]
    result.branch(0, "Yes", answer=1)
    prompt, _, rank, written = client.requests[0]
    assert (prompt["cache_salt"], rank, written) == ("salt", 2, ids("Yes"))
    client.engine_ranks = [0, 1]
    result.branch(0, "A")
    assert client.requests[1][2:] == (None, ids("A"))
    with pytest.raises(InvalidArgumentError, match=r"answer must be in \[0, 2\), got 2"):
        result.branch(0, 5, answer=2)
    for branch in (result.tree[2], result.tree[3]):
        branch.cancel()
        branch.result(60)


def test_the_same_branch_is_found_again_where_it_would_say_the_same() -> None:
    tree, client = tree_of(WORDS)
    lyon = finish(client, tree.branch(3, " Lyon"), [(" now", 0.5, {})], "The city is Lyon now")
    assert tree.existing(tree[0], 3, token_id(" Lyon")) is lyon
    assert tree.existing(lyon, 3, token_id(" Nice")) is None
    assert tree.existing(tree[0], 2, token_id(" Lyon")) is None
    nice = tree.branch(3, " Nice")
    assert tree.existing(tree[0], 3, token_id(" Nice")) is nice
    nice.cancel()
    nice.result(60)
    assert tree.existing(tree[0], 3, token_id(" Nice")) is None
    varied, client = tree_of(WORDS, params=SamplingParams(temperature=1.0, logprobs=3))
    finish(client, varied.branch(3, " Lyon"), [], "The city is Lyon")
    assert varied.existing(varied[0], 3, token_id(" Lyon")) is None


def test_a_branch_of_an_answer_with_a_budget_of_thinking_knows_where_that_ends() -> None:
    marks = ReasoningMarks(endings=("</t>",), closing="</t>")
    tree, client = tree_of(WORDS, params=SamplingParams(temperature=0, logprobs=3, thinking_budget=4))
    tree.origin = replace(tree.origin, reasoning=marks)
    branch = tree.branch(3, " Lyon")
    assert client.requests[0][0] == {"prompt_token_ids": PROMPT, "reasoning": marks}
    assert client.requests[0][1].thinking_budget == 4
    branch.cancel()
    branch.result(60)
