"""Models with several kinds of layers, for histories of the scheduler."""

from __future__ import annotations

from dataclasses import replace

from nbengine.kv_cache.specs import FULL, LayerRule
from tests.unit.scheduler.layered_model import Rules, tables_of
from tests.unit.scheduler.reference import Limits

STATE = LayerRule("recurrent", 8)


def window(size: int) -> LayerRule:
    return LayerRule("window", size)


def chunk(size: int) -> LayerRule:
    return LayerRule("chunk", size)


MIXTURES: dict[str, Rules] = {
    "full and window": (FULL, window(3)),
    "full and several windows": (FULL, window(3), window(3), window(7)),
    "full and chunk": (FULL, chunk(4)),
    "full and recurrent": (FULL, STATE, STATE),
    "window": (window(5), window(5)),
    "chunk": (chunk(6),),
    "recurrent": (STATE,),
    "window and recurrent": (window(4), STATE),
    "all": (STATE, window(3), chunk(5), FULL),
}


def with_rules(limits: Limits, rules: Rules, spare_slots: int, spacing: int, window_size: int) -> Limits:
    """Change limits for a model with these rules, so that a request of the greatest length still fits alone."""
    rules = tuple(
        replace(rule, size=window_size) if rule.kind in ("window", "chunk") else rule for rule in rules
    )
    has_states = STATE in rules
    return replace(
        limits,
        rules=rules,
        # Fewer than full attention of every table takes, so that there are preemptions.
        num_blocks=limits.num_blocks * (1 + len(tables_of(rules))) // 2 if tables_of(rules) else 0,
        lookahead=0 if has_states else limits.lookahead,
        num_state_slots=1 + spare_slots if has_states else 0,
        spacing=spacing,
    )
