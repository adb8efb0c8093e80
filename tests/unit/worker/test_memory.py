"""Memory budgets, and what control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbengine.errors import EngineStartError
from nbengine.runtime import capacity
from nbengine.runtime.cgroup import ControlGroup
from nbengine.worker.memory.limits import (
    GIB,
    check_kv_cache_fits,
    check_weights_fit,
    cpu_kv_budget,
    gpu_kv_budget,
)


@pytest.mark.parametrize(
    ("available", "asked", "everything", "budget"),
    [
        (6 * GIB, 0, 99 * GIB, 1.5 * GIB),
        (100 * GIB, 0, 999 * GIB, 2 * GIB),
        (100 * GIB, 5 * GIB, 999 * GIB, 5 * GIB),
        (8 * GIB, 7 * GIB, 999 * GIB, 4 * GIB),
        (8 * GIB, 1 * GIB, 999 * GIB, 2 * GIB),
        (100 * GIB, 0, 3 << 20, 3 << 20),
    ],
)
def test_a_cpu_cache_takes_a_modest_share(available: int, asked: int, everything: int, budget: float) -> None:
    assert cpu_kv_budget(available, asked, everything) == budget


def test_a_gpu_cache_gets_what_the_rest_leaves_of_the_share() -> None:
    assert gpu_kv_budget(100 * GIB, 0.9, peak=30 * GIB, others=2 * GIB) == 58 * GIB
    with pytest.raises(EngineStartError, match=r"gpu_memory_utilization=0\.3 of 10 GiB is 3 GiB"):
        gpu_kv_budget(10 * GIB, 0.3, peak=2 * GIB, others=1 * GIB)


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    check_weights_fit("m", GIB, GIB, "cpu")
    with pytest.raises(EngineStartError, match=r"'big' does not fit on cpu.* 3 GiB and 2 GiB are free"):
        check_weights_fit("big", 3 * GIB, 2 * GIB, "cpu")
    check_kv_cache_fits(4, GIB, 4 * GIB, "cpu")
    with pytest.raises(EngineStartError, match=r"5 blocks .* 5 GiB and 4 GiB.*lower kv_cache_memory_bytes"):
        check_kv_cache_fits(5, GIB, 4 * GIB, "cpu")


def group(tmp_path: Path, membership: str, files: dict[str, str]) -> ControlGroup:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "membership").write_text(membership)
    return ControlGroup(root, tmp_path / "membership")


def test_version_2_limits_hold_for_the_group_and_those_around_it(tmp_path: Path) -> None:
    found = group(
        tmp_path,
        "0::/user/job\n",
        {
            "user/job/memory.max": "max",
            "user/job/memory.current": "100",
            "user/job/cpu.max": "max 100000",
            "user/memory.max": "5000",
            "user/memory.current": "3000",
            "user/memory.stat": "anon 2000\ninactive_file 700\nactive_file 300",
            "user/cpu.max": "150000 100000",
            "memory.max": "9000",
            "memory.current": "3000",
            "memory.stat": "inactive_file 0",
        },
    )
    assert found.memory_headroom() == 2700
    assert found.cpu_limit() == 2


def test_version_1_limits_are_found_where_only_the_root_is_visible(tmp_path: Path) -> None:
    found = group(
        tmp_path,
        "9:name=systemd:/\n4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "4000",
            "memory/memory.usage_in_bytes": "4500",
            "memory/memory.stat": "total_inactive_file 100",
            "cpu/cpu.cfs_quota_us": "50000",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert found.memory_headroom() == 0
    assert found.cpu_limit() == 1


@pytest.mark.parametrize(("mapped", "left"), [(0, 2700), (300, 2400), (5000, 2000)])
def test_files_that_are_mapped_are_in_use_in_a_group(mapped: int, left: int, tmp_path: Path) -> None:
    stat = f"inactive_file 700\nfile_mapped {mapped}"
    second = {"memory.max": "5000", "memory.current": "3000", "memory.stat": stat}
    assert group(tmp_path / "2", "0::/\n", second).memory_headroom() == left
    first = {
        "memory/memory.limit_in_bytes": "5000",
        "memory/memory.usage_in_bytes": "3000",
        "memory/memory.stat": f"total_inactive_file 700\ntotal_mapped_file {mapped}",
    }
    assert group(tmp_path / "1", "3:memory:/x\n", first).memory_headroom() == left


def test_files_that_are_mapped_are_in_use_on_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "ControlGroup", lambda: group(tmp_path, "", {}))
    monkeypatch.setattr(capacity, "_MEMORY", tmp_path / "meminfo")
    usage = capacity.psutil.virtual_memory()._replace(available=5 * GIB)
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: usage)
    assert capacity.available_host_memory() == 5 * GIB
    (tmp_path / "meminfo").write_text("MemFree: 9 kB\nMapped:  3145728 kB\nShmem: 1048576 kB\nHugePages: 0\n")
    assert capacity.available_host_memory() == 3 * GIB


@pytest.mark.parametrize("membership", ["", "0::/\n", "3:memory:/x\n2:cpu:/x\n"])
def test_no_limits_are_no_limits(tmp_path: Path, membership: str) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "cpu.max": "max 100000",
    }
    found = group(tmp_path, membership, files)
    assert found.memory_headroom() is None
    assert found.cpu_limit() is None


def test_without_control_groups_there_are_no_limits(tmp_path: Path) -> None:
    found = ControlGroup(tmp_path / "absent", tmp_path / "absent too")
    assert found.memory_headroom() is None
    assert found.cpu_limit() is None
