"""The requests that scores are made of, and the scores that come of their outputs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.requests.pooling_inputs import PoolingInputs
from nbengine.frontend.requests.scoring import plan_scores
from nbengine.models.configs.hf_config import label_names
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.sampling_params import PoolingParams


class FakeInputs:
    """The part of `PoolingInputs` that a plan asks: a tokenizer of characters."""

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks
        self.has_head = "classify" in tasks

    def check_task(self, task: str) -> None:
        if task not in self.tasks:
            raise InvalidArgumentError("task", task, "another")

    def paired(self, one: str, other: str, params: PoolingParams) -> tuple[dict[str, Any], PoolingParams]:
        return {"prompt_token_ids": [*map(ord, one), 0, *map(ord, other)]}, params


def inputs(*tasks: str) -> PoolingInputs:
    return cast("PoolingInputs", FakeInputs(tasks))


def pooled(*numbers: float) -> PoolingRequestOutput[PoolingOutput]:
    return PoolingRequestOutput("r", PoolingOutput(np.array(numbers, np.float32)), [1, 2])


def test_one_text_against_all_is_embedded_once() -> None:
    plan = plan_scores(inputs("embed", "score"), "q", ["a", "b"], PoolingParams())
    assert plan.prompts == ["q", "a", "b"]
    assert [params.task for params in plan.params] == ["embed"] * 3
    scores = plan.scores([pooled(1, 0), pooled(0, 2), pooled(3, 3)])
    assert [score.outputs.score for score in scores] == pytest.approx([0, 0.5**0.5])
    assert [len(score.prompt_token_ids) for score in scores] == [4, 4]


def test_each_text_meets_its_own_counterpart() -> None:
    plan = plan_scores(inputs("embed", "score"), ["p", "q"], ["a", "b"], PoolingParams())
    scores = plan.scores([pooled(1, 0), pooled(0, 1), pooled(1, 0), pooled(0, -1)])
    assert [score.outputs.score for score in scores] == [1, -1]


def test_a_model_with_a_head_judges_pairs() -> None:
    plan = plan_scores(inputs("classify", "score"), "q", ["a", "b"], PoolingParams(use_activation=False))
    pairs = [[ord("q"), 0, ord(other)] for other in "ab"]
    assert plan.prompts == [{"prompt_token_ids": pair} for pair in pairs]
    assert {(params.task, params.use_activation) for params in plan.params} == {("score", False)}
    assert [score.outputs.score for score in plan.scores([pooled(0.25), pooled(0.75)])] == [0.25, 0.75]


@pytest.mark.parametrize(("one", "two"), [(["a", "b"], ["c"]), ("a", []), ([], ["a"])])
def test_texts_that_do_not_pair_up_are_refused(one: Any, two: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="text_1 and text_2"):
        plan_scores(inputs("embed", "score"), one, two, PoolingParams())


def test_what_the_model_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="task"):
        plan_scores(inputs("generate"), "a", "b", PoolingParams())
    with pytest.raises(InvalidTypeError, match="judges two texts together"):
        plan_scores(inputs("classify", "score"), [[1, 2]], ["b"], PoolingParams())


def test_labels_without_a_name_are_numbered() -> None:
    head = {"architectures": ["BertForSequenceClassification"]}
    assert label_names({**head, "id2label": {"0": "bad", "1": "good"}}) == ["bad", "good"]
    assert label_names({**head, "num_labels": 3}) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert label_names({"architectures": ["BertModel"]}) == []
