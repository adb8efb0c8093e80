"""An engine's processes as a picture: frontends on top, host and engine cores, workers by stage and rank.

Text takes the colour of what is around it, boxes take colours that show on light and on dark ground.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nbengine.client.process_usage import ProcessUsage
from nbengine.units import size
from nbengine.widgets.process_tree import CoreNode, Link, ProcessTree, WorkerNode
from nbengine.widgets.process_tree_text import (
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
from nbengine.widgets.svg import LINE, Drawing, Rect

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
_NEIGHBOURS = 26.0
"""Between the boxes of a tensor-parallel group."""
_BOX_WIDTH = 236.0
_BOXES_A_ROW = 3
_WORKERS_A_ROW = 4
_WIRES = 64.0
"""Height of the space for the lines between two levels."""
_BUS = 14.0
"""Where in it the frontends' lines meet."""
_LANE = 24.0
"""Width of the space beside the workers for the lines of further engine cores."""
_STANDALONE = (
    "<style>svg{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e8eb;background:#14171a}}</style>"
)


def draw(tree: ProcessTree, *, standalone: bool = False) -> str:
    """The picture as SVG; `standalone` gives it a ground and a text colour of its own."""
    return _Picture(tree).render(_STANDALONE if standalone else "")


def html(tree: ProcessTree, plain: str) -> str:
    """The picture for a page, and below it the text for whoever cannot see it or wants to copy it."""
    # Where a page's SVG is taken out, as in a notebook that is not trusted, its words stay: without size, unseen.
    return (
        f'<div style="font-size:0">{draw(tree)}</div><details><summary>as text</summary>'
        f'<pre style="margin:0;overflow-x:auto">{escape(plain)}</pre></details>'
    )


@dataclass(frozen=True, slots=True)
class _Label:
    """What a box says: a heading and lines below it."""

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
    """Lays the tree out from top to bottom while it draws it; `_y` is how far down it has come."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._drawing = Drawing()
        self._y = _EDGE
        self._right = WIDTH - (_LANE if len(tree.cores) > 1 else _EDGE)

    def render(self, style: str) -> str:
        """The whole picture."""
        tree = self._tree
        self._drawing.text(_EDGE, self._y + 12, summary(tree), width=WIDTH - 2 * _EDGE, bold=True)
        self._y += LINE + _PAD
        if tree.host is None:
            (core,) = tree.cores
            x = self._right - _BOX_WIDTH if core.outside else (WIDTH - _BOX_WIDTH) / 2
            self._core(core, _core_label(core, "frontend, "), x)
        else:
            self._engine(tree.host)
        self._row([_plain_label("process", process, _GREY) for process in tree.others])
        return self._drawing.render(WIDTH, self._y, summary(tree), str(tree), style)

    def _engine(self, host: ProcessUsage) -> None:
        tree = self._tree
        ports = [(rect.center, rect.bottom) for rect in self._row(_frontend_labels(tree))]
        if ports:
            self._y += _WIRES - _GAP
        bus = ports[0][1] + _BUS if ports else 0.0
        label = _plain_label(HOST, host, _PURPLE)
        host_rect = Rect(_EDGE, self._y, _BOX_WIDTH, label.height)
        self._box(host_rect, label)
        centers = [x for x, _ in ports] + [host_rect.center]
        for core in tree.cores:
            is_first = core is tree.cores[0]
            rect = self._core(core, _core_label(core), self._right - _BOX_WIDTH, beside=host_rect)
            self._control(host_rect, rect, self._link("control", core), is_first=is_first)
            if ports:
                x = rect.center if is_first else WIDTH - 4
                centers.append(x)
                self._requests(rect, x, bus, self._link("requests", core), is_first=is_first)
        if ports:
            self._bus(ports, bus, centers, host_rect)

    # Boxes.

    def _row(self, labels: Sequence[_Label]) -> list[Rect]:
        """Boxes side by side in the middle, `_BOXES_A_ROW` at most in a row; returns where they are."""
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
            if line == GONE:
                drawing.text(x, y, line, width=width, bold=True, color=_RED)
            else:
                drawing.text(x, y, line, width=width, muted=True)
        drawing.close_group()

    def _core(self, core: CoreNode, label: _Label, x: float, beside: Rect | None = None) -> Rect:
        """An engine core and what is below it; the first one stands beside the host."""
        rect = Rect(x, self._y, _BOX_WIDTH, label.height)
        self._box(rect, label)
        self._y = max(rect.bottom, beside.bottom if beside else 0.0)
        if core.outside:
            self._queues(rect, self._link("queues", core))
            self._workers(core)
        self._y += _GAP
        return rect

    def _workers(self, core: CoreNode) -> None:
        stages = core.stages
        top = self._y
        self._y += LINE + _PAD
        x = _LANE + _PAD
        width = self._right - _PAD - x
        centers: list[float] = []
        for index, stage in enumerate(stages):
            if index:
                self._pipeline(centers, self._link("pipeline", core))
            centers = self._stage(core, stage, x, width)
        rect = Rect(_LANE, top, self._right - _LANE, self._y + _PAD - top)
        self._drawing.text(rect.x + _PAD, top + LINE, executor_words(core), width=rect.width - 2 * _PAD)
        self._drawing.box(rect, _GREY, opacity=0)
        self._y = rect.bottom

    def _stage(self, core: CoreNode, stage: Sequence[WorkerNode], x: float, width: float) -> list[float]:
        """A stage's workers in a frame; returns where the columns' middles are."""
        drawing = self._drawing
        top = self._y
        channel = self._link("tensor", core).channels[0] if len(stage) > 1 else ""
        words = stage_words(stage)
        inner = width - 2 * _PAD
        drawing.text(x + _PAD, top + LINE, words, width=inner / 2, bold=True)
        drawing.text(x + width - _PAD, top + LINE, channel, width=inner / 2, anchor="end", muted=True)
        columns = min(len(stage), _WORKERS_A_ROW)
        box_width = min(_BOX_WIDTH, (inner - (columns - 1) * _NEIGHBOURS) / columns)
        left = x + (width - columns * (box_width + _NEIGHBOURS) + _NEIGHBOURS) / 2
        self._y += LINE + _PAD
        labels = [_worker_label(worker) for worker in stage]
        height = max(label.height for label in labels)
        for number, label in enumerate(labels):
            row, column = divmod(number, columns)
            rect = Rect(
                left + column * (box_width + _NEIGHBOURS), self._y + row * (height + _GAP), box_width, height
            )
            self._box(rect, label)
            if column:
                drawing.line(
                    (rect.x - _NEIGHBOURS + 1, rect.middle), (rect.x - 1, rect.middle), start=True, end=True
                )
        rows = -(-len(stage) // columns)
        self._y += rows * (height + _GAP) - _GAP + _PAD
        drawing.box(Rect(x, top, width, self._y - top), _GREY, opacity=0.04)
        return [left + column * (box_width + _NEIGHBOURS) + box_width / 2 for column in range(columns)]

    # Lines.

    def _link(self, kind: str, core: CoreNode) -> Link:
        pids = {core.process.pid, *(worker.process.pid for worker in core.outside)}
        return next(link for link in self._tree.links if link.kind == kind and pids & set(link.targets))

    def _bus(
        self, ports: Sequence[tuple[float, float]], bus: float, centers: Sequence[float], host: Rect
    ) -> None:
        for x, y in ports:
            self._drawing.line((x, bus), (x, y + 1), end=True)
        self._drawing.line((min(centers), bus), (max(centers), bus))
        self._drawing.line((host.center, bus), (host.center, host.y - 1), end=True)
        (link,) = (link for link in self._tree.links if link.kind == "host")
        for number, channel in enumerate(link.channels):
            y = bus + (number + 1) * LINE
            self._drawing.text(host.center + 8, y, channel, width=WIDTH / 3, muted=True)

    def _requests(self, core: Rect, x: float, bus: float, link: Link, *, is_first: bool) -> None:
        if not is_first:
            self._drawing.line((x, bus), (x, core.middle), (core.right + 1, core.middle), end=True)
            return
        self._drawing.line((x, bus), (x, core.y - 1), end=True)
        for number, channel in enumerate(link.channels):
            y = bus + (number + 1) * LINE
            self._drawing.text(x - 8, y, channel, width=WIDTH / 3, anchor="end", muted=True)

    def _control(self, host: Rect, core: Rect, link: Link, *, is_first: bool) -> None:
        y = core.y + 2 * LINE
        left = host.right if is_first else host.x + _PAD
        if is_first:
            self._drawing.line((left + 1, y), (core.x - 1, y), start=True, end=True)
        else:
            self._drawing.line((left, host.bottom + 1), (left, y), (core.x - 1, y), start=True, end=True)
        middle = (max(left, host.right) + core.x) / 2
        width = core.x - host.right - 2 * _PAD
        for number, channel in enumerate(link.channels):
            base = y - 6 if number == 0 else y + number * LINE
            self._drawing.text(middle, base, channel, width=width, anchor="middle", muted=True)

    def _queues(self, core: Rect, link: Link) -> None:
        top, self._y = core.bottom + 1, self._y + LINE * 2 + _GAP
        down, up = core.center - 8, core.center + 8
        self._drawing.line((down, top), (down, self._y - 1), end=True)
        self._drawing.line((up, top), (up, self._y - 1), start=True)
        for number, (arrow, channel) in enumerate(zip("↓↑", link.channels, strict=True)):
            y = self._y - LINE * (1 - number) - _PAD
            width = down - 8 - _LANE
            self._drawing.text(down - 8, y, f"{channel} {arrow}", width=width, anchor="end", muted=True)

    def _pipeline(self, centers: Sequence[float], link: Link) -> None:
        top, self._y = self._y, self._y + 2 * LINE
        for x in centers:
            self._drawing.line((x, top + 1), (x, self._y - 1), end=True)
        room = centers[1] - centers[0] if len(centers) > 1 else WIDTH / 2
        y = (top + self._y) / 2 + 4
        self._drawing.text(centers[0] + 10, y, link.channels[0], width=room - 20, muted=True)


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


def _core_label(core: CoreNode, prefix: str = "") -> _Label:
    label = _plain_label(prefix + core_name(core), core.process, _ORANGE)
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
