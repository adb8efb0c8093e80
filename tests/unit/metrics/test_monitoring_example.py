"""The example's dashboard, the page, and the exposition name the same metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nbengine.metrics.exposition import LABELS, PREFIX, metrics_of
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana" / "nbengine.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
FAMILIES = list(
    metrics_of(EngineStats([SchedulerStats(workers=[WorkerStats()], requests=RequestStats())]), "m")
)
SERIES = {sample.name: set(sample.labels) for family in FAMILIES for sample in family.samples}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_a_panel_asks_for_series_and_labels_that_there_are(expression: str) -> None:
    asked = re.findall(rf"({PREFIX}\w+){{", expression)
    assert asked
    assert set(asked) <= SERIES.keys()
    grouped = {
        name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")
    }
    selected = set(re.findall(r"(\w+)=~", expression))
    assert grouped | selected <= set.union(*(SERIES[name] for name in asked))
    assert selected == set(LABELS)
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_s_variables_are_labels_and_its_panels_do_not_overlap() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", *LABELS}
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for cell in (
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        ):
            assert cell not in places
            assert cell[0] < 24
            places.add(cell)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_family_is_on_the_page_and_the_page_has_no_other() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{PREFIX}")]
    documented = {name for row in rows for name in re.findall(rf"`({PREFIX}\w+)`", row)}
    names = {family.name + ("_total" if family.type == "counter" else "") for family in FAMILIES}
    assert documented == names
    for row in rows:
        name, kind = re.findall(rf"`({PREFIX}\w+)`", row)[0], row.split("|")[2].strip()
        (family,) = [f for f in FAMILIES if name in (f.name, f"{f.name}_total")]
        assert family.type == kind


def test_almost_every_family_is_shown() -> None:
    shown = "\n".join(expressions())
    left_out = {family.name for family in FAMILIES if family.name not in shown}
    assert left_out == {
        f"{PREFIX}{name}" for name in ("kv_cache_blocks", "kv_cache_cached_blocks", "sleep_level", "paused")
    }
