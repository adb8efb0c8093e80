"""An engine's processes as a tree of text, and the words for them that the picture uses, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nbengine.client.observe.process_usage import ProcessUsage
from nbengine.units import size
from nbengine.widgets.processes.tree import CoreNode, Link, ProcessTree, WorkerNode

GONE = "✗ gone"
HOST = "host, coordinator"
_SERVER_TITLE = "nbengine: serve"
"""The beginning of the titles of processes that answer over HTTP, of `%engine serve` and of `nbengine serve`."""


def text_tree(tree: ProcessTree) -> str:
    """Render the processes, each below the one that has started it, and their connections."""
    rows = [_row(frontend_name(tree, process), process) for process in tree.frontends]
    if tree.host is not None:
        rows.append(_row(HOST, tree.host))
    for core in tree.cores:
        is_last = core is tree.cores[-1] and not tree.others
        stem, below = ("", "") if tree.host is None else ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        rows += _core_rows(core, stem, below)
    for process in tree.others:
        stem = "└─ " if process is tree.others[-1] else "├─ "
        rows.append(_row(f"{stem}process", process, process.title))
    links = [[_ends(tree, link), "; ".join(link.channels)] for link in _joined(tree.links)]
    return "\n".join([summary(tree), *_columns(rows), *([""] if links else []), *_columns(links)])


def _joined(links: Sequence[Link]) -> list[Link]:
    """Join the intact links that have the same sources and the same kind of channels."""
    groups: dict[tuple[object, ...], Link] = {}
    for link in links:
        if not link.is_intact:
            continue
        joins = link.kind in ("requests", "control")
        key = (link.kind, link.sources, link.channels) if joins else (link,)
        before = groups.get(key)
        groups[key] = link if before is None else replace(before, targets=before.targets + link.targets)
    return list(groups.values())


def summary(tree: ProcessTree) -> str:
    """Describe the tree in one line: the engine, its model, its sizes, and the number of its processes."""
    own = tree.engine_processes or tree.processes
    running = sum(process.is_running for process in own)
    gone = f", {len(own) - running} gone" if running < len(own) else ""
    processes = f"{running} process{'' if running == 1 else 'es'}"
    return f"engine {tree.engine}: model {tree.model}, {sizes(tree)}, {processes}{gone}"


def sizes(tree: ProcessTree) -> str:
    """Format the sizes, as in `TP 2 × PP 2`."""
    parallel = tree.parallel
    parts = [f"TP {parallel.tensor_parallel_size}", f"PP {parallel.pipeline_parallel_size}"]
    if parallel.data_parallel_size > 1:
        parts.append(f"DP {parallel.data_parallel_size}")
    return " × ".join(parts)


def usage_lines(process: ProcessUsage) -> list[str]:
    """Format the pid and the resources that the process uses, as far as they are known, in two lines."""
    memory, cpu, threads = _figures(process)
    first = ", ".join(filter(None, [_pid(process), threads]))
    return [first, ", ".join(filter(None, [memory, cpu]))]


def narrow_usage_lines(process: ProcessUsage) -> list[str]:
    """Format pid and resources without threads, in shorter lines."""
    memory, cpu, _ = _figures(process)
    return [_pid(process), *filter(None, [memory, cpu])]


def frontend_name(tree: ProcessTree, process: ProcessUsage) -> str:
    """Return the name of a process with a client."""
    if process.pid == tree.own_pid:
        return "frontend (this process)"
    return "frontend (server)" if process.title.startswith(_SERVER_TITLE) else "frontend"


def core_name(core: CoreNode) -> str:
    """Return the name of the process of an engine core."""
    return f"engine core {core.rank}" + ("" if core.outside else ", worker")


def worker_name(worker: WorkerNode) -> str:
    """Return a worker's rank and its place in the grid."""
    return f"worker {worker.info.rank}: TP{worker.info.tp_rank} PP{worker.info.pp_rank}"


def worker_parts(worker: WorkerNode) -> list[str]:
    """List a worker's device, its layers and the memory that it holds there."""
    info = worker.info
    parts = [info.device]
    if info.num_layers:
        parts.append(layers_words(info.first_layer, info.num_layers))
    parts.append(f"weights {size(info.weights_bytes)}")
    if info.kv_cache_bytes:
        parts.append(f"KV {size(info.kv_cache_bytes)}")
    return parts


def layers_words(first: int, count: int) -> str:
    """Format layers, as in `layers 0–14`."""
    return f"layer {first}" if count == 1 else f"layers {first}–{first + count - 1}"


def stage_words(stage: Sequence[WorkerNode]) -> str:
    """Describe the part of the model that the workers of a stage have."""
    info = stage[0].info
    layers = f", {layers_words(info.first_layer, info.num_layers)}" if info.num_layers else ""
    return f"stage {info.pp_rank}{layers}"


def executor_words(core: CoreNode) -> str:
    """Describe the executor with which an engine core reaches its workers."""
    number = len(core.outside)
    return f"MultiprocExecutor of engine core {core.rank}: {number} worker{'s' if number > 1 else ''}"


def _pid(process: ProcessUsage) -> str:
    return f"pid {process.pid}, stopped" if process.is_stopped else f"pid {process.pid}"


def _figures(process: ProcessUsage) -> tuple[str, str, str]:
    if not process.is_running:
        return GONE, "", ""
    threads = process.num_threads
    return (
        "" if process.memory_bytes is None else f"resident {size(process.memory_bytes)}",
        "" if process.cpu_seconds is None else f"CPU {process.cpu_seconds:.1f} s",
        "" if threads is None else "1 thread" if threads == 1 else f"{threads} threads",
    )


def _row(name: str, process: ProcessUsage, details: str = "") -> list[str]:
    return [name, _pid(process), *_figures(process), details if process.is_running else ""]


def _core_rows(core: CoreNode, stem: str, below: str) -> Iterator[list[str]]:
    inside = [part for worker in core.workers for part in worker_parts(worker) if not core.outside]
    yield _row(f"{stem}{core_name(core)}", core.process, ", ".join(inside))
    for worker in core.outside:
        twig = "└─ " if worker is core.outside[-1] else "├─ "
        yield _row(f"{below}{twig}{worker_name(worker)}", worker.process, ", ".join(worker_parts(worker)))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()
        for row in rows
    ]


def _ends(tree: ProcessTree, link: Link) -> str:
    """Name the ends of a link, as in `engine core 0 ↔ workers 0, 1`."""
    names = _names(tree)
    sources, targets = (_several(pids, names) for pids in (link.sources, link.targets))
    if link.kind == "tensor":
        return sources
    return f"{sources} {'→' if link.kind == 'pipeline' else '↔'} {targets}"


def _names(tree: ProcessTree) -> dict[int, str]:
    names = {process.pid: "frontend" for process in tree.frontends}
    for core in tree.cores:
        names[core.process.pid] = f"engine core {core.rank}"
        names |= {worker.process.pid: f"worker {worker.info.rank}" for worker in core.outside}
    if tree.host is not None:
        names[tree.host.pid] = "host"
    return names


def _several(pids: Sequence[int], names: dict[int, str]) -> str:
    if len(pids) == 1:
        return names[pids[0]]
    first, last = names[pids[0]], names[pids[-1]]
    if first == last:
        return f"{len(pids)} {first}s"
    kind, _, number = first.rpartition(" ")
    joint = ", " if len(pids) == 2 else "–"
    return f"{kind}s {number}{joint}{last.rpartition(' ')[2]}"
