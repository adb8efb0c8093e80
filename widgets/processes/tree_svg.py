"""An engine's processes as a picture: frontends on top, host and engine cores, workers by stage and rank.

Text takes the colour of its surroundings, boxes take colours that show on light and on dark ground.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from nbengine.client.observe.process_usage import ProcessUsage
from nbengine.units import size
from nbengine.widgets.processes.tree import CoreNode, Link, ProcessTree, WorkerNode
from nbengine.widgets.processes.tree_text import (
    GONE,
    HOST,
    core_name,
    executor_words,
    frontend_name,
    narrow_usage_lines,
    stage_words,
    summary,
    usage_lines,
    worker_name,
    worker_parts,
)
from nbengine.widgets.svg import LINE, PAGE_STYLE, STANDALONE_SHEET, Drawing, Rect

WIDTH = 760.0
_BLUE, _PURPLE, _ORANGE, _GREEN, _GREY, _RED = (
    "#3b82f6",
    "#9b6dd6",
    "#d9822b",
    "#2f9e6e",
    "#8a8f98",
    "#e5484d",
)
_EDGE = 1.0
_PAD = 9.0
_GAP = 18.0
_BETWEEN = 26.0
"""The space between the boxes of a tensor-parallel group."""
_BOX_WIDTH = 236.0
_BOXES_A_ROW = 3
_WORKERS_A_ROW = 4
_WIRES = 64.0
"""The height of the space for the lines between two levels."""
_BUS = 14.0
"""The height in that space at which the frontends' lines meet."""
_LANE = 24.0
"""The width of the space beside the workers for the lines of further engine cores."""


def draw(tree: ProcessTree, *, standalone: bool = False) -> str:
    """Draw the picture as SVG; `standalone` gives it its own ground and text colour."""
    return _Picture(tree).render(standalone=standalone)


def page_part(tree: ProcessTree) -> str:
    """Draw the picture for a page, with the text below it for readers who cannot see or want to copy it."""
    # Where a page's SVG is removed, as in an untrusted notebook, its words stay: the font size 0 hides them.
    return (
        f'<div style="font-size:0">{draw(tree)}</div><details><summary>as text</summary>'
        f'<pre style="margin:0;overflow-x:auto;white-space:pre">{escape(str(tree))}</pre></details>'
    )


@dataclass(frozen=True, slots=True)
class _Label:
    """The text of a box: a heading and lines below it."""

    name: str
    lines: list[str]
    process: ProcessUsage | None
    color: str

    @property
    def is_gone(self) -> bool:
        return self.process is not None and not self.process.is_running

    @property
    def height(self) -> float:
        return (1 + len(self.lines)) * LINE + _PAD

    @property
    def tooltip(self) -> str:
        title = self.process.title if self.process is not None else ""
        return "\n".join(filter(None, [self.name, *self.lines, title]))


class _Picture:
    """A drawing of the tree, laid out from top to bottom; `_y` is how far down it has come."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._links = tree.links
        self._drawing = Drawing()
        self._y = _EDGE
        self._right = WIDTH - (_LANE if len(tree.cores) > 1 else _EDGE)

    def render(self, *, standalone: bool) -> str:
        """Draw the whole picture."""
        tree = self._tree
        self._drawing.text(_EDGE, self._y + 12, summary(tree), width=WIDTH - 2 * _EDGE, bold=True)
        self._y += LINE + _PAD
        if tree.host is None:
            (core,) = tree.cores
            x = self._right - _BOX_WIDTH if core.outside else (WIDTH - _BOX_WIDTH) / 2
            self._core(core, _core_label(core, f"frontend and engine core {core.rank}"), x)
        else:
            self._engine(tree.host)
        self._row([_plain_label("process", process, _GREY) for process in tree.others])
        style, sheet = ("", STANDALONE_SHEET) if standalone else (PAGE_STYLE, "")
        return self._drawing.render(WIDTH, self._y, summary(tree), str(tree), style=style, sheet=sheet)

    def _engine(self, host: ProcessUsage) -> None:
        tree = self._tree
        ports = [(rect.center, rect.bottom) for rect in self._row(_frontend_labels(tree))]
        if ports:
            self._y += _WIRES - _GAP
        bus = ports[0][1] + _BUS if ports else 0.0
        host_rect = Rect(_EDGE, self._y, _BOX_WIDTH, _plain_label(HOST, host, _PURPLE).height)
        self._box(host_rect, _plain_label(HOST, host, _PURPLE))
        centers = [*(x for x, _ in ports), host_rect.center]
        for core in tree.cores:
            rect = self._core(core, _core_label(core), self._right - _BOX_WIDTH, beside=host_rect)
            self._control(host_rect, rect, self._link("control", core.process.pid))
            if ports:
                centers.append(rect.center if core is tree.cores[0] else WIDTH - 4)
                self._requests(rect, centers[-1], bus, self._link("requests", core.process.pid))
        if ports:
            self._bus(ports, bus, centers, host_rect, self._link("host", host.pid))

    # Boxes.

    def _row(self, labels: Sequence[_Label]) -> list[Rect]:
        """Draw boxes side by side in the middle, at most `_BOXES_A_ROW` in a row, and return their places."""
        rects: list[Rect] = []
        for start in range(0, len(labels), _BOXES_A_ROW):
            row = labels[start : start + _BOXES_A_ROW]
            height = max(label.height for label in row)
            x = (WIDTH - len(row) * (_BOX_WIDTH + _GAP) + _GAP) / 2
            for label in row:
                rects.append(Rect(x, self._y, _BOX_WIDTH, height))
                self._box(rects[-1], label)
                x += _BOX_WIDTH + _GAP
            self._y += height + _GAP
        return rects

    def _box(self, rect: Rect, label: _Label) -> None:
        drawing = self._drawing
        width = rect.width - 2 * _PAD
        data = {} if label.process is None else {"pid": label.process.pid}
        drawing.open_group(label.tooltip, **data)
        drawing.box(rect, _RED if label.is_gone else label.color, dashed=label.is_gone)
        if label.is_gone:
            drawing.cross(rect, _RED)
        x, y = rect.x + _PAD, rect.y + LINE + 1
        drawing.text(x, y, label.name, width=width, bold=True, muted=label.is_gone)
        for line in label.lines:
            y += LINE
            is_alarm = line == GONE
            drawing.text(x, y, line, width=width, bold=is_alarm, muted=not is_alarm)
        drawing.close_group()

    def _core(self, core: CoreNode, label: _Label, x: float, beside: Rect | None = None) -> Rect:
        """Draw an engine core and its workers below it; the first one stands beside the host."""
        rect = Rect(x, self._y, _BOX_WIDTH, label.height)
        self._box(rect, label)
        self._y = max(rect.bottom, beside.bottom if beside else 0.0)
        if core.outside:
            self._queues(rect, self._link("queues", *_pids(core.outside)))
            self._workers(core)
        self._y += _GAP
        return rect

    def _workers(self, core: CoreNode) -> None:
        top = self._y
        self._y += LINE + _PAD
        centers: list[float] = []
        for stage in core.stages:
            if centers:
                self._pipeline(centers, self._link("pipeline", *_pids(stage)))
            centers = self._stage(stage, _LANE + _PAD, self._right - _LANE - 2 * _PAD)
        rect = Rect(_LANE, top, self._right - _LANE, self._y + _PAD - top)
        self._drawing.text(rect.x + _PAD, top + LINE, executor_words(core), width=rect.width - 2 * _PAD)
        self._drawing.box(rect, _GREY, opacity=0)
        self._y = rect.bottom

    def _stage(self, stage: Sequence[WorkerNode], x: float, width: float) -> list[float]:
        """Draw a stage's workers in a frame, and return the middles of the columns."""
        top, inner = self._y, width - 2 * _PAD
        self._drawing.text(x + _PAD, top + LINE, stage_words(stage), width=inner / 2, bold=True)
        self._y += LINE + _PAD
        columns = min(len(stage), _WORKERS_A_ROW)
        box_width = min(_BOX_WIDTH, (inner - (columns - 1) * _BETWEEN) / columns)
        step = box_width + _BETWEEN
        left = x + (width - columns * step + _BETWEEN) / 2
        for start in range(0, len(stage), columns):
            self._worker_row(stage[start : start + columns], left, box_width)
        self._y += _PAD - _GAP
        if len(stage) > 1:
            link = self._link("tensor", *_pids(stage))
            self._channels(link, x + width - _PAD, top + LINE, inner / 2, "end")
        self._drawing.box(Rect(x, top, width, self._y - top), _GREY, opacity=0.04)
        return [left + column * step + box_width / 2 for column in range(columns)]

    def _worker_row(self, workers: Sequence[WorkerNode], x: float, box_width: float) -> None:
        labels = [_worker_label(worker) for worker in workers]
        height = max(label.height for label in labels)
        before = workers[0].process
        for worker, label in zip(workers, labels, strict=True):
            rect = Rect(x, self._y, box_width, height)
            self._box(rect, label)
            if worker is not workers[0]:
                link = self._link("tensor", worker.process.pid)
                both = before.is_running and worker.process.is_running
                link = replace(link, is_intact=both)
                self._wire(link, (x - _BETWEEN + 1, rect.middle), (x - 1, rect.middle), start=True)
            x += box_width + _BETWEEN
            before = worker.process
        self._y += height + _GAP

    # Lines. A line whose other end has ended is dashed, and its channels are not named.

    def _link(self, kind: str, *pids: int) -> Link:
        return next(
            link for link in self._links if link.kind == kind and not set(pids).isdisjoint(link.targets)
        )

    def _wire(self, link: Link, *points: tuple[float, float], start: bool = False, end: bool = True) -> None:
        self._drawing.line(*points, start=start, end=end, dashed=not link.is_intact)

    def _channels(self, link: Link, x: float, y: float, width: float, anchor: str = "start") -> None:
        if link.is_intact:
            for number, channel in enumerate(link.channels):
                line = y + number * LINE
                self._drawing.text(x, line, channel, width=width, anchor=anchor, muted=True)

    def _bus(
        self,
        ports: Sequence[tuple[float, float]],
        bus: float,
        centers: Sequence[float],
        host: Rect,
        link: Link,
    ) -> None:
        for x, y in ports:
            self._wire(link, (x, bus), (x, y + 1))
        self._wire(link, (min(centers), bus), (max(centers), bus), end=False)
        self._wire(link, (host.center, bus), (host.center, host.y - 1))
        self._channels(link, host.center + 8, bus + LINE, WIDTH / 3)

    def _requests(self, core: Rect, x: float, bus: float, link: Link) -> None:
        if x > core.right:
            self._wire(link, (x, bus), (x, core.middle), (core.right + 1, core.middle))
        else:
            self._wire(link, (x, bus), (x, core.y - 1))
            self._channels(link, x - 8, bus + LINE, WIDTH / 3, "end")

    def _control(self, host: Rect, core: Rect, link: Link) -> None:
        y = core.y + 2 * LINE
        if y < host.bottom:
            self._wire(link, (host.right + 1, y), (core.x - 1, y), start=True)
        else:
            x = host.x + _PAD
            self._wire(link, (x, host.bottom + 1), (x, y), (core.x - 1, y), start=True)
        middle, width = (host.right + core.x) / 2, core.x - host.right - 2 * _PAD
        above, below = replace(link, channels=link.channels[:1]), replace(link, channels=link.channels[1:])
        self._channels(above, middle, y - 6, width, "middle")
        self._channels(below, middle, y + LINE, width, "middle")

    def _queues(self, core: Rect, link: Link) -> None:
        top, self._y = core.bottom + 1, self._y + LINE * 2 + _GAP
        down, up = core.center - 8, core.center + 8
        self._wire(link, (down, top), (down, self._y - 1))
        self._wire(link, (up, self._y - 1), (up, top))
        requests, answers = link.channels
        arrowed = replace(link, channels=(f"{requests} ↓", f"{answers} ↑"))
        self._channels(arrowed, down - 8, self._y - LINE - _PAD, down - 8 - _LANE, "end")

    def _pipeline(self, centers: Sequence[float], link: Link) -> None:
        top, self._y = self._y, self._y + 2 * LINE
        for x in centers:
            self._wire(link, (x, top + 1), (x, self._y - 1))
        room = centers[1] - centers[0] if len(centers) > 1 else WIDTH / 2
        self._channels(link, centers[0] + 10, (top + self._y) / 2 + 4, room - 20)


def _pids(workers: Sequence[WorkerNode]) -> list[int]:
    return [worker.process.pid for worker in workers]


def _frontend_labels(tree: ProcessTree) -> list[_Label]:
    shown = tree.frontends
    rest: Sequence[ProcessUsage] = ()
    if len(shown) > _BOXES_A_ROW:
        shown, rest = shown[: _BOXES_A_ROW - 1], shown[_BOXES_A_ROW - 1 :]
    labels = [_plain_label(frontend_name(tree, process), process, _BLUE) for process in shown]
    if rest:
        pids = ", ".join(str(process.pid) for process in rest)
        labels.append(_Label(f"{len(rest)} more frontends", [f"pids {pids}"], None, _BLUE))
    return labels


def _plain_label(name: str, process: ProcessUsage, color: str) -> _Label:
    lines = usage_lines(process)
    return _Label(name, [*lines, process.title] if process.title else lines, process, color)


def _core_label(core: CoreNode, name: str = "") -> _Label:
    label = _plain_label(name or core_name(core), core.process, _ORANGE)
    if core.process.is_running and not core.outside:
        parts = [part for worker in core.workers for part in worker_parts(worker)]
        label.lines[2:2] = [", ".join(parts[start : start + 2]) for start in range(0, len(parts), 2)]
    return label


def _worker_label(worker: WorkerNode) -> _Label:
    pid, *figures = narrow_usage_lines(worker.process)
    if worker.process.is_running:
        info = worker.info
        figures = [f"weights {size(info.weights_bytes)}", f"KV cache {size(info.kv_cache_bytes)}", *figures]
        pid = f"{pid}, {info.device}"
    return _Label(worker_name(worker), [pid, *figures], worker.process, _GREEN)
