"""The 'model' whose tokens the scheduler's tests compute: layers of several kinds over whole sequences, no cache.

Each layer turns the values of a sequence into new ones: at a position it mixes the values, in order, of all positions
that its rule lets it see; a recurrent layer mixes each value into what it had for the position before.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.kv_cache.specs import FULL, LayerRule

Rules = tuple[LayerRule, ...]
PLAIN: Rules = (FULL,)
_MASK = (1 << 61) - 1


def mix(state: int, value: int) -> int:
    return ((state ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % _MASK


def mix_all(values: Sequence[int]) -> int:
    state = 0
    for value in values:
        state = mix(state, value)
    return state


def first_visible(rule: LayerRule, position: int) -> int:
    """The first position that a query sees; it also sees those up to its own."""
    if rule.kind == "window":
        return max(0, position - (rule.size - 1))
    if rule.kind == "chunk":
        return position // rule.size * rule.size
    return 0


def tables_of(rules: Rules) -> list[LayerRule]:
    """The rule of each block table: as many tables a rule as it takes for none to have more layers than the rarest
    rule has."""
    attention = [rule for rule in rules if rule.kind != "recurrent"]
    fewest = min((attention.count(rule) for rule in attention), default=0)
    tables: list[LayerRule] = []
    for rule in dict.fromkeys(attention):
        left = attention.count(rule)
        while left > 0:
            tables.append(rule)
            left -= fewest
    return tables


def layers_of(rules: Rules) -> list[tuple[int, LayerRule]]:
    """The layers of the 'model', each with the number of its table; that of a recurrent one is -1.

    A model with full attention alone has two, so that the second reads what the first has made of other requests'
    tokens.
    """
    layers = list(enumerate(tables_of(rules)))
    if any(rule.kind == "recurrent" for rule in rules):
        # It lies between others, so that what it gives is read by them.
        recurrent = next(rule for rule in rules if rule.kind == "recurrent")
        layers.insert(min(1, len(layers)), (-1, recurrent))
    return layers * 2 if len(layers) == 1 and layers[0][0] == 0 else layers


class GrowingSequence:
    """The values of all layers of one sequence that grows."""

    def __init__(self, rules: Rules) -> None:
        self._layers = layers_of(rules)
        self._inputs: list[list[int]] = [[] for _ in self._layers]
        self._states = [0] * len(self._layers)
        self.value = 0

    def append(self, token: int) -> None:
        value = token
        for number, (_, rule) in enumerate(self._layers):
            inputs = self._inputs[number]
            inputs.append(value)
            if rule.kind in ("full", "recurrent"):
                self._states[number] = value = mix(self._states[number], value)
            else:
                value = mix_all(inputs[first_visible(rule, len(inputs) - 1) :])
        self.value = value
