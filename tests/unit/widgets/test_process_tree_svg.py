"""The picture of the process tree: well-formed, escaped, and nothing lies upon anything else.

The places are read from the SVG, with the width that a character has in the usual monospaced fonts.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from xml.etree import ElementTree

import pytest

from nbengine.widgets.processes.tree import ProcessTree
from nbengine.widgets.svg import fitted, text_width
from tests.unit.widgets.trees import FIRST_CORE, HOST, make_tree, usage

SVG = "{http://www.w3.org/2000/svg}"
CHARACTER = 12 * 0.602
ABOVE, BELOW = 10.0, 3.0
"""Pixels that letters reach above and below their base line."""

TREES = {
    "no worker process": make_tree(inside=True),
    "one worker": make_tree(),
    "two": make_tree(2, 1),
    "three": make_tree(3, 1, frontends=2),
    "four": make_tree(4, 1, frontends=3),
    "eight": make_tree(8, 1, frontends=7),
    "a pipeline": make_tree(1, 4, frontends=0),
    "two by two": make_tree(2, 2),
    "five by three": make_tree(5, 3, others=2),
    "eight by two": make_tree(8, 2, device="cuda", first_pid=4_194_000),
    "two engine cores": make_tree(2, 2, 2, frontends=3),
    "three engine cores, workers inside": make_tree(1, 1, 3, inside=True),
    "in the frontend": make_tree(inside=True, alone=True),
    "in the frontend, with workers": make_tree(4, 2, alone=True),
    "a worker gone": make_tree(4, 2, gone={FIRST_CORE + 2}),
    "all gone": make_tree(2, 2, gone=range(HOST, HOST + 100)),
    "long names": make_tree(3, 2, name="a-very-long-name-" * 12, others=4),
}


@dataclass(frozen=True)
class Area:
    """A rectangle and what it is."""

    what: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Area) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Area) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and self.right >= other.right
            and self.bottom >= other.bottom
        )


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "0"))


def area_of_rect(element: ElementTree.Element, what: str) -> Area:
    x, y = number(element, "x"), number(element, "y")
    return Area(what, x, y, x + number(element, "width"), y + number(element, "height"))


def area_of_text(element: ElementTree.Element) -> Area:
    text = element.text or ""
    width = len(text) * CHARACTER
    x, y = number(element, "x"), number(element, "y")
    left = {"start": x, "middle": x - width / 2, "end": x - width}[element.get("text-anchor", "start")]
    return Area(text, left, y - ABOVE, left + width, y + BELOW)


def areas_of_line(element: ElementTree.Element) -> list[Area]:
    points = [tuple(map(float, point.split(","))) for point in element.get("points", "").split()]
    return [
        Area("line", min(x0, x1), min(y0, y1), max(x0, x1) + 0.1, max(y0, y1) + 0.1)
        for (x0, y0), (x1, y1) in itertools.pairwise(points)
    ]


@dataclass
class Picture:
    """The places of all that is drawn."""

    whole: Area
    boxes: list[tuple[Area, list[Area]]]
    """Of each process, with its lines of text."""
    frames: list[Area]
    labels: list[Area]
    """Text outside of boxes."""
    lines: list[Area]


def parse(svg: str) -> Picture:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = []
    for group in root.iter(f"{SVG}g"):
        (rect,) = group.findall(f"{SVG}rect")
        boxes.append((area_of_rect(rect, "box"), list(map(area_of_text, group.findall(f"{SVG}text")))))
    return Picture(
        Area("whole", 0, 0, width, height),
        boxes,
        [area_of_rect(rect, "frame") for rect in root.findall(f"{SVG}rect")],
        [area_of_text(text) for text in root.findall(f"{SVG}text")],
        [area for line in root.findall(f"{SVG}polyline") for area in areas_of_line(line)],
    )


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_nothing_lies_upon_anything_else(tree: ProcessTree) -> None:
    picture = parse(tree.svg())
    boxes = [box for box, _ in picture.boxes]
    texts = picture.labels + [text for _, texts in picture.boxes for text in texts]
    for first, second in itertools.combinations(texts, 2):
        assert not first.overlaps(second)
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)
    for box, texts in picture.boxes:
        assert all(box.holds(text) for text in texts)
    for label in picture.labels:
        assert not any(box.overlaps(label) for box in boxes)
    for frame in picture.frames:
        assert all(frame.holds(box) or not frame.overlaps(box) for box in boxes)
        assert all(frame.holds(label) or not frame.overlaps(label) for label in picture.labels)
    for line in picture.lines:
        assert not any(area.overlaps(line) for area in boxes + picture.labels)
    for area in boxes + texts + picture.frames + picture.lines:
        assert picture.whole.holds(area)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_every_process_has_a_box_with_its_pid(tree: ProcessTree) -> None:
    root = ElementTree.fromstring(tree.svg())
    drawn = [int(group.get("data-pid", "0")) for group in root.iter(f"{SVG}g")]
    listed = re.findall(r"pids ([\d, ]+)", "\n".join(root.itertext()))
    shown = {pid for pid in drawn if pid} | {int(pid) for pids in listed for pid in pids.split(", ")}
    assert shown == {process.pid for process in tree.processes}
    assert len(drawn) == len(set(drawn))


def test_a_process_that_is_gone_is_crossed_out_in_red_and_its_lines_are_dashed() -> None:
    root = ElementTree.fromstring(make_tree(2, 1, gone={FIRST_CORE + 2}).svg())
    groups = {int(group.get("data-pid", "0")): group for group in root.iter(f"{SVG}g")}
    crossed = [pid for pid, group in groups.items() if group.find(f"{SVG}path") is not None]
    assert crossed == [FIRST_CORE + 2]
    rect = groups[FIRST_CORE + 2].find(f"{SVG}rect")
    assert rect is not None
    assert rect.get("stroke-dasharray")
    assert "✗ gone" in "".join(groups[FIRST_CORE + 2].itertext())
    ended = ElementTree.fromstring(make_tree(2, 2, gone=range(HOST, HOST + 100)).svg())
    assert all(line.get("stroke-dasharray") for line in ended.iter(f"{SVG}polyline"))
    assert "sock" not in "".join(ended.itertext())


HOSTILE = """</text></svg><script>alert("1")</script>&amp;<!-- ' " -->]]>"""


@pytest.mark.parametrize("name", ["two by two", "eight by two", "two engine cores", "a pipeline"])
def test_what_connects_processes_is_not_cut(name: str) -> None:
    texts = [text.text for text in ElementTree.fromstring(TREES[name].svg()).findall(f"{SVG}text")]
    for link in TREES[name].links:
        for channel in link.channels:
            assert any(channel in (text or "") for text in texts)


def test_hostile_names_stay_text() -> None:
    tree = make_tree(2, 1, name=HOSTILE, others=1)
    tree = replace(tree, others=(usage(7, HOSTILE),), frontends=(usage(8, HOSTILE),))
    for svg in (tree.svg(), tree.html().removeprefix('<div style="font-size:0">').partition("</div>")[0]):
        root = ElementTree.fromstring(svg)
        assert not list(root.iter(f"{SVG}script"))
        assert HOSTILE[:20] in "".join(root.itertext())
        assert HOSTILE in root.get("aria-label", "")
    assert "<script" not in tree.html()
    assert "<script" not in tree.svg()


def test_it_can_be_read_aloud_and_takes_the_colours_of_its_place() -> None:
    tree = make_tree(2, 2)
    root = ElementTree.fromstring(tree.svg())
    assert root.get("role") == "img"
    assert root.get("aria-label") == str(tree).splitlines()[0]
    description = root.find(f"{SVG}desc")
    assert description is not None
    assert description.text == str(tree)
    assert {text.get("fill") for text in root.iter(f"{SVG}text")} == {"currentColor"}
    assert "prefers-color-scheme:dark" in tree.svg()
    assert "color:" not in root.get("style", "")
    assert "prefers-color-scheme" not in tree.html()
    assert "http" not in tree.html().replace("http://www.w3.org/2000/svg", "")


def test_the_bundle_has_the_picture_and_the_text() -> None:
    tree = make_tree(2, 2)
    bundle = tree._repr_mimebundle_(include=None, exclude=None)
    assert bundle == {"text/plain": str(tree), "text/html": tree.html(), "image/svg+xml": tree.svg()}
    assert sum(map(len, bundle.values())) < 40_000


@pytest.mark.parametrize("width", [8, 20, 50, 100, 500])
@pytest.mark.parametrize("text", ["", "x", "nbengine: core 0", "日本語の長い名前" * 4, "a" * 300])
def test_text_is_cut_to_fit(text: str, width: float) -> None:
    cut = fitted(text, width)
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1].rstrip()))
    assert text_width(cut) <= width or cut == "…"
    assert (cut == text) == (text_width(text) <= width)
