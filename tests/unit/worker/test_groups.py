"""Models whose layers are in several cache groups, on real runners: shared tensors, tables, ranks and stages."""

from __future__ import annotations

import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.kv_cache.specs import FULL, LayerRule, make_groups
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.loading import load_model
from nbengine.worker.model_runner import ModelRunner
from tests.support.thorough import amount
from tests.unit.worker.test_stages import (
    EVERYTHING,
    Engine,
    Result,
    check,
    divided,
    expected,
    five_layers,
)

__all__ = ["expected", "five_layers"]
LONG = LayerRule("window", 1 << 20)
"""A window that no request leaves, so that attention with it is full attention, in groups of its own."""
RULES = (LONG, LONG, FULL, LONG, LONG)


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers in five groups of one layer each."""
    monkeypatch.setattr(DecoderConfig, "cache_rules", lambda config: RULES[: config.num_layers])


class GroupedEngine(Engine):
    """An engine whose scheduler knows the groups."""

    groups = make_groups(RULES)


@pytest.mark.parametrize(
    ("tp_size", "pp_size"),
    amount([(1, 1), (2, 2), (1, 5)], thorough=[(1, 1), (2, 1), (1, 2), (2, 2), (1, 5)]),
)
@pytest.mark.usefixtures("in_groups")
def test_layers_in_groups_give_what_layers_in_one_group_give(
    expected: dict[str, Result], five_layers: EngineConfig, tp_size: int, pp_size: int
) -> None:
    """In chunks, with preemptions and prefix hits; every group writes in the same tensors."""
    config = divided(five_layers, tp_size, pp_size, max_num_batched_tokens=24, max_num_seqs=6)
    engine = GroupedEngine(config, 24 * 5, seed=tp_size * pp_size)
    check(engine.run(EVERYTHING), expected)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.make_stats().prefix_cache_hits > 0


@pytest.mark.usefixtures("in_groups")
def test_layers_of_different_groups_share_a_tensor_and_layers_of_one_group_do_not(
    five_layers: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a block takes the bytes of the layers of one group."""
    monkeypatch.setattr(DecoderConfig, "cache_rules", lambda _: (FULL, LONG, FULL, LONG, LONG))
    runner = ModelRunner(
        five_layers, load_model(five_layers.model, torch.device("cpu"), torch.float32), torch.device("cpu"),
        torch.float32,
    )  # fmt: skip
    runner.initialize_kv_cache(8, 32)
    addresses = [cache.data_ptr() for cache in runner._kv_caches]
    # The windows have two groups: the layers 1 and 4, and layer 3.
    assert addresses[0] == addresses[1] == addresses[3]
    assert addresses[2] == addresses[4] != addresses[0]
    runner.release_kv_cache()
    assert not runner._kv_caches
    runner.restore_kv_cache()
    assert len({cache.data_ptr() for cache in runner._kv_caches}) == 2
