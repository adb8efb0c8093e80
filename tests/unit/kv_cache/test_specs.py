"""Layers in groups: how they are divided, what a group needs of a request, and where its tensors lie."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.kv_cache.specs import (
    FULL,
    ONE_GROUP,
    ChunkedAttentionSpec,
    FullAttentionSpec,
    LayerRule,
    RecurrentSpec,
    SlidingWindowSpec,
    make_groups,
)

WINDOW, CHUNK, STATE = LayerRule("window", 8), LayerRule("chunk", 8), LayerRule("recurrent", 100)
rules_strategy = st.lists(st.sampled_from([FULL, WINDOW, LayerRule("window", 3), CHUNK, STATE]), min_size=1)


def test_a_model_with_one_rule_has_one_group_whose_layers_lie_in_a_tensor_each() -> None:
    groups = make_groups([FULL] * 30)
    assert groups.is_uniform
    assert groups.attention == (FullAttentionSpec(),) == ONE_GROUP.attention
    assert groups.num_tensors(range(30)) == 30
    assert groups.tensor_of(range(10, 20)) == list(range(10))
    assert groups.most_blocks(17, 16, 8192) == 2
    assert not make_groups([WINDOW] * 30).is_uniform


def test_five_windows_to_one_full_layer_are_six_groups_of_equal_size() -> None:
    groups = make_groups(([WINDOW] * 5 + [FULL]) * 4)
    assert groups.attention == (SlidingWindowSpec(8),) * 5 + (FullAttentionSpec(),)
    assert {group: groups.layer_groups.count(group) for group in range(6)} == dict.fromkeys(range(6), 4)
    assert groups.num_tensors(range(24)) == 4
    # Each of two pipeline stages has half of every group.
    assert groups.num_tensors(range(12)) == groups.num_tensors(range(12, 24)) == 2


def test_recurrent_layers_are_the_last_group_and_take_their_bytes_together() -> None:
    groups = make_groups([STATE, STATE, STATE, FULL] * 2)
    assert groups.recurrent == RecurrentSpec(600)
    assert (groups.num_tables, groups.num_groups) == (1, 2)
    assert groups.layer_groups == (1, 1, 1, 0) * 2
    assert groups.tensor_of(range(8)) == [0, 1, 2, 0, 3, 4, 5, 1]
    assert groups.num_recurrent(range(4, 8)) == 3


def test_a_layer_that_reads_another_lies_with_it_and_keeps_nothing() -> None:
    rules = [WINDOW, FULL, WINDOW, FULL, LayerRule("shared", 3), LayerRule("shared", 4)]
    groups, own = make_groups(rules), make_groups(rules[:4])
    assert groups.attention == own.attention
    assert groups.layer_groups == (*own.layer_groups, own.layer_groups[2], own.layer_groups[3])
    assert groups.sources == ((4, 2), (5, 3))
    assert groups.tensor_of(range(6)) == [0, 0, 1, 1, 1, 1]
    assert groups.num_tensors(range(6)) == own.num_tensors(range(4)) == 2
    assert groups.most_blocks(100, 4, 8) == own.most_blocks(100, 4, 8)
    # A layer of a group of its own kind does not count twice.
    assert make_groups([FULL, LayerRule("shared", 1)]).is_uniform


@given(rules_strategy)
def test_layers_of_a_group_have_one_rule_and_no_group_is_larger_than_the_rarest_rule(rules) -> None:
    groups = make_groups(rules)
    members = [
        {rules[i] for i, g in enumerate(groups.layer_groups) if g == n} for n in range(groups.num_groups)
    ]
    attention = [rule for rule in rules if rule.kind != "recurrent"]
    fewest = min(map(attention.count, attention), default=0)
    for number in range(groups.num_tables):
        assert len(members[number]) == 1
        assert 1 <= groups.layer_groups.count(number) <= fewest
    for rule in set(attention):
        sizes = [groups.layer_groups.count(n) for n in range(groups.num_tables) if members[n] == {rule}]
        assert max(sizes) - min(sizes) <= 1


@given(rules_strategy, st.integers(1, 4))
def test_no_two_layers_of_a_group_lie_in_one_tensor(rules, num_stages: int) -> None:
    groups = make_groups(rules)
    bounds = [len(rules) * stage // num_stages for stage in range(num_stages + 1)]
    for start, end in itertools.pairwise(bounds):
        layers = range(start, end)
        places = [(groups.layer_groups[i], t) for i, t in zip(layers, groups.tensor_of(layers), strict=True)]
        assert len(set(places)) == len(places)
        attention = [t for group, t in places if group < groups.num_tables]
        assert groups.num_tensors(layers) == max(attention, default=-1) + 1


@given(
    st.sampled_from([SlidingWindowSpec, ChunkedAttentionSpec]),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 60),
    st.lists(st.integers(1, 12), min_size=1),
)
def test_a_request_never_holds_more_blocks_than_are_counted_for_it(
    kind, size, block_size, length, steps
) -> None:
    """Whatever the lengths of its steps, up to the longest."""
    spec, longest = kind(size), max(steps)
    rule = LayerRule("window" if kind is SlidingWindowSpec else "chunk", size)
    counted = make_groups([rule]).most_blocks(length, block_size, longest)
    computed = 0
    while computed < length:
        for step in steps:
            first = spec.first_needed(computed) // block_size
            computed = min(computed + step, length)
            assert -(-computed // block_size) - first <= counted


def test_the_longest_request_is_the_longest_that_fits() -> None:
    groups = make_groups([FULL, WINDOW])
    longest = groups.longest(20, 4, 6, 1000)
    assert groups.most_blocks(longest, 4, 6) <= 20 < groups.most_blocks(longest + 1, 4, 6)
    # What a window needs does not grow.
    assert make_groups([WINDOW]).longest(20, 4, 6, 1000) == 1000
    assert make_groups([FULL]).longest(20, 4, 6, 1000) == 80


@pytest.mark.parametrize(("kind", "size"), [("full", 3), ("window", 0), ("recurrent", -1), ("sliding", 4)])
def test_a_rule_that_cannot_be_names_its_argument(kind, size) -> None:
    with pytest.raises(InvalidArgumentError, match="kind" if kind == "sliding" else "size"):
        LayerRule(kind, size)
