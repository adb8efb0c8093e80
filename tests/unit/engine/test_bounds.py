"""An engine that asks too much of a machine is refused by name, with the largest possible number and why."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM
from nbengine.config import EngineArgs, EngineConfig
from nbengine.engine import bounds
from nbengine.engine.bounds import TORCH_PROCESS_BYTES, check_counts, check_memory, scaling_refusal
from nbengine.errors import EngineStartError, InvalidArgumentError
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.runtime import capacity
from nbengine.runtime.capacity import LEAST_STARTING, REMOTE_STARTING, Capacity, max_starting
from nbengine.runtime.cgroup import ControlGroup

MIB = 1 << 20
LARGE = Capacity(num_cpus=2, memory=1 << 50)


def config(model: str = "random-tiny", **arguments: Any) -> EngineConfig:
    made = EngineArgs.from_kwargs({"model": model, **arguments}).create_engine_config(bound=True)
    return replace(made, model=resolve_model(made.model))


def refusal(machine: Capacity, **arguments: Any) -> str | None:
    asked = config(**arguments)
    try:
        check_counts(asked, machine)
        check_memory(asked, load_hf_config(asked.model), machine)
    except InvalidArgumentError as error:
        return str(error)
    return None


ON_2_CPUS = "an engine may have 64 processes on 2 CPUs, 32 for each"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_size": 64}, None),
        ({"data_parallel_size": 65}, f"data_parallel_size must be at most 64 here: {ON_2_CPUS}, got 65"),
        ({"tensor_parallel_size": 63}, None),
        (
            {"tensor_parallel_size": 10**6},
            f"tensor_parallel_size must be at most 63 here: {ON_2_CPUS}, and the engine core is one of them, got 1000000",
        ),
        (
            {"pipeline_parallel_size": 40, "tensor_parallel_size": 2},
            f"pipeline_parallel_size must be at most 31 here: {ON_2_CPUS}, and the engine core is one of them, got 40",
        ),
        (
            {"data_parallel_size": 30, "tensor_parallel_size": 2},
            f"data_parallel_size must be at most 21 here: {ON_2_CPUS}, and an engine core has 3 of them with its workers, got 30",
        ),
        (
            {"data_parallel_size": 10**6, "data_parallel_backend": "ray"},
            "data_parallel_size must be at most 1024 on a Ray cluster, got 1000000",
        ),
        (
            {"tensor_parallel_size": 2000, "distributed_executor_backend": "ray"},
            "tensor_parallel_size must be at most 1024 on a Ray cluster, got 2000",
        ),
        ({"data_parallel_size": 1000, "data_parallel_backend": "ray"}, None),
        ({"max_num_seqs": 10**6}, None),
    ],
)
def test_counts_are_bounded_by_the_cpus(arguments: dict[str, Any], message: str | None) -> None:
    assert refusal(LARGE, **arguments) == message


def test_one_cpu_is_enough_for_several_engine_cores() -> None:
    assert refusal(Capacity(1, 1 << 50), data_parallel_size=32) is None
    said = refusal(Capacity(1, 1 << 50), data_parallel_size=33)
    assert said == (
        "data_parallel_size must be at most 32 here: an engine may have 32 processes on 1 CPU, 32 for each, got 33"
    )


def test_counts_are_bounded_by_the_processes_that_may_be_started() -> None:
    machine = replace(LARGE, num_tasks=100)
    assert refusal(machine, data_parallel_size=12) is None
    assert refusal(machine, data_parallel_size=13) == (
        "data_parallel_size must be at most 12 here: 100 more processes and threads may be started here (ulimit -u, "
        "control group), and each process of an engine takes about 8, got 13"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 4}, None),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size must be at most 4 here"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, "data_parallel_size must be at most 2 here"),
    ],
)
def test_counts_are_bounded_by_the_gpus(arguments: dict[str, Any], message: str | None) -> None:
    machine = replace(LARGE, num_gpus=4)
    said = refusal(machine, device="cuda", **arguments)
    reason = ": each worker takes a GPU, and there are 4, got "
    assert said == message if message is None else (said or "").startswith(message + reason)
    assert refusal(replace(machine, num_gpus=None), device="cuda", **arguments) is None
    assert refusal(machine, device="cpu", **arguments) is None


def test_engine_cores_are_bounded_by_memory() -> None:
    need = TORCH_PROCESS_BYTES + 64 * 16 * MIB
    arguments = {"num_gpu_blocks_override": 64 * 16 * MIB // 4096}
    machine = replace(LARGE, memory=4 * need + MIB * 100)
    assert refusal(machine, data_parallel_size=4, **arguments) is None
    said = refusal(machine, data_parallel_size=5, **arguments)
    assert said is not None
    assert said.startswith(
        "data_parallel_size must be at most 4 here: an engine core takes at least 1.13 GiB of memory"
    )
    assert said.endswith(" GiB are free, got 5")
    # Of a GPU's memory, and of what an executor of one's own takes, nothing is known here.
    for unknown in ({"device": "cuda"}, {"distributed_executor_backend": "a.module:Class"}):
        assert refusal(machine, data_parallel_size=5, **arguments, **unknown) is None
    assert refusal(replace(machine, num_gpus=1), data_parallel_size=5, **arguments) is None


def test_in_lock_step_the_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_least_weights_bytes", lambda config: 1024 * MIB)
    machine = replace(LARGE, memory=1024 * MIB + 4 * TORCH_PROCESS_BYTES + MIB)
    assert refusal(machine, model="random-tiny-moe", data_parallel_size=4) is None
    said = refusal(machine, model="random-tiny-moe", data_parallel_size=8)
    assert said is not None
    assert said.startswith("data_parallel_size must be at most 4 here: ")
    assert "beside the 1 GiB of weights" in said
    assert (refusal(machine, data_parallel_size=2) or "").startswith(
        "data_parallel_size must be at most 1 here: "
    )


def test_workers_are_bounded_by_memory() -> None:
    machine = replace(LARGE, memory=3 * TORCH_PROCESS_BYTES + 10 * MIB)
    assert refusal(machine, tensor_parallel_size=2) is None
    said = refusal(machine, tensor_parallel_size=4)
    assert said is not None
    assert said.startswith(
        "tensor_parallel_size must be at most 3 here: each takes at least 128 MiB of memory, and 394 MiB"
    )


def test_requests_are_bounded_by_memory() -> None:
    said = refusal(replace(LARGE, memory=1 << 30), max_num_seqs=2**31 - 1)
    assert said is not None
    assert said.startswith(
        "max_num_seqs must be at most 16777216 here: each takes at least 64 bytes, and 1 GiB are free"
    )


def test_a_model_that_does_not_fit_at_all_is_refused_with_the_numbers(tmp_path: Path) -> None:
    asked = config()
    file = tmp_path / "model.safetensors"
    with file.open("wb") as sparse:
        sparse.truncate(64 << 30)
    large = replace(asked, model=replace(asked.model, weights=(str(file),)))
    with pytest.raises(
        EngineStartError, match=r"does not fit on cpu: its weights take about 48 GiB and 16 GiB are free"
    ):
        check_memory(large, load_hf_config(asked.model), replace(LARGE, memory=16 << 30))
    check_memory(large, load_hf_config(asked.model), replace(LARGE, memory=50 << 30))
    half = replace(large, model=replace(large.model, dtype="bfloat16"))
    check_memory(half, load_hf_config(asked.model), replace(LARGE, memory=26 << 30))


def test_a_kv_cache_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        EngineStartError,
        match=r"the KV cache does not fit on cpu \(2 workers together\): .* 1024 GiB are free",
    ):
        refusal(replace(LARGE, memory=1 << 40), tensor_parallel_size=2, kv_cache_memory_bytes=1 << 50)


@pytest.mark.parametrize("frontend", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ["data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"])
def test_a_million_is_refused_before_anything_is_fetched_or_started(
    frontend: type[LLM | AsyncLLM], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("something was done")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("nbengine.models.checkpoints.files.resolve_model", refuse)
    with pytest.raises(InvalidArgumentError, match=f"^{name} must be at most .* here: .*, got 1000000$"):
        frontend("random-tiny", **{name: 10**6})


def test_a_scaling_is_bounded_by_the_counts_and_by_the_memory_that_is_free_then() -> None:
    asked = config()
    assert scaling_refusal(asked, 2, 64, LARGE) is None
    assert scaling_refusal(asked, 2, 10**6, LARGE) == (
        f"data_parallel_size must be at most 64 here: {ON_2_CPUS}, got 1000000"
    )
    two_more = replace(LARGE, memory=2 * TORCH_PROCESS_BYTES + 50 * MIB)
    assert scaling_refusal(asked, 3, 5, two_more) is None
    said = scaling_refusal(asked, 3, 6, two_more)
    assert said is not None
    assert said.startswith(
        "data_parallel_size must be at most 5 here: each further engine core takes at least 12"
    )
    # To have fewer is always possible.
    assert scaling_refusal(asked, 80, 70, replace(LARGE, memory=0)) is None


def test_a_scaling_that_nobody_can_judge_says_why(tmp_path: Path) -> None:
    asked = config()
    gone = replace(asked, model=replace(asked.model, weights=(str(tmp_path / "gone"),)))
    assert "cannot read the weights of 'random-tiny'" in (scaling_refusal(gone, 1, 2, LARGE) or "")


def test_few_engine_cores_start_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = config(data_parallel_size=8).parallel
    for cpus, expected in ((1, LEAST_STARTING), (2, 2), (6, 6)):
        monkeypatch.setattr(capacity, "usable_cpus", lambda cpus=cpus: cpus)
        assert max_starting(here) == expected
    assert max_starting(config(data_parallel_backend="ray").parallel) == REMOTE_STARTING


@pytest.mark.parametrize(
    ("visible", "expected"), [("0,1,3", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8932f937, GPU-0", 2)]
)
def test_gpus_are_those_that_are_visible(
    visible: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Capacity.here().num_gpus == expected


def test_processes_are_limited_by_control_group_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text("4:pids:/a/b\n0::/unified\n")
    for path, limit, used in (("pids/a/b", "max", "7"), ("pids/a", "100", "40"), ("unified", "90", "20")):
        directory = tmp_path / "root" / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pids.max").write_text(f"{limit}\n")
        (directory / "pids.current").write_text(f"{used}\n")
    assert ControlGroup(tmp_path / "root", tmp_path / "membership").task_headroom() == 60
    assert ControlGroup(tmp_path / "absent", tmp_path / "absent").task_headroom() is None
    monkeypatch.setattr(capacity.resource, "getrlimit", lambda which: (10**6, 10**6))
    monkeypatch.setattr(capacity.os, "geteuid", lambda: 12345)
    assert capacity._user_headroom() == 10**6
