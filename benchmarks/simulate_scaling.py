"""Find where the coordinator or the balancing rule breaks: 256 engine cores and 32 clients, as a simulation.

    python benchmarks/simulate_scaling.py [--record] [--json PATH] [--images DIR] [--quick]

The decisions are those of the real classes (`LoadBalancer`, `DPCoordinator`, `WaveState`), time and processes
are made up; no process is started. The costs are read from docs/benchmarks/scaling_costs.json, so that
everybody gets the same figures; --record first measures them again on this machine, which nothing else should
use meanwhile. docs/scaling.md says what the figures mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import machine, parser, report
from scaling.chart import COLORS, Chart, draw
from scaling.costs import Costs, load, measure, save
from scaling.independent import MEAN_LENGTH, Outcome, Setting, Simulation
from scaling.lock_step import LockStep
from scaling.rules import CENTRAL

DOCS = Path(__file__).parents[1] / "docs"
RECORDED = DOCS / "benchmarks" / "scaling_costs.json"
RULES = ("ours", "all ranks", "two choices", "snapshot alone", "random", CENTRAL)
COLOR_OF = dict(zip((*RULES, "snapshot + own"), COLORS, strict=False))
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
LOADS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
INTERVALS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
RANKS = (4, 16, 64, 256)
SPEEDS = (1, 2, 4, 8, 16)
LOCK_STEP_RANKS = (2, 4, 16, 64, 256)
LOCK_STEP_LOADS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
WAIT, MOST, CROWD = "wait p99 ms", "most requests / mean", "most to one rank"
X_LABELS = {
    "num_clients": "clients",
    "load": "load, as a share of what 256 ranks can do",
    "publish_interval": "seconds between two snapshots",
    "num_ranks": "ranks",
}
Row = dict[str, Any]


class Sweeps:
    """A runner of settings that keeps a row of figures for each."""

    def __init__(self, costs: Costs, seconds: float) -> None:
        self._costs = costs
        self._seconds = seconds

    def by_rule(
        self, sweep: str, name: str, values: Iterable[Any], rules: Iterable[str], **fixed: Any
    ) -> list[Row]:
        """Vary one thing, for each rule."""
        rows = []
        for value in values:
            for rule in rules:
                setting = Setting(rule=rule, seconds=self._seconds, **{name: value, **fixed})
                outcome = Simulation(setting, self._costs).run()
                rows.append({"sweep": sweep, name: value, "rule": rule, **self._figures(setting, outcome)})
        return rows

    def _figures(self, setting: Setting, outcome: Outcome) -> Row:
        waits = percentiles(outcome.waits)
        ages = percentiles(outcome.ages)
        return {
            "requests/s": round(setting.request_rate(self._costs), 1),
            "wait p50 ms": ms(waits[49]),
            "wait p99 ms": ms(waits[98]),
            "most requests / mean": round(statistics.fmean(outcome.request_imbalance), 3),
            "most work / mean": round(statistics.fmean(outcome.work_imbalance), 3),
            "most to one rank": round(mean(outcome.crowding), 2),
            "age p50 ms": ms(ages[49]),
            "age p99 ms": ms(ages[98]),
            "publications/s": round(outcome.num_publications / outcome.duration, 1),
            "coordinator": round(outcome.coordinator_busy / outcome.duration, 4),
            "client": round(outcome.client_busy / outcome.duration / setting.num_clients, 5),
        }

    def lock_step(self, sweep: str, settings: Iterable[Setting]) -> list[Row]:
        """Run ranks in lock step."""
        rows = []
        for setting in settings:
            outcome = LockStep(setting, self._costs).run()
            steps = outcome.dummy_steps + outcome.busy_steps
            rows.append(
                {
                    "sweep": sweep,
                    "num_ranks": setting.num_ranks,
                    "load": setting.load,
                    "waves": len(outcome.starts),
                    "start p50 ms": ms(statistics.median(outcome.starts)) if outcome.starts else None,
                    "start worst ms": ms(max(outcome.starts)) if outcome.starts else None,
                    "dummy steps": round(outcome.dummy_steps / steps, 4) if steps else None,
                    "turn / mean step": round(outcome.stepping / outcome.stepping_alone, 4)
                    if steps
                    else None,
                    "coordinator": round(outcome.coordinator_busy / outcome.duration, 4),
                }
            )
        return rows

    def rare(self, num_ranks: int, seconds_between: float) -> Setting:
        """Return a setting with requests so rare that each begins a wave, as long as the pause is."""
        whole = Setting(num_ranks=num_ranks, load=1.0).request_rate(self._costs)
        load = 1 / seconds_between / whole
        return Setting(
            num_ranks=num_ranks, load=load, lengths="equal", seconds=40 * seconds_between, warm_up=0.0
        )


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the 1st to the 99th percentile."""
    return (
        statistics.quantiles(values, n=100, method="inclusive")
        if len(values) > 1
        else [*values, 0.0][:1] * 99
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 of nothing."""
    return statistics.fmean(values) if values else 0.0


def ms(seconds: float) -> float:
    """Return milliseconds, to three places."""
    return round(seconds * 1000, 3)


def run_all(costs: Costs, seconds: float) -> list[Row]:
    """Run all sweeps around the middle: 256 ranks, 32 clients, load 0.85, skewed lengths, a snapshot each 0.1
    s."""
    sweeps = Sweeps(costs, seconds)
    few = RULES[:3]
    rows = sweeps.by_rule("clients", "num_clients", CLIENTS, RULES)
    rows += sweeps.by_rule("load", "load", LOADS, RULES)
    rows += sweeps.by_rule("lengths", "lengths", ("equal", "random", "skewed"), (*RULES, "snapshot + own"))
    rows += sweeps.by_rule("publish interval", "publish_interval", INTERVALS, few)
    rows += sweeps.by_rule("ranks", "num_ranks", RANKS, RULES)
    rows += sweeps.by_rule("speed", "speed", SPEEDS, few[:1], warm_up=1.0, lengths="random")
    rows += sweeps.by_rule("quiet", "load", (0.01, 0.02, 0.05, 0.1), few[:1], lengths="equal")
    rows += sweeps.lock_step("wave start", [sweeps.rare(ranks, 8.0) for ranks in LOCK_STEP_RANKS])
    for ranks in (8, 64, 256):
        loads = [
            Setting(num_ranks=ranks, load=load, lengths="random", seconds=seconds) for load in LOCK_STEP_LOADS
        ]
        rows += sweeps.lock_step("lock step", loads)
    return rows


def pick(rows: list[Row], sweep: str, name: str, figure: str) -> dict[str, list[float | None]]:
    """Return a figure by rule, in the order of `name`'s values."""
    series: dict[str, list[float | None]] = {}
    for row in rows:
        if row["sweep"] == sweep and name in row:
            series.setdefault(row["rule"], []).append(row[figure])
    return series


def balance_charts(rows: list[Row]) -> list[Chart]:
    """Draw how evenly ranks are loaded, and what that costs requests."""

    def chart(title: str, sweep: str, name: str, places: Sequence[object], figure: str, y: str) -> Chart:
        series = pick(rows, sweep, name, figure)
        return Chart(title, X_LABELS[name], y, places, series, figure == WAIT, COLOR_OF)

    wait_y, most_y = "ms, 99th percentile", "requests, by the mean of all ranks"
    crowd_y = "requests to the rank that gets most"
    return [
        chart("Wait for the first step: clients", "clients", "num_clients", CLIENTS, WAIT, wait_y),
        chart("Load of the busiest rank: clients", "clients", "num_clients", CLIENTS, MOST, most_y),
        chart("Wait for the first step: load", "load", "load", LOADS, WAIT, wait_y),
        chart("Load of the busiest rank: ranks", "ranks", "num_ranks", RANKS, MOST, most_y),
        chart("Wait: age of the snapshots", "publish interval", "publish_interval", INTERVALS, WAIT, wait_y),
        chart("One rank between two snapshots", "clients", "num_clients", CLIENTS, CROWD, crowd_y),
    ]


def coordination_charts(rows: list[Row]) -> list[Chart]:
    """Draw what the coordinator and lock step cost."""
    speeds, locked, starts = (
        [row for row in rows if row["sweep"] == sweep] for sweep in ("speed", "lock step", "wave start")
    )

    def by_ranks(figure: str) -> dict[str, list[Any]]:
        return {f"{n} ranks": [row[figure] for row in locked if row["num_ranks"] == n] for n in (8, 64, 256)}

    return [
        Chart(
            "Coordinator: 256 ranks, faster steps",
            "steps a second of each rank",
            "share of one core",
            [round(speed / 0.0275) for speed in SPEEDS],
            {"coordinator": [row["coordinator"] for row in speeds]},
        ),
        Chart(
            "Start of a wave",
            "ranks",
            "ms from the request to the first turn",
            LOCK_STEP_RANKS,
            {"median": [row["start p50 ms"] for row in starts]},
        ),
        Chart("Dummy steps", "load", "share of all steps", LOCK_STEP_LOADS, by_ranks("dummy steps")),
        Chart(
            "A turn waits for its slowest rank",
            "load",
            "turn, by the mean of the ranks' steps",
            LOCK_STEP_LOADS,
            by_ranks("turn / mean step"),
        ),
    ]


def write_images(rows: list[Row], directory: Path) -> None:
    """Write the charts of docs/scaling.md."""
    for name, charts, title in (
        ("scaling_balance", balance_charts(rows), "Balancing with many ranks and clients"),
        ("scaling_coordination", coordination_charts(rows), "Coordinator and lock step"),
    ):
        (directory / f"{name}.svg").write_text(draw(charts, title))


def main() -> None:
    """Simulate, print tables, write figures and charts."""
    options = parser(__doc__)
    options.add_argument("--record", action="store_true", help="first measure the costs on this machine")
    options.add_argument("--images", type=Path, help="write the charts here")
    options.add_argument("--quick", action="store_true", help="short runs, for a look")
    arguments = options.parse_args()
    if arguments.record:
        benchmarks = DOCS / "benchmarks"
        recorded = measure(benchmarks / "async_scheduling.json", benchmarks / "all_reduce.json")
        save(RECORDED, recorded, machine())
    costs = load(RECORDED)
    rows = run_all(costs, 3.0 if arguments.quick else 15.0)
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        report(sweep, [row for row in rows if row["sweep"] == sweep], None)
    if arguments.json is not None:
        report("all", rows, arguments.json, mean_length=MEAN_LENGTH)
    if arguments.images is not None:
        write_images(rows, arguments.images)


if __name__ == "__main__":
    main()
