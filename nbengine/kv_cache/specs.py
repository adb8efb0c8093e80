"""The rules for what a model's layers keep of a request, and the groups of layers that share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nbengine.errors import InvalidArgumentError

RuleKind = Literal["full", "window", "chunk", "recurrent", "shared"]
RULE_KINDS = ("full", "window", "chunk", "recurrent", "shared")


@dataclass(frozen=True, slots=True)
class LayerRule:
    """The rule for what one layer keeps of a request, as plain data; a model has one for each of its layers.

    `size` is the window or the chunk in tokens, or the bytes of a recurrent layer's state in all
    tensor-parallel ranks together, each of which has an equal part; 0 for full attention. A "shared" layer keeps
    nothing: it reads the keys and values of the layer before it whose number, plus one, is `size`.
    """

    kind: RuleKind
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in RULE_KINDS:
            raise InvalidArgumentError("kind", self.kind, f"one of {', '.join(RULE_KINDS)}")
        if (self.size < 1) is not (self.kind == "full"):
            raise InvalidArgumentError("size", self.size, "0 for full attention, else at least 1")


FULL = LayerRule("full")


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The rule for what an attention layer must keep of a request."""

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        """Return the first token that the query at position `num_computed`, or a later one, reads."""
        return 0

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:  # noqa: ARG002
        """Return the most tokens that must be kept at a time, in blocks that may begin anywhere, while
        `num_tokens` are computed in steps of up to `longest_step`."""
        return num_tokens

    @property
    def is_bounded(self) -> bool:
        """Tell whether tokens are given up while a request runs."""
        return False


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Every query reads all tokens before it."""


@dataclass(frozen=True, slots=True)
class _BoundedSpec(KVCacheSpec):
    @property
    def is_bounded(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(_BoundedSpec):
    """The query at position p reads the tokens after p - `window`."""

    window: int

    def first_needed(self, num_computed: int) -> int:
        """See `KVCacheSpec`."""
        return max(0, num_computed - self.window + 1)

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:
        """See `KVCacheSpec`."""
        return min(num_tokens, self.window - 1 + longest_step)


@dataclass(frozen=True, slots=True)
class ChunkedAttentionSpec(_BoundedSpec):
    """The query at position p reads the tokens from p - p mod `chunk` on."""

    chunk: int

    def first_needed(self, num_computed: int) -> int:
        """See `KVCacheSpec`."""
        return num_computed - num_computed % self.chunk

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:
        """See `KVCacheSpec`."""
        return min(num_tokens, self.chunk - 1 + longest_step)


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """All recurrent layers together keep `state_bytes` of a request, whatever its length."""

    state_bytes: int


def _spec_of(rule: LayerRule) -> KVCacheSpec:
    if rule.kind == "window":
        return SlidingWindowSpec(rule.size)
    return ChunkedAttentionSpec(rule.size) if rule.kind == "chunk" else FullAttentionSpec()


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model's layers: the layers of a group have one rule and one block table a request.

    A block holds some tokens of one group's layers, and all groups take blocks from one pool. A request's
    tables grow together, column by column, and lie in one list: the block of group g in column c is at place
    c * `num_tables` + g. Recurrent layers are one more group, the last, with a slot a request in place of a
    table.
    """

    attention: tuple[KVCacheSpec, ...]
    """One for each group of attention layers."""
    recurrent: RecurrentSpec | None
    layer_groups: tuple[int, ...]
    """The group of each layer of the model; that of recurrent layers is `num_tables`."""
    sources: tuple[tuple[int, int], ...] = ()
    """The layers that keep nothing, each with the layer whose keys and values it reads, which is of the same group."""

    @property
    def num_tables(self) -> int:
        """Count the block tables of a request."""
        return len(self.attention)

    @property
    def num_groups(self) -> int:
        """Count the groups, that of the recurrent layers included."""
        return len(self.attention) + (self.recurrent is not None)

    @property
    def is_uniform(self) -> bool:
        """Tell whether all layers have full attention, so that there is one table and nothing is given up."""
        return self.attention == (FullAttentionSpec(),) and self.recurrent is None

    def tensor_of(self, layers: range) -> list[int]:
        """Return the physical tensor, of those of a pipeline stage, in which each of its `layers` lies: the
        k-th layer of every group lies in tensor k, and a layer that keeps nothing where its source lies. Recurrent
        layers count apart, from 0."""
        met, sources = [0] * self.num_groups, dict(self.sources)
        places: dict[int, int] = {}
        for layer in layers:
            if layer in sources:
                places[layer] = places[sources[layer]]
                continue
            group = self.layer_groups[layer]
            places[layer] = met[group]
            met[group] += 1
        return list(places.values())

    def num_tensors(self, layers: range) -> int:
        """Count the physical tensors of a pipeline stage that has these layers."""
        sources = dict(self.sources)
        own = [self.layer_groups[layer] for layer in layers if layer not in sources]
        return max((own.count(group) for group in range(self.num_tables)), default=0)

    def num_recurrent(self, layers: range) -> int:
        """Count the recurrent layers among these."""
        return sum(self.layer_groups[layer] == self.num_tables for layer in layers)

    def most_blocks(self, num_tokens: int, block_size: int, longest_step: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at a time, if it is computed in steps of
        up to `longest_step` tokens."""
        whole = -(-num_tokens // block_size)
        return sum(spec_blocks(spec, whole, num_tokens, block_size, longest_step) for spec in self.attention)

    def longest(self, num_blocks: int, block_size: int, longest_step: int, limit: int) -> int:
        """Return the most tokens, up to `limit`, of a request that never holds more than `num_blocks`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle, block_size, longest_step) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def spec_blocks(spec: KVCacheSpec, whole: int, num_tokens: int, block_size: int, longest_step: int) -> int:
    """Return the most blocks of one group that a request of `num_tokens`, which fill `whole` blocks, holds at
    a time."""
    if not spec.is_bounded:
        return whole
    kept = spec.most_tokens(num_tokens, longest_step)
    # What is kept may begin at the last token of a block.
    return min(whole, (kept + 2 * block_size - 2) // block_size)


def make_groups(rules: Sequence[LayerRule]) -> CacheGroups:
    """Divide the layers of a model, given the rule of each, into groups of about equal size.

    A group has at most as many layers as the rule that the fewest attention layers have. The layers of a rule
    are dealt out to its groups in turn, so that every pipeline stage has its part of each group.
    """
    counts: dict[LayerRule, int] = {}
    for rule in rules:
        if rule.kind not in ("recurrent", "shared"):
            counts[rule] = counts.get(rule, 0) + 1
    size = min(counts.values(), default=1)
    attention: list[KVCacheSpec] = []
    groups_of: dict[LayerRule, range] = {}
    for rule, count in counts.items():
        first = len(attention)
        attention += [_spec_of(rule)] * -(-count // size)
        groups_of[rule] = range(first, len(attention))
    met: dict[LayerRule, int] = {}
    layer_groups: list[int] = []
    for rule in rules:
        if rule.kind == "recurrent":
            layer_groups.append(len(attention))
            continue
        if rule.kind == "shared":
            layer_groups.append(layer_groups[rule.size - 1])
            continue
        own, number = groups_of[rule], met.get(rule, 0)
        layer_groups.append(own[number % len(own)])
        met[rule] = number + 1
    state_bytes = sum(rule.size for rule in rules if rule.kind == "recurrent")
    recurrent = RecurrentSpec(state_bytes) if state_bytes else None
    sources = [(layer, rule.size - 1) for layer, rule in enumerate(rules) if rule.kind == "shared"]
    return CacheGroups(tuple(attention), recurrent, tuple(layer_groups), tuple(sources))


ONE_GROUP = make_groups((FULL,))
"""The groups of a model whose layers all have full attention, as far as its requests' tables go."""
