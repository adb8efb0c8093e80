"""The examples of a kept prompt, made of rows of the notebook when the prompt is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.frontend.prompts.prompt import Example, Prompt
from nbengine.frontend.prompts.sections import root_of
from nbengine.frontend.text.interpolate import fill, look_up, paths_in
from nbengine.magics.comparison.axes import each_axis
from nbengine.magics.scores.scorers import fields_of

MOST_EXAMPLES = 1000
"""The most examples of a prompt."""


def examples_of(
    prompt: Prompt, source: str, column: str, namespace: Mapping[str, object], prog: str
) -> tuple[Example, ...]:
    """Make examples of the rows that a variable names: the last message with a row's values, and its answer.

    Rows are what `--each` goes through; their fields are values of the prompt's variables, and `column` is the
    field that has the answer.

    Raises:
        UsageError: there is no such variable, or a row has no answer or no value for a variable.
    """
    flag = f"{prog}: --examples {source}"
    try:
        axis = each_axis(source, namespace, prog, MOST_EXAMPLES)
    except UsageError as error:
        raise UsageError(str(error).replace("--each", "--examples", 1)) from None
    return tuple(_examples(prompt, [choice.value for choice in axis.choices], column, flag))


def _examples(prompt: Prompt, rows: list[Any], column: str, flag: str) -> Iterator[Example]:
    template = prompt.sections[-1].text
    for number, row in enumerate(rows, 1):
        fields = fields_of(row)
        if column not in fields:
            hint = did_you_mean(column, fields)
            raise UsageError(f"{flag}: row {number} has no {column!r}, which --answer names{hint}")
        values = {**prompt.defaults, **fields}
        texts = {}
        for path in paths_in(template):
            try:
                texts[path] = str(look_up(path, values))
            except LookupError:
                raise UsageError(f"{flag}: row {number} has no {root_of(path)!r} for {{{path}}}") from None
        try:
            yield Example(fill(template, texts), str(fields[column]))
        except InvalidArgumentError as error:
            raise UsageError(f"{flag}: row {number}: {error}") from None
